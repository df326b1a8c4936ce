"""Messages that nobody means: random fields, near misses of good requests, damaged bytes.

Everything follows from a seed. A message is drawn from a descriptor alone, so it works for every
service; good requests to start from make it come further than the door.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

_F = FieldDescriptor
_FLOATS = (0.0, 0.5, 1.0, -1.0, 2.0, 1e-9, 1e30, math.nan, math.inf, -math.inf)
_TEXTS = ("", "a", "the", " ", "\n", "\0", "\u00e9\u6f22" * 3, "x" * 5000, "tiny", "BOOL", "BYTES")
_BYTES = (b"", b"\0", b"\1\0\0\0a", b"\xff" * 9, b"x" * 5000)
_INTEGERS = (0, 1, 2, 3, 5, 16, 508, 509, 1023, 1024, -1)
_RANGES = {
    _F.TYPE_INT32: (-(2**31), 2**31 - 1),
    _F.TYPE_INT64: (-(2**63), 2**63 - 1),
    _F.TYPE_UINT32: (0, 2**32 - 1),
    _F.TYPE_UINT64: (0, 2**64 - 1),
}
_MAX_DEPTH = 4


class RandomMessages:
    """Draws requests.

    Args:
        seed: of all of them.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def request(self, descriptor: Any, good: Sequence[Message] = ()) -> bytes:
        """The bytes of a request.

        Args:
            descriptor: of its message.
            good: requests of that kind that a server serves.
        """
        draw = self._random
        message = GetMessageClass(descriptor)()
        if good and draw.random() < 0.8:
            message.CopyFrom(draw.choice(good))
            self._fill(message, draw.choice((0.0, 0.02, 0.1)), 0)
        else:
            self._fill(message, draw.choice((0.1, 0.3)), 0)
        data = bytearray(message.SerializeToString())
        if draw.random() < 0.2:
            self._damage(data)
        return bytes(data)

    def choice(self, options: Sequence[Any]) -> Any:
        """One of them."""
        return self._random.choice(options)

    def _damage(self, data: bytearray) -> None:
        draw = self._random
        kind = draw.randrange(4)
        if kind == 0:
            data[:] = draw.randbytes(draw.randrange(40))
        elif data and kind == 1:
            del data[draw.randrange(len(data)) :]
        elif data and kind == 2:
            data += data[draw.randrange(len(data)) :]
        for _ in range(draw.randrange(4) if data else 0):
            data[draw.randrange(len(data))] = draw.randrange(256)

    def _fill(self, message: Message, share: float, depth: int) -> None:
        """Set that share of all fields."""
        draw = self._random
        for field in message.DESCRIPTOR.fields:
            if draw.random() >= share:
                is_single = field.message_type is not None and not field.is_repeated
                if is_single and message.HasField(field.name):
                    self._fill(getattr(message, field.name), share, depth + 1)
                continue
            if draw.random() < 0.1:
                message.ClearField(field.name)
            elif field.message_type is None:
                self._set(message, field)
            elif depth < _MAX_DEPTH:
                self._fill_messages(message, field, share, depth + 1)

    def _set(self, message: Message, field: Any) -> None:
        if field.is_repeated:
            values = getattr(message, field.name)
            values.extend(self._value(field) for _ in range(self._random.choice((1, 2, 5, 70))))
        else:
            setattr(message, field.name, self._value(field))

    def _fill_messages(self, message: Message, field: Any, share: float, depth: int) -> None:
        value = getattr(message, field.name)
        if field.message_type.GetOptions().map_entry:
            key, item = (field.message_type.fields_by_name[n] for n in ("key", "value"))
            for _ in range(self._random.randrange(4)):
                if item.message_type is None:
                    value[self._value(key)] = self._value(item)
                else:
                    self._fill(value[self._value(key)], 0.3, depth)
        elif field.is_repeated:
            for _ in range(self._random.randrange(4)):
                self._fill(value.add(), max(share, 0.3), depth)
        else:
            value.SetInParent()
            self._fill(value, max(share, 0.3), depth)

    def _value(self, field: Any) -> Any:
        draw = self._random
        if field.type in (_F.TYPE_FLOAT, _F.TYPE_DOUBLE):
            return draw.choice((*_FLOATS, draw.uniform(-3, 3)))
        if field.type == _F.TYPE_BOOL:
            return draw.random() < 0.5
        if field.type == _F.TYPE_STRING:
            return draw.choice(_TEXTS)
        if field.type == _F.TYPE_BYTES:
            return draw.choice(_BYTES)
        if field.type == _F.TYPE_ENUM:
            return draw.choice((0, 1, 2, 99))
        low, high = _RANGES[field.type]
        value = draw.choice((*_INTEGERS, low, high, draw.randint(low, high)))
        return min(high, max(low, value))
