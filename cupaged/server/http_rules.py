"""Which HTTP requests mean which RPC, for gateways that make gRPC of JSON over HTTP.

The rules are those of google.api.http. They stand in the descriptor set that gateways load, not in
the .proto files, which would then import a file that few compilers have beside them. A path is
/cupaged/v1/ and the RPC's name, so that it meets no path of another API at the same host.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from google.api import annotations_pb2
from google.protobuf.descriptor_pb2 import FileDescriptorProto

PREFIX = "/cupaged/v1/"
_ANNOTATIONS = annotations_pb2.DESCRIPTOR.name
# Every RPC but those of AdminService, which has a port of its own. A GET has the request's fields
# in its query, or in its path where that names one; a POST has all of them as JSON.
RULES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "cupaged.v1.GenerationService.Generate": ("post", "generate"),
        "cupaged.v1.GenerationService.GenerateStream": ("post", "generate_stream"),
        "cupaged.v1.GenerationService.Abort": ("post", "abort"),
        "cupaged.v1.GenerationService.Tokenize": ("post", "tokenize"),
        "cupaged.v1.GenerationService.Detokenize": ("post", "detokenize"),
        "cupaged.v1.GenerationService.ApplyChatTemplate": ("post", "apply_chat_template"),
        "cupaged.v1.ModelService.ListModels": ("get", "models"),
        "cupaged.v1.ModelService.GetModelInfo": ("get", "models/{model=**}"),
        "cupaged.v1.ModelService.GetServerInfo": ("get", "server_info"),
        "cupaged.v1.ModelService.GetLoad": ("get", "load"),
        "cupaged.v1.ModelService.WatchLoad": ("get", "watch_load"),
        "cupaged.v1.ModelService.GetTokenizer": ("get", "tokenizer"),
    }
)


def annotate(files: Iterable[FileDescriptorProto]) -> None:
    """Give the methods in these files their rules, as if they stood in the .proto files."""
    for file in files:
        for service in file.service:
            for method in service.method:
                rule = RULES.get(f"{file.package}.{service.name}.{method.name}")
                if rule is not None:
                    _set(method.options.Extensions[annotations_pb2.http], *rule)
                    if _ANNOTATIONS not in file.dependency:
                        file.dependency.append(_ANNOTATIONS)


def _set(http: Any, verb: str, path: str) -> None:
    setattr(http, verb, PREFIX + path)
    if verb == "post":
        http.body = "*"
