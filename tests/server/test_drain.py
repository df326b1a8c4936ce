"""The end of a front end: health first, running streams to their end, nothing new."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from cupaged.v1 import generation_pb2 as pb
from cupaged.v1 import model_pb2 as mpb
from tests.server.asking import Started, failure, health, request, stream_request, tokens
from tests.server.local_server import SECONDS, LocalServer, wait_until

Code = grpc.StatusCode
SERVING, NOT_SERVING = 1, 2


@pytest.fixture
def ending(tiny_model: str) -> Any:
    with LocalServer(tiny_model, runner="null", null_steps_per_s=100.0) as running:
        yield running


class Draining:
    """Drains; the port stays open until `go_on`, however slow the machine is."""

    def __init__(self, server: LocalServer, timeout_s: float = SECONDS) -> None:
        self._server = server
        self._go_on = asyncio.Event()
        drain = server.front_end.drain(1.0, timeout_s, sleep=lambda seconds: self._go_on.wait())
        self._done: Future[None] = asyncio.run_coroutine_threadsafe(drain, server._loop)

    def go_on(self) -> None:
        self._server.call(self._go_on.set)

    def wait(self) -> None:
        self.go_on()
        self._done.result(SECONDS)


def test_running_streams_finish_and_new_calls_are_refused(ending: LocalServer) -> None:
    watch = health(ending.channel).Watch(health_pb2.HealthCheckRequest(), timeout=SECONDS)
    assert next(watch).status == SERVING
    loads = ending.models.WatchLoad(mpb.WatchLoadRequest(), timeout=SECONDS)
    next(loads)
    running = Started(ending, stopping=tokens(150)).call
    whole = ending.generation.Generate.future(request(stopping=tokens(120)), timeout=SECONDS)
    wait_until(lambda: ending.stats()["num_running"] == 2)
    draining = Draining(ending)
    assert next(watch).status == NOT_SERVING
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="x")])
    for call in (
        lambda: ending.generation.Generate(request()),
        lambda: ending.generation.GenerateStream(stream_request()),
        lambda: ending.generation.Tokenize(pb.TokenizeRequest(text="x")),
        lambda: ending.generation.Detokenize(pb.DetokenizeRequest()),
        lambda: ending.generation.ApplyChatTemplate(pb.ApplyChatTemplateRequest(chat=chat)),
    ):
        status = failure(call)
        assert (status.code, status.reason) == (Code.UNAVAILABLE, "DRAINING")
        assert status.retry_s == 1.0
        assert status.metadata["grpc-retry-pushback-ms"] == "1000"
    load = ending.models.GetLoad(mpb.GetLoadRequest()).load
    assert load.state == mpb.ENGINE_STATE_DRAINING
    draining.go_on()
    for stream in (watch, loads):  # what has no end of its own is ended
        status = failure(lambda: stream)  # noqa: B023 - called at once
        assert (status.code, status.reason) == (Code.UNAVAILABLE, "DRAINING")
    events = list(running)
    assert events[-1].finished.completion_tokens == 150
    assert whole.result(SECONDS).samples[0].completion_tokens == 120
    draining.wait()
    with grpc.insecure_channel(ending.address) as fresh:
        check = health(fresh).Check
        status = failure(lambda: check(health_pb2.HealthCheckRequest(), timeout=SECONDS))
        assert status.code is Code.UNAVAILABLE


def test_abort_still_works_while_draining(ending: LocalServer) -> None:
    running = Started(ending, request_id="long").call
    draining = Draining(ending)
    wait_until(lambda: ending.client.state.phase == "draining")
    answer = ending.generation.Abort(pb.AbortRequest(request_ids=["long"]), timeout=SECONDS)
    assert [*answer.aborted_request_ids] == ["long"]
    assert [*running][-1].finished.reason == pb.FINISH_REASON_ABORT
    draining.wait()


def test_what_takes_too_long_is_ended(ending: LocalServer) -> None:
    running = Started(ending).call
    Draining(ending, 0.2).wait()
    status = failure(lambda: running)
    assert status.code is Code.UNAVAILABLE
    assert ending.engine is not None
    core = ending.engine.core
    wait_until(lambda: core.block_manager.num_used_blocks == 0)


def test_waiting_requests_count_as_running_ones(tiny_model: str) -> None:
    engine = {"max_num_seqs": 1}
    with LocalServer(tiny_model, runner="null", null_steps_per_s=200.0, engine=engine) as server:
        calls = [
            server.generation.GenerateStream(stream_request(stopping=tokens(40)), timeout=SECONDS)
            for _ in range(3)
        ]
        wait_until(lambda: server.stats()["num_waiting"] == 2)
        draining = Draining(server)
        draining.go_on()
        for call in calls:
            assert [*call][-1].finished.completion_tokens == 40
        draining.wait()
