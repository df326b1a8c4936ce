"""A client process of a campaign, and the end of it that the campaign holds.

The process knows nothing of protocols: requests come as bytes, and answers go back as bytes. It
tells when a task has its first answer and when it has ended. It can be killed.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import re
import ssl
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

import grpc

from tests.faults.task import (
    CERTS,
    CLOSED,
    GONE,
    NEVER,
    PATIENCE_S,
    Begun,
    Done,
    Ended,
    Order,
    Task,
)
from tests.server.raw_http2 import RawCall

_CHANNELS = 3
_COMMON = [
    ("grpc.use_local_subchannel_pool", 1),  # a connection each, to any of the front ends
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
]
_NARROW = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
_BY_HAND = ("stream reset", "connection reset", "half-close")
_READ_BYTES = 2**16
_ABORT_AGAIN_S = 0.02
_LOOK_AGAIN_S = 0.2
_IDLE_S = PATIENCE_S / 2


class Client:
    """A context in which the process runs. Its words are to be read."""

    def __enter__(self) -> Client:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_main, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def begin(self, order: Order) -> None:
        """Start a round."""
        self._pipe.send(order)

    def words(self) -> Iterator[Begun | Ended]:
        """What it says until all tasks have ended, or the process has."""
        while True:
            try:
                word = self._pipe.recv()
            except (EOFError, OSError):
                return
            if isinstance(word, Done):
                return
            yield word

    def kill(self) -> None:
        """End the process at once; its sockets are closed by the system."""
        self._process.kill()
        self._process.join()


def _main(pipe: Connection) -> None:
    """A round after the other, until the campaign has gone."""
    while True:
        try:
            order = pipe.recv()
        except EOFError:
            return
        asyncio.run(_Round(order, pipe).run())
        pipe.send(Done())


class _Round:
    """The tasks of one order."""

    def __init__(self, order: Order, pipe: Connection) -> None:
        self._order = order
        self._pipe = pipe

    async def run(self) -> None:
        """Return when all tasks have ended."""
        self._channels = [self._channel("client", []) for _ in range(_CHANNELS)]
        await asyncio.gather(*map(self._one, self._order.tasks))
        for channel in self._channels:
            await channel.close()

    async def _one(self, task: Task) -> None:
        await asyncio.sleep(task.start_s)
        ended = Ended(id=task.id, started=time.monotonic())
        try:
            async with asyncio.timeout(PATIENCE_S + 10):
                if task.raw is not None:
                    await self._send_bytes(task, ended)
                elif task.end in _BY_HAND:
                    await self._end_by_hand(task, ended)
                else:
                    await self._call(task, ended)
        except TimeoutError:
            ended.statuses.append(NEVER)
        except (OSError, EOFError) as error:
            ended.statuses.append(CLOSED)
            ended.details = repr(error)
        ended.ended = time.monotonic()
        self._pipe.send(ended)

    def _begun(self, task: Task) -> None:
        self._pipe.send(Begun(task.id))

    # ---- calls by the library ------------------------------------------------------------------

    def _channel(self, certificate: str | None, options: list[tuple[str, int]]) -> grpc.aio.Channel:
        address, options = self._order.address, [*_COMMON, *options]
        if certificate is None:
            return grpc.aio.insecure_channel(address, options)
        root = (CERTS / "root.pem").read_bytes()
        if not certificate:
            return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(root), options)
        key, chain = ((CERTS / f"{certificate}.{end}").read_bytes() for end in ("key", "pem"))
        credentials = grpc.ssl_channel_credentials(root, key, chain)
        return grpc.aio.secure_channel(address, credentials, options)

    @asynccontextmanager
    async def _channel_of(self, task: Task) -> AsyncIterator[Any]:
        """One that tasks share, unless this one needs its own."""
        if task.certificate == "client" and task.end != "stall":
            yield self._channels[task.id % _CHANNELS]
            return
        options = _NARROW if task.end == "stall" else []
        async with self._channel(task.certificate, options) as channel:
            yield channel

    async def _call(self, task: Task, ended: Ended) -> None:
        """Of any kind: on the wire all have a stream of answers to a stream of one request."""
        async with self._channel_of(task) as channel:
            call = channel.unary_stream(task.method)(
                task.message, timeout=task.timeout_s, metadata=task.metadata
            )
            aborting = None
            try:
                while True:
                    if task.end != "read" and len(ended.messages) == task.num_messages:
                        await asyncio.sleep(task.wait_s)
                        if task.until_idle:
                            await self._wait_idle()
                        if task.end == "cancel":
                            call.cancel()
                        elif task.end == "abort":
                            aborting = asyncio.create_task(_abort(channel, task))
                    message = await call.read()
                    if message is grpc.aio.EOF:
                        break
                    ended.messages.append(message)
                    if len(ended.messages) == 1:
                        self._begun(task)
            except grpc.aio.AioRpcError:
                pass  # the code is looked at below
            except asyncio.CancelledError:
                if not call.cancelled():
                    raise
            finally:
                if aborting is not None:
                    aborting.cancel()
            ended.statuses.append((await call.code()).name)
            ended.details = await call.details() or ""
            ended.rich = dict(await call.trailing_metadata() or ()).get(
                "grpc-status-details-bin", b""
            )

    async def _wait_idle(self) -> None:
        """Until the engine has nothing to do, or there is none, but not for ever."""
        url = f"http://{self._order.http}/metrics"
        with suppress(TimeoutError, OSError):
            async with asyncio.timeout(_IDLE_S):
                while await asyncio.to_thread(_num_in_engine, url):
                    await asyncio.sleep(_LOOK_AGAIN_S)

    # ---- connections by hand -------------------------------------------------------------------

    async def _end_by_hand(self, task: Task, ended: Ended) -> None:
        begin = RawCall.begin(
            self._order.address, task.method, task.message, metadata=task.metadata, tls=_tls()
        )
        async with await begin as call:
            if task.num_messages:
                await call.read(task.num_messages)
                self._begun(task)
            await asyncio.sleep(task.wait_s)
            if task.end == "stream reset":
                await call.cancel()
            elif task.end == "connection reset":
                call.reset()
            else:
                await call.close_half()
        ended.statuses.append(GONE)

    async def _send_bytes(self, task: Task, ended: Ended) -> None:
        assert task.raw is not None
        address = self._order.http if task.to_http else self._order.address
        host, _, port = address.rpartition(":")
        tls = _tls() if task.in_tls else None
        reader, writer = await asyncio.open_connection(host, int(port), ssl=tls)
        raw, answer = RawCall(reader, writer), b""
        async with raw:
            writer.write(task.raw)
            await writer.drain()
            self._begun(task)
            if task.end == "connection reset":
                raw.reset()
            else:
                while data := await reader.read(_READ_BYTES):
                    answer += data
        head, _, body = answer.partition(b"\r\n\r\n")
        is_http = head.startswith(b"HTTP/1.1 ")
        ended.statuses.append(head.split()[1].decode() if is_http else GONE)
        ended.messages.append(body)


async def _abort(channel: Any, task: Task) -> None:
    """Again and again, as the server may not know the request yet."""
    method, message = task.abort
    while True:
        with suppress(grpc.aio.AioRpcError):  # what the request comes to will show it
            await channel.unary_unary(method)(message, timeout=PATIENCE_S, metadata=task.metadata)
        await asyncio.sleep(_ABORT_AGAIN_S)


def _num_in_engine(url: str) -> float:
    with urllib.request.urlopen(url, timeout=_IDLE_S) as answer:
        page = answer.read().decode()
    found = re.findall(r"^cupaged_num_requests_(?:running|waiting)\S* (\S+)$", page, re.M)
    return sum(map(float, found))


def _tls() -> ssl.SSLContext:
    """Of a client that may call."""
    context = ssl.create_default_context(cafile=str(CERTS / "root.pem"))
    context.load_cert_chain(CERTS / "client.pem", CERTS / "client.key")
    context.set_alpn_protocols(["h2"])
    return context
