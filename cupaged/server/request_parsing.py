"""Bytes of a call to a message, with an error that names the field where that fails.

gRPC's own deserialisers would end the call with UNKNOWN and an exception's text. Protobuf says that
bytes are wrong, not where; the common case, a text that is not UTF-8, is looked for here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from cupaged.errors import PromptError
from cupaged.server.service_errors import MalformedRequestError

M = TypeVar("M", bound=Message)

# That are looked at: the search is slow, and nobody else is answered meanwhile.
_MAX_FIELDS = 10_000
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5


def parse(kind: type[M], data: bytes) -> M:
    """The message that `data` is.

    Raises:
        PromptError: a text in it is not UTF-8; the name is the field's path.
        MalformedRequestError: it is no such message.
    """
    try:
        return kind.FromString(data)
    except DecodeError:
        pass
    found = _invalid_text(kind.DESCRIPTOR, data)
    if found is not None:
        path, text = found
        raise PromptError(path, text, "text in UTF-8")
    name = kind.DESCRIPTOR.full_name
    raise MalformedRequestError("request", data[:32], f"a message {name}")


class _Cut(Exception):
    """The bytes end within a field, hold none, or hold too many."""


def _invalid_text(kind: Any, data: bytes) -> tuple[str, bytes] | None:
    """Path and bytes of the first text that is not UTF-8, as far as the message can be read.

    kind: the message's descriptor.
    """
    try:
        return _search(kind, data, "", iter(range(_MAX_FIELDS)))
    except _Cut:
        return None


def _search(
    kind: Any, data: bytes, prefix: str, fields_left: Iterator[int]
) -> tuple[str, bytes] | None:
    position = 0
    seen: Counter[int] = Counter()
    while position < len(data):
        if next(fields_left, None) is None:
            raise _Cut
        tag, position = _varint(data, position)
        number, wire_type = tag >> 3, tag & 7
        if wire_type == _VARINT:
            _, position = _varint(data, position)
        elif wire_type in (_FIXED64, _FIXED32):
            position += 8 if wire_type == _FIXED64 else 4
        elif wire_type == _LENGTH:
            size, position = _varint(data, position)
            value, position = data[position : position + size], position + size
            if position > len(data):
                raise _Cut
            field = kind.fields_by_number.get(number)
            if field is None:
                continue
            path = f"{prefix}{field.name}"
            if field.is_repeated:
                path += f"[{seen[number]}]"
                seen[number] += 1
            found = _check(field, value, path, fields_left)
            if found is not None:
                return found
        else:
            raise _Cut
    return None


def _check(
    field: FieldDescriptor, value: bytes, path: str, fields_left: Iterator[int]
) -> tuple[str, bytes] | None:
    if field.type == FieldDescriptor.TYPE_STRING:
        try:
            value.decode("utf-8")
        except UnicodeDecodeError:
            return path, value
    elif field.type == FieldDescriptor.TYPE_MESSAGE and field.message_type is not None:
        return _search(field.message_type, value, f"{path}.", fields_left)
    return None


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while position < len(data) and shift < 64:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise _Cut
