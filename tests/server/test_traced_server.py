"""`cupaged serve --trace`: what was served runs again, and a killed engine leaves what it did."""

from __future__ import annotations

from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2

from cupaged.engine.step_events import AddEvent
from cupaged.engine.trace_file import TraceReader
from cupaged.engine.trace_replay import Replay, Replayed
from tests.server.asking import health, request, tokens
from tests.server.local_server import SECONDS, wait_until
from tests.server.watched_server import WatchedServer

SERVING = 1
NULL = ("--runner", "null", "--restart-engine")


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its path is short: a socket's address has to fit."""
    return tmp_path_factory.mktemp("server")


def ask(server: WatchedServer, number: int) -> None:
    """Some requests, one after another."""
    for _ in range(number):
        message = request(stopping=tokens(20))
        assert server.generation.Generate(message, timeout=SECONDS)


def status(server: WatchedServer) -> int:
    """What its health service says."""
    check = health(server.channel).Check
    return int(check(health_pb2.HealthCheckRequest(), timeout=SECONDS).status)


def replayed(path: Path) -> tuple[Replayed, int]:
    """The verdict on a trace, and how many requests it holds."""
    with TraceReader(path) as trace:
        verdict = Replay(trace.header).run(trace)
    with TraceReader(path) as trace:
        return verdict, sum(isinstance(event, AddEvent) for event in trace)


def test_each_engine_has_its_trace(tiny_model: str, folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "steps.trace"
    with WatchedServer(folder, tiny_model, *NULL, "--trace", str(path)) as server:
        ask(server, 3)
        before = server.pid("engine")
        server.kill("engine")
        wait_until(lambda: server.pid("engine") != before)
        wait_until(lambda: status(server) == SERVING)
        ask(server, 2)
        server.terminate()
        assert server.end() == 0
    for name, num_requests in (("steps.trace.old", 3), ("steps.trace", 2)):
        verdict, number = replayed(tmp_path / name)
        assert (verdict.difference, verdict.broken, number) == (None, "", num_requests)
        assert verdict.num_steps == 20 * num_requests


def test_a_file_that_cannot_be_written_ends_the_server(
    tiny_model: str, folder: Path, tmp_path: Path
) -> None:
    with WatchedServer(folder, tiny_model, "--trace", str(tmp_path / "no" / "t")) as server:
        assert server.end() == 2
    assert f"trace must be a file that can be written (there is no folder {tmp_path}" in server.log
