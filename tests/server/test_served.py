"""The whole command: deaths, restarts and ends of real processes, seen by a caller."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from cupaged.v1 import generation_pb2 as pb
from cupaged.v1 import model_pb2 as mpb
from tests.server.asking import Started, failure, health, request, stream_request, tokens
from tests.server.kserve_messages import KServe, infer
from tests.server.local_server import SECONDS, wait_until
from tests.server.supervised import Supervised

Code = grpc.StatusCode
SERVING, NOT_SERVING = 1, 2
NULL = ("--port", "0", "--metrics-port", "-1", "--runner", "null", "--null-steps-per-s", "100")


def test_an_engine_that_is_killed_and_comes_back(tiny_model: str) -> None:
    with Supervised(tiny_model, *NULL, "--restart-engine", "--frontends", "2") as server:
        watch = health(server.channel).Watch(health_pb2.HealthCheckRequest(), timeout=SECONDS)
        assert next(watch).status == SERVING
        running: Any = Started(server)  # type: ignore[arg-type]
        server.kill("engine")
        assert next(watch).status == NOT_SERVING
        status = failure(lambda: running.call)
        assert (status.code, status.reason) == (Code.UNAVAILABLE, "ENGINE_DEAD")
        assert "killed by SIGKILL" in status.message
        assert status.retry_s == 1.0
        status = failure(lambda: server.generation.Generate(request()))
        assert status.code is Code.UNAVAILABLE
        assert status.reason in ("ENGINE_DEAD", "LOADING")  # it is started after a second
        assert next(watch).status == SERVING
        answer = server.generation.Generate(request(), timeout=SECONDS)
        assert answer.samples[0].completion_tokens == 6
        load = server.models.GetLoad(mpb.GetLoadRequest(), timeout=SECONDS).load
        assert (load.state, load.engine_restarts_total) == (mpb.ENGINE_STATE_READY, 1)
        running = Started(server, stopping=tokens(100))  # type: ignore[arg-type]
        server.terminate()
        assert [*running.call][-1].finished.completion_tokens == 100
        assert server.end() == 0


def test_an_engine_that_is_killed_for_good(tiny_model: str) -> None:
    with Supervised(tiny_model, *NULL) as server:
        watch = health(server.channel).Watch(health_pb2.HealthCheckRequest(), timeout=SECONDS)
        assert next(watch).status == SERVING
        running: Any = Started(server)  # type: ignore[arg-type]
        server.kill("engine")
        for call in (lambda: running.call, lambda: server.generation.Generate(request())):
            status = failure(call)
            assert (status.code, status.reason) == (Code.INTERNAL, "ENGINE_DEAD")
            assert "killed by SIGKILL" in status.message and status.retry_s is None
        assert next(watch).status == NOT_SERVING
        assert server.end() == 1


def test_a_front_end_that_is_killed(tiny_model: str) -> None:
    """Its requests leave the engine, the other front end goes on, another one takes its place."""
    with Supervised(tiny_model, *NULL, "--frontends", "1") as server:
        running: Any = Started(server)  # type: ignore[arg-type]
        server.kill("frontend-1")
        status = failure(lambda: running.call)
        assert (status.code, status.reason) == (Code.UNAVAILABLE, None)
        server.until("1 requests are aborted")

        def is_served_again() -> bool:
            try:
                return bool(server.generation.Generate(request(), timeout=SECONDS).samples)
            except grpc.RpcError as error:
                assert error.code() is Code.UNAVAILABLE
                return False

        wait_until(is_served_again)
        server.terminate()
        assert server.end() == 0


def test_a_unix_socket_and_a_token_from_the_environment(tiny_model: str, tmp_path: Path) -> None:
    path = tmp_path / "grpc.sock"
    arguments = ("--uds", str(path), "--metrics-port", "-1", "--served-model-name", "named")
    with Supervised(tiny_model, *arguments, environment={"CUPAGED_API_KEY": "a-secret"}) as server:
        assert server.line == f"cupaged serving named on unix:{path}\n"
        status = failure(lambda: server.generation.Generate(request(), timeout=SECONDS))
        assert (status.code, status.reason) == (Code.UNAUTHENTICATED, "TOKEN_MISSING")
        metadata = (("authorization", "Bearer a-secret"),)
        ids = pb.GenerateStreamRequest(model="named", text="x", stopping=tokens(3))
        events = [*server.generation.GenerateStream(ids, metadata=metadata, timeout=SECONDS)]
        assert events[0].started.model == "named"
        assert events[-1].finished.completion_tokens == 3
        server.terminate()
        assert server.end() == 0
        assert "a-secret" not in server.log


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--chat-template", "{% if %}"), "the chat template does not compile"),
        (("--tokenizer", "/nowhere"), "no tokenizer.json"),
    ],
)
def test_what_only_a_front_end_can_refuse(
    tiny_model: str, arguments: tuple[str, ...], message: str
) -> None:
    with Supervised(tiny_model, *NULL, *arguments) as server:
        assert server.line == ""
        assert server.end() != 0
        last = server.log.splitlines()[-1]
        assert last.startswith("cupaged: ") and message in last
    assert stream_request().text


def test_statistics_are_of_all_front_ends(tiny_model: str) -> None:
    with Supervised(tiny_model, *NULL, "--frontends", "2") as server:
        options = [("grpc.use_local_subchannel_pool", 1)]  # a connection each
        channels = []

        def stats(channel: grpc.Channel) -> tuple[int, int]:
            (told,) = KServe(channel).ModelStatistics().model_stats
            assert told.inference_count == told.inference_stats.success.count
            return told.inference_stats.success.count, told.inference_stats.fail.count

        def by_another_connection() -> bool:
            channel = grpc.insecure_channel(server.address, options)
            channels.append(channel)
            asked = infer(text_input="a page", max_tokens=1)
            KServe(channel).ModelInfer(asked)
            failure(lambda: KServe(channel).ModelInfer(infer(text_input="")))
            assert stats(channel) == (len(channels), len(channels))
            names = {name for name in ("frontend-1", "frontend-2") if served_by(name)}
            return len(names) == 2

        def served_by(name: str) -> bool:
            return re.search(rf"{name}\b.*ModelInfer", server.log) is not None

        wait_until(by_another_connection)
        expected = (len(channels), len(channels))
        assert {stats(channel) for channel in channels} == {expected}
        for name in ("frontend-1", "frontend-2"):
            server.kill(name)  # one that takes its place goes on with its counts
            server.until(rf"(?s){name} is process.*{name} is process.*{name} listens at")
        with grpc.insecure_channel(server.address, options) as channel:
            assert stats(channel) == expected
        for each in channels:
            each.close()
