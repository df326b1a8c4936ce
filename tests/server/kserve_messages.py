"""Messages of the KServe protocol and calls with them, made by hand: no client is involved."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Any

import grpc

from cupaged.server.compat.interface import Interface
from tests.server.local_server import SECONDS

INTERFACE = Interface("kserve", "inference.GRPCInferenceService")
_FORMATS = {"BOOL": "?", "INT32": "i", "UINT32": "I", "UINT64": "Q", "FP32": "f"}
_FIELDS = {
    "BOOL": "bool_contents",
    "INT32": "int_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "BYTES": "bytes_contents",
}


def message(name: str, /, **fields: Any) -> Any:
    """A message of that name."""
    return INTERFACE.message(name)(**fields)


class KServe:
    """Calls by the names of the RPCs."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel: Any = channel

    def __getattr__(self, name: str) -> Any:
        method = INTERFACE.service.methods_by_name[name]
        make = self._channel.stream_stream if method.client_streaming else self._channel.unary_unary
        call = make(
            f"/{INTERFACE.service.full_name}/{name}",
            request_serializer=lambda m: m.SerializeToString(),
            response_deserializer=INTERFACE.message(method.output_type.name).FromString,
        )

        def ask(request: Any = None, **metadata: Any) -> Any:
            empty = message(method.input_type.name)
            return call(empty if request is None else request, timeout=SECONDS, **metadata)

        return ask


def packed(datatype: str, values: Iterable[Any]) -> bytes:
    """Raw values as the protocol has them."""
    if datatype == "BYTES":
        return b"".join(struct.pack("<I", len(v)) + v for v in values)
    return b"".join(struct.pack(f"<{_FORMATS[datatype]}", v) for v in values)


def infer(*, raw: bool = True, **tensors: Any) -> Any:
    """A ModelInferRequest; other keywords of it are `id`, `parameters`, `outputs`.

    Args:
        tensors: a value, a list, or a (datatype, shape, list of values).
    """
    request = message("ModelInferRequest", id=tensors.pop("id", ""))
    request.model_name = tensors.pop("model_name", "")
    for key, value in tensors.pop("parameters", {}).items():
        kind = {bool: "bool", int: "int64", str: "string", float: "double"}[type(value)]
        setattr(request.parameters[key], f"{kind}_param", value)
    for name in tensors.pop("outputs", ()):
        request.outputs.add(name=name)
    for name, value in tensors.items():
        datatype, shape, values = value if isinstance(value, tuple) else _tensor(value)
        tensor = request.inputs.add(name=name, datatype=datatype, shape=shape)
        if raw:
            request.raw_input_contents.append(packed(datatype, values))
        else:
            getattr(tensor.contents, _FIELDS[datatype]).extend(values)
    return request


def outputs_of(response: Any) -> dict[str, Any]:
    """Values of a ModelInferResponse by their names, from wherever they stand."""
    raw = response.raw_output_contents
    found = {}
    for i, tensor in enumerate(response.outputs):
        if raw:
            values = [*_unpacked(tensor.datatype, raw[i])]
        else:
            values = [*getattr(tensor.contents, _FIELDS[tensor.datatype])]
        assert [*tensor.shape] == [len(values)]
        found[tensor.name] = values
    return found


def _tensor(value: Any) -> tuple[str, list[int], list[Any]]:
    values = value if isinstance(value, list) else [value]
    values = [v.encode() if isinstance(v, str) else v for v in values]
    kinds = {bytes: "BYTES", bool: "BOOL", int: "INT32", float: "FP32"}
    return kinds[type(values[0])], [len(values)], values


def _unpacked(datatype: str, data: bytes) -> Iterator[Any]:
    position = 0
    while position < len(data):
        if datatype == "BYTES":
            (length,) = struct.unpack_from("<I", data, position)
            yield data[position + 4 : position + 4 + length]
            position += 4 + length
        else:
            code = f"<{_FORMATS[datatype]}"
            yield struct.unpack_from(code, data, position)[0]
            position += struct.calcsize(code)
