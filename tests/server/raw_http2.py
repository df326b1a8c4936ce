"""A gRPC call by hand over a TCP connection of its own, to end it as no library would.

Just enough of HTTP/2 (RFC 9113): headers as literals that are not indexed, no flow control beyond
the initial window, no padding.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections.abc import Sequence
from typing import Self

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS = 0, 1, 3, 4
_END_STREAM, _END_HEADERS = 1, 4
_CANCEL = struct.pack(">I", 8)
_STREAM = 1


class RawCall:
    """One call of a streaming method. A context; what it opened is closed at its end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def begin(
        cls,
        address: str,
        method: str,
        message: bytes,
        *,
        metadata: Sequence[tuple[str, str]] = (),
        tls: ssl.SSLContext | None = None,
    ) -> Self:
        """Connect and send the request. method: "/package.Service/Method"."""
        host, _, port = address.rpartition(":")
        call = cls(*await asyncio.open_connection(host, int(port), ssl=tls))
        fields = (
            (b":method", b"POST"),
            (b":scheme", b"http" if tls is None else b"https"),
            (b":path", method.encode()),
            (b":authority", address.encode()),
            (b"content-type", b"application/grpc"),
            (b"te", b"trailers"),
            *((name.encode(), value.encode()) for name, value in metadata),
        )
        headers = b"".join(b"\0" + _string(name) + _string(value) for name, value in fields)
        body = b"\0" + struct.pack(">I", len(message)) + message
        call._writer.write(
            _PREFACE
            + _frame(_SETTINGS, 0, 0, b"")
            + _frame(_HEADERS, _END_HEADERS, _STREAM, headers)
            + _frame(_DATA, _END_STREAM, _STREAM, body)
        )
        await call._writer.drain()
        return call

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        self._writer.transport.abort()

    async def read(self, num_messages: int) -> int:
        """Wait for so many frames of data, or for the end of the stream; gives how many came."""
        came = 0
        while came < num_messages:
            head = await self._reader.readexactly(9)
            payload = await self._reader.readexactly(int.from_bytes(head[:3]))
            kind, flags = head[3], head[4]
            came += kind == _DATA and len(payload) > 0
            if kind in (_DATA, _HEADERS) and flags & _END_STREAM:
                break
        return came

    async def cancel(self) -> None:
        """RST_STREAM with CANCEL: the connection stays."""
        self._writer.write(_frame(_RST_STREAM, 0, _STREAM, _CANCEL))
        await self._writer.drain()

    async def close_half(self) -> None:
        """End what is sent (FIN); wait until the server closes its half, too."""
        self._socket().shutdown(socket.SHUT_WR)
        while await self._reader.read(2**16):
            pass

    def reset(self) -> None:
        """End the connection with a TCP reset."""
        linger = struct.pack("ii", 1, 0)
        self._socket().setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self._writer.transport.abort()

    def _socket(self) -> socket.socket:
        """ConnectionResetError when the server has ended the connection before."""
        sock: socket.socket | None = self._writer.get_extra_info("socket")
        if sock is None:
            raise ConnectionResetError("the connection has gone")
        return sock


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _string(text: bytes) -> bytes:
    assert len(text) < 127, "longer ones have a longer prefix"
    return bytes([len(text)]) + text
