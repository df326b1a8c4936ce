"""Server-sent events: the data of each event out of the bytes of a stream.

As in the HTML standard: lines end with LF, CR LF or CR, an empty line ends an event, several `data`
lines of one are joined by LF, lines that begin with a colon are comments. Other fields are not
looked at. An event that the end of the stream cuts off is none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

__all__ = ["EventReader"]

_LINE_END = re.compile(rb"\r\n|\n|\r")
_MAX_EVENT_BYTES = 2**24


class EventReader:
    """Takes the pieces of a stream, however it is cut."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._is_first = True
        self._is_after_cr = False  # which may be half of a CR LF

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The data of the events that this piece completes.

        Raises:
            ValueError: an event of more than 16 MiB.
        """
        if self._is_after_cr:
            piece = piece.removeprefix(b"\n")
        self._is_after_cr = piece.endswith(b"\r")
        *lines, self._rest = _LINE_END.split(self._rest + piece)
        for line in lines:
            if self._is_first:
                line, self._is_first = line.removeprefix(b"\xef\xbb\xbf"), False
            if not line:
                if self._data:
                    yield b"\n".join(self._data)
                    self._data = []
                continue
            name, _, value = line.partition(b":")
            if name == b"data":
                self._data.append(value.removeprefix(b" "))
        if len(self._rest) + sum(map(len, self._data)) + len(self._data) > _MAX_EVENT_BYTES:
            raise ValueError("an event of more than 16 MiB")
