"""A server of OpenAI's API for tests: bytes on a socket, each answer written down beforehand."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tests.server.loop_thread import LoopThread

MODELS = {"object": "list", "data": [{"id": "team/fake", "max_model_len": 64}]}
CLOSE, RESET, HANG = "close", "reset", "hang"  # in place of bytes; the last one until the end
Pieces = Sequence[bytes | str]


@dataclass(frozen=True)
class Asked:
    """A request. `body` is its JSON, None without one."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any


class OpenAIServer(LoopThread):
    """Answers until the block of its context is left.

    Args:
        answer: what is written for a request, piece by piece; each goes out by itself.
        tls: certificates.
    """

    def __init__(
        self, answer: Callable[[Asked], Pieces], tls: ssl.SSLContext | None = None
    ) -> None:
        super().__init__()
        self._answer = answer
        self._tls = tls
        self.requests: list[Asked] = []
        self.num_connections = 0
        self.num_open = 0
        self._tasks: set[asyncio.Task[Any]] = set()

    async def serve(self) -> None:
        """On any free port."""
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0, ssl=self._tls)
        host, port = server.sockets[0].getsockname()
        async with server:
            self.is_ready(f"{host}:{port}")
            await self.until_the_end()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self.num_open += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while await self._served(reader, writer):
                pass
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
            self.num_open -= 1

    async def _served(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; whether the connection goes on."""
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        method, path, _ = lines[0].split()
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:])}
        data = await reader.readexactly(int(headers.get("content-length", "0")))
        asked = Asked(method, path, headers, json.loads(data) if data else None)
        self.requests.append(asked)
        for piece in self._answer(asked):
            if piece == RESET:
                self._reset(writer)
            if piece == HANG:
                await reader.read()  # until the client has had enough
            if isinstance(piece, str):
                return False
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.001)  # so that it is read by itself, mostly
        return True

    def _reset(self, writer: asyncio.StreamWriter) -> None:
        linger = struct.pack("ii", 1, 0)  # closing sends an RST
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.transport.abort()


def whole(status: int, body: Any, kind: str = "application/json") -> bytes:
    """An answer in one piece; `body` is JSON unless it is bytes."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"HTTP/1.1 {status} X\r\nserver: fake\r\ncontent-type: {kind}\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


def head(kind: str = "text/event-stream; charset=utf-8") -> bytes:
    """The head of a stream in chunks."""
    return f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ntransfer-encoding: chunked\r\n\r\n".encode()


def chunk(data: bytes) -> bytes:
    """A chunk of a stream; an empty one is its end."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(value: Any) -> bytes:
    """A server-sent event."""
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def texts(*parts: str, end: str | None = "length") -> list[bytes]:
    """Events of an answer of /v1/completions."""
    ends = [None] * (len(parts) - 1) + [end]
    return [
        event({"choices": [{"index": 0, "text": text, "finish_reason": each}]})
        for text, each in zip(parts, ends, strict=True)
    ]


def deltas(*parts: dict[str, Any]) -> list[bytes]:
    """Events of an answer of /v1/chat/completions."""
    ends = [None] * (len(parts) - 1) + ["stop"]
    return [
        event({"choices": [{"index": 0, "delta": delta, "finish_reason": each}]})
        for delta, each in zip(parts, ends, strict=True)
    ]


def usage(prompt_tokens: int, completion_tokens: int) -> bytes:
    """The event of `include_usage`."""
    counts = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return event({"choices": [], "usage": counts})


DONE = event(b"[DONE]")


def stream(*events: bytes) -> list[bytes]:
    """A whole answer, a chunk an event."""
    return [head(), *map(chunk, (*events, DONE)), chunk(b"")]
