"""Tensors of the KServe protocol: values in and out, raw bytes or typed fields.

Raw values are little-endian; an element of BYTES is its length as 32 bits and then its bytes. A
request brings all its tensors in one of both ways, and is answered in the same way: clients read
nothing else.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

from cupaged.errors import InvalidParameterError, NotSupportedError

MAX_ELEMENTS = 4096  # of a tensor
_MAX_TENSORS, _MAX_DIMENSIONS = 128, 8
_BYTES = "BYTES"
_LENGTH = struct.Struct("<I")
# By data type: the format of an element, and the field of InferTensorContents.
_TYPES = {
    "BOOL": ("?", "bool_contents"),
    "INT8": ("b", "int_contents"),
    "INT16": ("h", "int_contents"),
    "INT32": ("i", "int_contents"),
    "INT64": ("q", "int64_contents"),
    "UINT8": ("B", "uint_contents"),
    "UINT16": ("H", "uint_contents"),
    "UINT32": ("I", "uint_contents"),
    "UINT64": ("Q", "uint64_contents"),
    "FP32": ("f", "fp32_contents"),
    "FP64": ("d", "fp64_contents"),
    _BYTES: ("", "bytes_contents"),
}


def read_tensors(request: Any) -> dict[str, list[Any]]:
    """The elements of each input of a ModelInferRequest, by its name.

    Raises:
        InvalidParameterError: values do not fit data type and shape, or a name comes twice.
        NotSupportedError: values lie in shared memory.
    """
    if len(request.inputs) > _MAX_TENSORS:
        raise InvalidParameterError(
            "inputs", len(request.inputs), f"at most {_MAX_TENSORS} tensors"
        )
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        allowed = f"{len(request.inputs)} items, one for each input, or none"
        raise InvalidParameterError("raw_input_contents", len(raw), allowed)
    found: dict[str, list[Any]] = {}
    for i, tensor in enumerate(request.inputs):
        name, datatype = tensor.name, tensor.datatype
        if name in found:
            raise InvalidParameterError("inputs", name, "a list in which each name stands once")
        if "shared_memory_region" in tensor.parameters:
            raise NotSupportedError(f"{name}: tensors in shared memory are not supported")
        if datatype not in _TYPES:
            raise InvalidParameterError(
                f"{name}: datatype", datatype, f"one of {', '.join(_TYPES)}"
            )
        code, field = _TYPES[datatype]
        typed = getattr(tensor.contents, field)
        if raw and tensor.HasField("contents"):
            allowed = "absent where there are raw_input_contents"
            raise InvalidParameterError(f"{name}: contents", "given", allowed)
        size = _size(name, tensor.shape)
        values = _unpack(name, code, raw[i], size) if raw else typed
        if len(values) != size:
            shape = [*tensor.shape]
            allowed = f"{size} values of {datatype}, as its shape {shape} says"
            raise InvalidParameterError(name, f"{len(values)} values", allowed)
        found[name] = list(values)
    return found


def write_tensor(response: Any, name: str, datatype: str, values: Sequence[Any], raw: bool) -> None:
    """Add an output of one dimension to a ModelInferResponse."""
    output = response.outputs.add(name=name, datatype=datatype, shape=[len(values)])
    code, field = _TYPES[datatype]
    if not raw:
        getattr(output.contents, field).extend(values)
    elif datatype == _BYTES:
        response.raw_output_contents.append(b"".join(_LENGTH.pack(len(v)) + v for v in values))
    else:
        response.raw_output_contents.append(struct.pack(f"<{len(values)}{code}", *values))


def _size(name: str, shape: Sequence[int]) -> int:
    if not 1 <= len(shape) <= _MAX_DIMENSIONS or min(shape) < 0:
        allowed = f"1 to {_MAX_DIMENSIONS} sizes that are not negative"
        raise InvalidParameterError(f"{name}: shape", [*shape[:_MAX_DIMENSIONS]], allowed)
    size = math.prod(shape)
    if size > MAX_ELEMENTS:
        allowed = f"of at most {MAX_ELEMENTS} elements"
        raise InvalidParameterError(f"{name}: shape", [*shape], allowed)
    return size


def _unpack(name: str, code: str, data: bytes, size: int) -> list[Any]:
    if not code:
        return _unpack_bytes(name, data, size)
    width = struct.calcsize(f"<{code}")
    if len(data) != width * size:
        raise InvalidParameterError(name, f"{len(data)} bytes", f"{width * size} bytes")
    return list(struct.unpack(f"<{size}{code}", data))


def _unpack_bytes(name: str, data: bytes, size: int) -> list[bytes]:
    elements: list[bytes] = []
    position = 0
    while position < len(data):
        if len(elements) == size:
            raise InvalidParameterError(name, "more", f"{size} elements, as its shape says")
        start = position + _LENGTH.size
        if start > len(data):
            break
        (length,) = _LENGTH.unpack_from(data, position)
        position = start + length
        if position > len(data):
            break
        elements.append(data[start:position])
    else:
        return elements
    allowed = "elements that each are a length of 4 bytes and as many bytes as that says"
    raise InvalidParameterError(name, data[:32], allowed)
