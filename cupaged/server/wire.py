"""Frames between the processes of the service, and errors in them.

A frame is its length, uint32 little-endian, and a msgpack array [kind, ...] of plain values; pickle
never crosses a process. Requests and outputs as such values are in `wire_forms`. Nothing here needs
NumPy: the supervisor reads frames, too.
"""

from __future__ import annotations

from typing import Any

import msgpack

from cupaged import errors
from cupaged.errors import BadValueError, CupagedError, EngineDeadError, EngineError, ShownValue

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 256 * 2**20
_HEADER_BYTES = 4
_MAX_PLAIN_CHARS = 1000  # a longer text of an error's value crosses as it is printed
_MAX_PLAIN_INTEGER = 2**63

Message = list[Any]


class WireError(Exception):
    """Bytes that are no frame of ours, or a message that does not say what it should."""


def encode_frame(message: Message) -> bytes:
    """A message as the bytes of a frame.

    Raises:
        WireError: it is too long. TypeError, OverflowError: it holds a value that msgpack has not.
    """
    body: bytes = msgpack.packb(message, use_bin_type=True, unicode_errors="surrogatepass")
    if len(body) > MAX_FRAME_BYTES:
        raise WireError(f"a message of {len(body)} bytes; at most {MAX_FRAME_BYTES} may be sent")
    return len(body).to_bytes(_HEADER_BYTES, "little") + body


class FrameReader:
    """Messages out of a stream of bytes, in pieces as they come."""

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._buffer = bytearray()

    @property
    def num_waiting_bytes(self) -> int:
        """Bytes of a frame that is not whole yet."""
        return len(self._buffer)

    def feed(self, data: bytes) -> list[Message]:
        """The messages that are whole with these bytes.

        Raises:
            WireError: a frame is too long or is no message; what follows cannot be read either.
        """
        buffer = self._buffer
        buffer += data
        messages: list[Message] = []
        start = 0
        with memoryview(buffer) as view:
            while (first := start + _HEADER_BYTES) <= len(buffer):
                size = int.from_bytes(view[start:first], "little")
                if size > self._max_frame_bytes:
                    raise WireError(
                        f"a frame of {size} bytes; at most {self._max_frame_bytes} are read"
                    )
                if first + size > len(buffer):
                    break
                messages.append(_decode(bytes(view[first : first + size])))
                start = first + size
        del buffer[:start]
        return messages


def _decode(body: bytes) -> Message:
    try:
        message = msgpack.unpackb(
            body, raw=False, strict_map_key=False, unicode_errors="surrogatepass"
        )
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise WireError(f"a frame that is not msgpack: {error}") from None
    if not isinstance(message, list) or not message or not isinstance(message[0], str):
        raise WireError("a frame that is not an array that begins with its kind")
    return message


def error_to_wire(error: BaseException) -> dict[str, Any]:
    """An error as a mapping: its class and what that class was made of, only what is set.

    Classes from outside the tree cross as `EngineError`.
    """
    if not isinstance(error, CupagedError):
        return {"type": "EngineError", "message": f"{type(error).__name__}: {error}"}
    form: dict[str, Any] = {"type": type(error).__name__, "message": str(error)}
    if isinstance(error, BadValueError):
        form |= {"name": error.name, "allowed": error.allowed}
        if _is_plain(error.value):
            form["value"] = error.value
        else:
            form["shown"] = errors.shown(error.value)
    if isinstance(error, EngineDeadError):
        form |= {"message": error.reason, "restarting": error.restarting}
    retry_after_s = getattr(error, "retry_after_s", None)
    if retry_after_s is not None:
        form["retry_after_s"] = retry_after_s
    return form


def error_from_wire(form: dict[str, Any]) -> CupagedError:
    """The error again, of the same class and with the same text."""
    known = getattr(errors, str(form.get("type")), None)
    message = str(form.get("message", ""))
    if not isinstance(known, type) or not issubclass(known, CupagedError):
        return EngineError(message)
    if issubclass(known, BadValueError):
        value = ShownValue(form["shown"]) if "shown" in form else form.get("value")
        return known(str(form.get("name")), value, str(form.get("allowed")))
    if issubclass(known, EngineDeadError):
        return known(message, restarting=bool(form.get("restarting")))
    if issubclass(known, errors.QueueFullError | errors.QueueTimeoutError):
        return known(message, retry_after_s=form.get("retry_after_s"))
    return known(message)


def _is_plain(value: object) -> bool:
    if isinstance(value, ShownValue):
        return False
    if isinstance(value, str):
        return len(value) <= _MAX_PLAIN_CHARS
    if isinstance(value, int):  # True and False, too
        return abs(value) < _MAX_PLAIN_INTEGER
    return value is None or isinstance(value, float)
