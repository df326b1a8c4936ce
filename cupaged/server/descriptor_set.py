"""One descriptor set of every service that cupaged answers.

It is for programs that load services at run time, such as grpcurl or Envoy. Besides cupaged.v1 and
the services of other servers it has grpc.health.v1, google.rpc with the details of errors, and the
HTTP rules of `http_rules`. Nothing here imports gRPC.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from google.api import annotations_pb2
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2

from cupaged.server.http_rules import annotate

_SERVER = Path(__file__).resolve().parent
_SETS = ("proto/cupaged_v1.binpb", "compat/kserve.binpb", "compat/vllm.binpb")
_BESIDE = (annotations_pb2, error_details_pb2, status_pb2, health_pb2)


def descriptor_set() -> FileDescriptorSet:
    """All files and all that they import, each after its imports."""
    files: dict[str, FileDescriptorProto] = {}
    for module in _BESIDE:
        _add(module.DESCRIPTOR, files)
    for name in _SETS:
        for file in FileDescriptorSet.FromString((_SERVER / name).read_bytes()).file:
            files.setdefault(file.name, file)
    annotate(files.values())
    return FileDescriptorSet(file=files.values())


def _add(descriptor: Any, files: dict[str, FileDescriptorProto]) -> None:
    for imported in descriptor.dependencies:
        _add(imported, files)
    file = FileDescriptorProto()
    descriptor.CopyToProto(file)
    files.setdefault(file.name, file)
