"""Deaths of the engine and of front ends while there is work: one status a call, nothing lost."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from cupaged.v1 import generation_pb2_grpc
from tests.server.asking import health, request, stream_request, tokens, told
from tests.server.local_server import SECONDS, is_idle, wait_until
from tests.server.watched_server import WatchedServer, is_alive, total

SERVING, NOT_SERVING = 1, 2
RUNNING, STREAMS, CHANNELS = 12, 20, 4  # some streams wait in the queue
LONG, SHORT = 1000, 60  # tokens of streams that are lost, and of those that are not
NULL = ("--runner", "null", "--null-steps-per-s", "100", "--max-num-seqs", str(RUNNING))
Ends = Counter[tuple[str, str | None, int]]  # code, reason, and tokens if the code is OK
FATAL = [signal.SIGKILL, signal.SIGTERM]


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its path is short: a socket's address has to fit."""
    return tmp_path_factory.mktemp("server")


@pytest.fixture
def one(tiny_model: str, folder: Path) -> Iterator[WatchedServer]:
    """A server that starts its engine again; it ends as it should and leaves nothing behind."""
    with WatchedServer(folder, tiny_model, *NULL, "--restart-engine") as server:
        yield server
        server.terminate()
        assert server.end() == 0
        server.check_gone()


def under_load(server: WatchedServer, act: Callable[[], None], num_tokens: int) -> Ends:
    """Begin streams, do something while the engine has all of them, and read them to their ends."""

    async def read(stub: Any) -> tuple[str, str | None, int]:
        message = stream_request(stopping=tokens(num_tokens))
        call = stub.GenerateStream(message, timeout=4 * SECONDS)
        came, ends = 0, 0
        try:
            async for event in call:
                came += len(event.delta.token_ids)
                ends += event.WhichOneof("event") == "finished"
        except grpc.aio.AioRpcError as error:
            assert not ends
            return error.code().name, told(error).reason, 0
        assert ends == 1
        return (await call.code()).name, None, came

    async def run() -> Ends:
        options = [("grpc.use_local_subchannel_pool", 1)]  # a connection each
        channels = [grpc.aio.insecure_channel(server.address, options) for _ in range(CHANNELS)]
        stubs = [generation_pb2_grpc.GenerationServiceStub(channel) for channel in channels]
        wanted = await asyncio.to_thread(num_arrived, server) + STREAMS
        async with asyncio.timeout(4 * SECONDS):
            reading = [asyncio.ensure_future(read(stubs[i % CHANNELS])) for i in range(STREAMS)]
            await asyncio.to_thread(wait_until, lambda: num_arrived(server) == wanted)
            await asyncio.to_thread(act)
            ends = Counter(await asyncio.gather(*reading))
        for channel in channels:
            await channel.close()
        return ends

    return asyncio.run(run())


def num_arrived(server: WatchedServer) -> int:
    """Requests that the engine has had, finished or not."""
    (stats,) = server.ask_engine("stats")
    live = sum(stats[f"num_{state}"] for state in ("running", "waiting", "preempted"))
    return int(live + sum(stats["finished_total"].values()))


def kill(server: WatchedServer, name: str, number: int) -> Callable[[], None]:
    """An action for `under_load`."""
    return lambda: os.kill(server.pid(name), number)


def watch_health(server: WatchedServer) -> Any:
    """The statuses of the server, as they change."""
    return health(server.channel).Watch(
        health_pb2.HealthCheckRequest(), timeout=4 * SECONDS, wait_for_ready=True
    )


def check_serves(server: WatchedServer) -> None:
    """As much work as before, and this time nothing happens."""
    assert under_load(server, lambda: None, SHORT) == {("OK", None, SHORT): STREAMS}
    server.wait_idle()


def check_counted(server: WatchedServer, failures: int) -> None:
    """So many requests have failed with the engine, and every request has had one end."""
    samples = server.metrics()
    lost = total(samples, "request_failed_total", 'reason="ENGINE_DEAD"')
    assert lost == total(samples, "request_failed_total") == failures
    ended = lost + total(samples, "request_success_total")
    assert total(samples, "request_received_total") == ended


