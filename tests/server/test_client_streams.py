"""Streams that are given up, by whom and when: the server must hear of it each time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from cupaged.client import AsyncClient, Client, Delta, Started, errors
from tests.server.client_tools import CLIENTS
from tests.server.fake_service import (
    QUEUE_FULL,
    WAIT_S,
    FakeServer,
    fails,
    retry_info,
    stalls,
    stalls_after,
)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


@pytest.fixture(params=CLIENTS)
def client(request: pytest.FixtureRequest, server: FakeServer) -> Iterator[Any]:
    with CLIENTS[request.param](server.address) as client:
        yield client


def ended(server: FakeServer) -> bool:
    """Whether all calls that the server saw have ended, after a while."""
    return all(seen.ended.wait(WAIT_S) for seen in server.seen)


def test_leaving_the_context_cancels(server: FakeServer, client: Any) -> None:
    server.script.append(stalls_after(2))
    with client.stream("a b c") as stream:
        assert [type(next(stream)) for _ in range(2)] == [Started, Delta]
    assert ended(server)
    with pytest.raises(errors.RequestCancelledError) as raised:
        next(stream)
    assert raised.value.request_id == stream.request_id
    assert raised.value.code is grpc.StatusCode.CANCELLED
    stream.cancel()


def test_an_error_inside_of_the_context_cancels(server: FakeServer, client: Any) -> None:
    server.script.append(stalls_after(1))
    with pytest.raises(ZeroDivisionError), client.stream("a b c") as stream:
        next(stream)
        _ = 1 / 0
    assert ended(server)


def test_a_stream_that_nobody_has_any_more_is_cancelled(server: FakeServer, client: Any) -> None:
    server.script.append(stalls_after(2))
    stream = client.stream("a b c")
    next(stream)
    del stream
    client.health()  # lets an event loop run
    assert ended(server)


def test_breaking_out_of_the_loop_cancels(server: FakeServer, client: Any) -> None:
    server.script.append(stalls_after(2))
    for event in client.stream("a b c"):
        assert isinstance(event, Started)
        break
    client.health()
    assert ended(server)


def test_a_stream_that_was_never_read_is_cancelled(server: FakeServer, client: Any) -> None:
    server.script.append(stalls_after(1))
    stream = client.stream("a b c")
    client.health()
    del stream
    client.health()
    assert ended(server)


def test_closing_the_client_cancels_all_streams(server: FakeServer) -> None:
    for make in CLIENTS.values():
        with make(server.address) as client:
            server.script += [stalls_after(1)] * 3
            streams = [client.stream("a b") for _ in range(3)]
            for stream in streams:
                next(stream)
            client.close()
            assert ended(server)
            for stream in streams:
                with pytest.raises(errors.RequestCancelledError):
                    next(stream)
            for call in (client.generate, client.tokenize, client.stream, client.health):
                with pytest.raises(errors.RequestCancelledError, match="the client is closed"):
                    call("a")
            client.close()
    assert len(server.seen) == 6


def test_a_stream_ends_whole_and_then_close_changes_nothing(
    server: FakeServer, client: Any
) -> None:
    with client.stream("a") as stream:
        events = list(stream)
    client.close()
    assert list(stream) == [] and events[-1] == stream.usage


def test_another_thread_may_cancel(server: FakeServer) -> None:
    server.script.append(stalls_after(1))
    with Client(server.address) as client, client.stream("a b") as stream:
        next(stream)
        threading.Timer(0.1, stream.cancel).start()
        with pytest.raises(errors.RequestCancelledError, match="cancelled by this client"):
            next(stream)
    assert ended(server)


@pytest.mark.parametrize("how", ["cancel", "close"])
def test_a_wait_before_a_retry_ends_when_it_is_given_up(server: FakeServer, how: str) -> None:
    server.script.append(fails(*QUEUE_FULL, retry_info(2 * WAIT_S)))
    ended = threading.Event()

    def read(stream: Any) -> None:
        with pytest.raises(errors.RequestCancelledError):
            next(stream)
        ended.set()

    with Client(server.address) as client, client.stream("a b") as stream:
        reader = threading.Thread(target=read, args=(stream,))
        reader.start()
        assert not ended.wait(0.3)  # it waits by now
        stream.cancel() if how == "cancel" else client.close()
        assert ended.wait(WAIT_S)
        reader.join()
    assert len(server.seen) == 1


def test_closing_ends_a_call_that_blocks(server: FakeServer) -> None:
    server.script.append(stalls)
    with Client(server.address) as client:
        threading.Timer(0.1, client.close).start()
        with pytest.raises(errors.RequestCancelledError):
            client.generate("a")
    assert ended(server)


def test_threads_share_a_client(server: FakeServer) -> None:
    answers: list[str] = []
    with Client(server.address) as client:

        def work(number: int) -> None:
            for i in range(5):
                with client.stream(f"w{number} {i}") as stream:
                    answers.append("".join(stream.texts()))

        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(answers) == sorted(f"w{n} {i} " for n in range(8) for i in range(5))


def test_watches(server: FakeServer, client: Any) -> None:
    with client.watch_load(interval_s=0.1) as loads:
        assert [next(loads).num_running for _ in range(3)] == [1, 2, 3]
    with client.watch_health() as statuses:
        assert next(statuses) == "SERVING"
        server.set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        assert next(statuses) == "NOT_SERVING"
    assert ended(server)


@pytest.mark.parametrize("name", CLIENTS)
def test_a_watch_that_loses_its_server(name: str) -> None:
    with FakeServer() as server, CLIENTS[name](server.address) as client:
        statuses = client.watch_health()
        assert next(statuses) == "SERVING"
        server.stop()
        with pytest.raises((errors.UnreachableError, errors.RequestCancelledError)):
            next(statuses)


def test_cancelling_a_task_cancels_its_call(server: FakeServer) -> None:
    async def run() -> None:
        async with AsyncClient(server.address) as client:
            server.script += [stalls, stalls_after(1)]
            whole = asyncio.create_task(client.generate("a"))
            while not server.seen:
                await asyncio.sleep(0.01)
            whole.cancel()
            with pytest.raises(asyncio.CancelledError):
                await whole

            async def read() -> None:
                async for _ in client.stream("a b"):
                    reading.set()

            reading = asyncio.Event()
            task = asyncio.create_task(read())
            await reading.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(run())
    assert len(server.seen) == 2 and ended(server)


def test_what_others_cancel_is_no_cancellation_of_the_task(server: FakeServer) -> None:
    """A stream that is cancelled, or a client that is closed, does not cancel who waits for it."""

    async def run() -> list[Any]:
        async with AsyncClient(server.address) as client:
            server.script += [stalls_after(1), stalls]
            stream = client.stream("a b")
            await anext(stream)
            reading = asyncio.create_task(anext(stream))
            await asyncio.sleep(0.05)
            stream.cancel()
            waiting = asyncio.create_task(client.generate("a"))
            while len(server.seen) < 2:
                await asyncio.sleep(0.01)
            watch = client.watch_health()
            await anext(watch)
            watching = asyncio.create_task(anext(watch))
            await asyncio.sleep(0.05)
            await client.close()
            tasks = (reading, waiting, watching)
            return list(await asyncio.gather(*tasks, return_exceptions=True))

    results = asyncio.run(run())
    assert [type(result) for result in results] == [errors.RequestCancelledError] * 3
    assert ended(server)


def test_a_client_may_be_made_outside_of_the_loop(server: FakeServer) -> None:
    client = AsyncClient(server.address)

    async def run() -> str:
        async with client:
            return (await client.generate("a b")).text

    assert asyncio.run(run()) == "a b"


def test_many_at_once(server: FakeServer) -> None:
    async def run() -> list[str]:
        async with AsyncClient(server.address) as client:

            async def one(number: int) -> str:
                async with client.stream(f"n{number} x") as stream:
                    return "".join([piece async for piece in stream.texts()])

            return await asyncio.gather(*(one(n) for n in range(12)))

    assert asyncio.run(run()) == [f"n{n} x " for n in range(12)]


def test_an_async_wait_before_a_retry_ends_when_the_client_is_closed(server: FakeServer) -> None:
    server.script += [fails(*QUEUE_FULL, retry_info(2 * WAIT_S))] * 2

    async def run() -> list[Any]:
        async with AsyncClient(server.address) as client:
            stream = client.stream("a")
            tasks = [
                asyncio.ensure_future(anext(stream)),
                asyncio.ensure_future(client.generate("a")),
            ]
            while len(server.seen) < 2:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.3)  # both wait by now
            await client.close()
            async with asyncio.timeout(WAIT_S):
                return list(await asyncio.gather(*tasks, return_exceptions=True))

    results = asyncio.run(run())
    assert [type(result) for result in results] == [errors.RequestCancelledError] * 2
    assert len(server.seen) == 2
