"""The descriptor set for programs that load services, and the HTTP rules in it."""

from __future__ import annotations

import re
from typing import Any

import pytest
from google.api import annotations_pb2
from google.protobuf.descriptor_pb2 import FileDescriptorProto, MethodOptions
from google.protobuf.descriptor_pool import DescriptorPool

from cupaged.server.descriptor_set import descriptor_set
from cupaged.server.http_rules import RULES
from cupaged.v1 import admin_pb2, generation_pb2, model_pb2

ANNOTATIONS = "google/api/annotations.proto"
SERVED = ("GenerationService", "ModelService")  # over HTTP
DETAILS = ("ErrorInfo", "BadRequest", "RetryInfo", "ResourceInfo", "DebugInfo")


@pytest.fixture(scope="module")
def pool() -> Any:
    """A pool of nothing but the set; files come after what they import."""
    made = DescriptorPool()
    for file in descriptor_set().file:
        made.Add(file)
        assert made.FindFileByName(file.name).name == file.name
    return made


def lines(file: FileDescriptorProto) -> list[str]:
    """What a file defines, but for the fields' names in JSON, which stubs leave out."""
    return [line for line in str(file).splitlines() if not line.lstrip().startswith("json_name:")]


def test_it_is_the_same_every_time() -> None:
    data = [descriptor_set().SerializeToString(deterministic=True) for _ in range(2)]
    assert data[0] == data[1]


@pytest.mark.parametrize("module", [admin_pb2, generation_pb2, model_pb2])
def test_but_for_the_rules_its_files_are_those_of_the_stubs(pool: Any, module: Any) -> None:
    file, stubs = FileDescriptorProto(), FileDescriptorProto()
    pool.FindFileByName(module.DESCRIPTOR.name).CopyToProto(file)
    module.DESCRIPTOR.CopyToProto(stubs)
    for service in file.service:
        for method in service.method:
            method.ClearField("options")
    if ANNOTATIONS in file.dependency:
        file.dependency.remove(ANNOTATIONS)
    assert lines(file) == lines(stubs)


def test_it_has_what_answers_and_errors_consist_of(pool: Any) -> None:
    for name in DETAILS:
        assert pool.FindMessageTypeByName(f"google.rpc.{name}").full_name == f"google.rpc.{name}"
    services = ("inference.GRPCInferenceService", "vllm.grpc.engine.VllmEngine",
                "grpc.health.v1.Health")  # fmt: skip
    for name in services:
        assert pool.FindServiceByName(name).full_name == name


def test_every_rpc_but_those_of_the_administrator_has_a_path_of_its_own(pool: Any) -> None:
    services = [pool.FindServiceByName(f"cupaged.v1.{name}") for name in SERVED]
    assert set(RULES) == {rpc.full_name for service in services for rpc in service.methods}
    assert len(set(RULES.values())) == len(RULES) == 12
    for rpc in pool.FindServiceByName("cupaged.v1.AdminService").methods:
        assert not rpc.has_options


def test_rules_name_fields_of_their_requests(pool: Any) -> None:
    for name, (verb, path) in RULES.items():
        service, _, method = name.rpartition(".")
        rpc = pool.FindServiceByName(service).methods_by_name[method]
        data = rpc.GetOptions().SerializeToString()
        rule = MethodOptions.FromString(data).Extensions[annotations_pb2.http]
        assert getattr(rule, verb) == f"/cupaged/v1/{path}"
        assert rule.body == {"post": "*", "get": ""}[verb]
        for field in re.findall(r"\{(\w+)", path):
            assert field in rpc.input_type.fields_by_name
        if verb == "get":  # a query has no room for lists of messages
            assert not [f.name for f in rpc.input_type.fields if f.is_repeated]
