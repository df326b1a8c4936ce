"""A published interface: its messages and its service, in a descriptor pool of their own.

Protobuf's default pool refuses a second definition of a name, so generated stubs of such an
interface and a client's own stubs cannot be in one process. Here the classes are made at run time
from the descriptor set beside the .proto file, which `make protos` writes.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass


class Interface:
    """One .proto file of this folder.

    Args:
        file: its name without the suffix.
        service: full name of the service in it.

    Attributes:
        service: its descriptor.
    """

    def __init__(self, file: str, service: str) -> None:
        data = (resources.files(__package__) / f"{file}.binpb").read_bytes()
        self._pool = DescriptorPool()
        for each in FileDescriptorSet.FromString(data).file:
            self._pool.Add(each)
        self.service: Any = self._pool.FindServiceByName(service)
        self._package = self.service.file.package

    def message(self, name: str) -> Any:
        """The class of a message, whose fields no type checker knows.

        Args:
            name: without the package, such as "ModelInferRequest.InferInputTensor".
        """
        return GetMessageClass(self._pool.FindMessageTypeByName(f"{self._package}.{name}"))