def test_the_engine_dies_and_comes_back(one: WatchedServer) -> None:
    for deaths, number in enumerate(FATAL, 1):
        watch = watch_health(one)
        assert next(watch).status == SERVING
        before = one.pid("engine")
        ends = under_load(one, kill(one, "engine", number), LONG)
        assert ends == {("UNAVAILABLE", "ENGINE_DEAD", 0): STREAMS}
        assert [next(watch).status, next(watch).status] == [NOT_SERVING, SERVING]
        watch.cancel()
        assert one.pid("engine") != before
        check_serves(one)
        assert total(one.metrics(), "engine_restarts_total") == deaths
        check_counted(one, deaths * STREAMS)


@pytest.mark.parametrize("number", FATAL)
def test_the_engine_dies_for_good(tiny_model: str, folder: Path, number: signal.Signals) -> None:
    with WatchedServer(folder, tiny_model, *NULL) as server:
        watch = watch_health(server)
        assert next(watch).status == SERVING
        ends = under_load(server, kill(server, "engine", number), LONG)
        assert ends == {("INTERNAL", "ENGINE_DEAD", 0): STREAMS}
        assert next(watch).status == NOT_SERVING
        assert server.end() == 1
        server.check_gone()


def test_a_front_end_dies_and_comes_back(one: WatchedServer) -> None:
    for number in FATAL:
        before = one.pid("frontend-1")
        finished = Counter(one.ask_engine("stats")[0]["finished_total"])
        ends = under_load(one, kill(one, "frontend-1", number), LONG)
        assert ends == {("UNAVAILABLE", None, 0): STREAMS}  # the connection's end, not a status
        one.until(rf"(?s)process {before}.*frontend-1 has gone .* {STREAMS} requests are aborted")
        one.wait_idle()
        (stats,) = one.ask_engine("stats")
        assert stats["finished_total"] == {**finished, "abort": finished["abort"] + STREAMS}
        watch = watch_health(one)  # the same port
        while next(watch).status != SERVING:
            pass
        watch.cancel()
        assert one.pid("frontend-1") != before
        check_serves(one)
    assert one.log.count("engine is process") == 1


def test_a_front_end_that_hangs_does_not_outlive_its_supervisor(
    tiny_model: str, folder: Path
) -> None:
    """It would share the port with the next server, and answer nobody."""
    with WatchedServer(folder, tiny_model, "--runner", "null") as server:
        pid = server.pid("frontend-1")
        os.kill(pid, signal.SIGSTOP)
        server.process.kill()
        wait_until(lambda: not is_alive(pid))


def test_connections_go_to_front_ends_that_serve(tiny_model: str, folder: Path) -> None:
    """Not to one that is being started again: it would answer that the model is loading."""

    def serve() -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(server.address, options) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            assert stub.Generate(request(), timeout=SECONDS).samples[0].completion_tokens == 6

    with WatchedServer(folder, tiny_model, "--runner", "null", "--frontends", "2") as server:
        pid = server.pid("frontend-1")
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: server.pid("frontend-1") != pid)
        calls = 0
        while server.total("frontends_listening") < 2:
            serve()
            calls += 1
        assert calls > 0
        for _ in range(20):
            serve()
        server.terminate()
        assert server.end() == 0
        server.check_gone()


def test_a_front_end_stands_still(one: WatchedServer) -> None:
    """The engine goes on without it; all it has to say is said when it goes on, too."""

    def pause() -> None:
        pid = one.pid("frontend-1")
        os.kill(pid, signal.SIGSTOP)
        try:
            wait_until(lambda: is_idle(one.ask_engine("stats", "audit")[0]))
        finally:
            os.kill(pid, signal.SIGCONT)

    assert under_load(one, pause, SHORT) == {("OK", None, SHORT): STREAMS}
    one.wait_idle()
    check_serves(one)
