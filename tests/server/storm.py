"""Streams that are all ended by their clients, each in its own way and at its own moment."""

from __future__ import annotations

import asyncio
import random
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import grpc

from cupaged.v1 import generation_pb2 as pb
from cupaged.v1 import generation_pb2_grpc
from tests.server.asking import stream_request, tokens
from tests.server.local_server import SECONDS
from tests.server.raw_http2 import RawCall

METHOD = "/cupaged.v1.GenerationService/GenerateStream"
ENDS = ("cancel", "deadline", "abort", "stream reset", "connection reset", "half-close")
MOST_MESSAGES = 12  # of a stream, before it is ended; 0 ends it while it may still be queued
_MOST_EARLY_S = 0.05


@dataclass
class Storm:
    """What the clients saw.

    seen: ends of streams that had brought a message, by kind; the server knew them all.
    early: ends of those that had not; of some the server may never have heard.
    codes: what calls of the library ended with, by kind.
    """

    seen: Counter[str] = field(default_factory=Counter)
    early: Counter[str] = field(default_factory=Counter)
    codes: Counter[tuple[str, str]] = field(default_factory=Counter)

    def count(self, kind: str, messages: int) -> None:
        """A stream was ended."""
        (self.seen if messages else self.early)[kind] += 1


async def run_storm(
    address: str, *, streams: int, at_once: int, seed: int, clients: int, of_client: int
) -> Storm:
    """Begin and end so many streams.

    Args:
        at_once: most of them that live at the same time.
        seed: of their ends.
        clients: processes that are killed, each with `of_client` streams, beside the others.
    """
    chance = random.Random(seed)
    plans = [(ENDS[i % len(ENDS)], chance.randrange(MOST_MESSAGES)) for i in range(streams)]
    chance.shuffle(plans)
    storm, room = Storm(), asyncio.Semaphore(at_once)
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)

        async def one(kind: str, messages: int, wait_s: float) -> None:
            async with room:
                if kind in ("cancel", "deadline", "abort"):
                    await _end_call(stub, kind, messages, wait_s, storm)
                else:
                    await _end_raw_call(address, kind, messages, wait_s, storm)

        async with asyncio.timeout(12 * SECONDS), asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(_kill_client(address, of_client, storm))
            for kind, messages in plans:
                group.create_task(one(kind, messages, chance.uniform(0, _MOST_EARLY_S)))
    return storm


async def _end_call(stub: Any, kind: str, messages: int, wait_s: float, storm: Storm) -> None:
    """By the library: the deadline comes where the others stop reading."""
    message = stream_request(stopping=tokens(1000))
    message.request_id = f"storm-{id(message)}-{wait_s}"
    timeout = wait_s + 0.01 * messages if kind == "deadline" else SECONDS
    call = stub.GenerateStream(message, timeout=timeout)
    came, last = 0, None
    try:
        while kind == "deadline" or came < messages:
            last = await call.read()
            if last is grpc.aio.EOF:
                break
            came += 1
        if kind == "cancel":
            if not messages:
                await asyncio.sleep(wait_s)
            call.cancel()
        elif kind == "abort":
            await _abort(stub, message.request_id)
            while (event := await call.read()) is not grpc.aio.EOF:
                last = event
            assert isinstance(last, pb.GenerateStreamResponse)
            assert last.finished.reason == pb.FINISH_REASON_ABORT
    except grpc.aio.AioRpcError as error:
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED, error.details()
    except asyncio.CancelledError:
        if not call.cancelled():
            raise
    storm.count(kind, came)
    storm.codes[kind, (await call.code()).name] += 1


async def _abort(stub: Any, request_id: str) -> None:
    """Until the server has known the id."""
    aborted: list[str] = []
    while request_id not in aborted:
        answer = await stub.Abort(pb.AbortRequest(request_ids=[request_id]), timeout=SECONDS)
        aborted = answer.aborted_request_ids
        await asyncio.sleep(0.001)


async def _end_raw_call(
    address: str, kind: str, messages: int, wait_s: float, storm: Storm
) -> None:
    """Over a connection of its own."""
    message = stream_request(stopping=tokens(1000)).SerializeToString()
    async with await RawCall.begin(address, METHOD, message) as call:
        if messages:
            assert await call.read(messages) == messages
        else:
            await asyncio.sleep(wait_s)
        if kind == "stream reset":
            await call.cancel()
        elif kind == "connection reset":
            call.reset()
        else:
            await call.close_half()
    storm.count(kind, messages)


async def _kill_client(address: str, streams: int, storm: Storm) -> None:
    """A process with streams that dies."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.server.storm_client", address, str(streams),
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert await process.stdout.readline() == b"all streams have begun\n"
    process.kill()
    await process.wait()
    storm.seen["killed"] += streams
