"""How calls end before their time, and that nothing of them is left in the engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from cupaged.v1 import generation_pb2 as pb
from cupaged.v1 import generation_pb2_grpc
from tests.server.asking import PROMPT, Started, failure, request, stream_request, tokens, waiting
from tests.server.local_server import SECONDS, LocalServer, wait_until

Code = grpc.StatusCode


def failed_total(server: LocalServer, code: str) -> float:
    """Requests that the front end has counted with this code."""
    name, labels = "cupaged_request_failed_total", {"model_name": "tiny", "code": code}
    families = [f for f in server.registry.collect() if f.name == name.removesuffix("_total")]
    samples = [s for f in families for s in f.samples if s.name == name]
    return sum(s.value for s in samples if labels.items() <= s.labels.items())


@pytest.fixture
def cancelled(paced: LocalServer) -> Callable[[], float]:
    """How many requests were counted as cancelled since the test began."""
    before = failed_total(paced, "CANCELLED")
    return lambda: failed_total(paced, "CANCELLED") - before


# ---- cancellation ------------------------------------------------------------------------------


def test_a_cancelled_stream(paced: LocalServer, cancelled: Callable[[], float]) -> None:
    running = Started(paced)
    assert paced.engine is not None
    running.call.cancel()
    paced.wait_idle()
    wait_until(lambda: cancelled() == 1)


def test_a_cancelled_call(paced: LocalServer, cancelled: Callable[[], float]) -> None:
    call = paced.generation.Generate.future(request(stopping=tokens(1000)), timeout=SECONDS)
    wait_until(lambda: paced.stats()["num_running"] == 1)
    call.cancel()
    paced.wait_idle()
    wait_until(lambda: cancelled() == 1)


def test_a_client_that_goes_while_it_waits(
    paced: LocalServer, cancelled: Callable[[], float]
) -> None:
    with Started(paced):
        call = waiting(paced)
        call.cancel()
        wait_until(lambda: paced.stats()["num_waiting"] == 0)
        assert paced.stats()["num_running"] == 1  # the other one goes on
        wait_until(lambda: cancelled() == 1)
    paced.wait_idle()


def test_a_client_that_disappears(paced: LocalServer, cancelled: Callable[[], float]) -> None:
    """Its connection is closed without a word about its calls."""
    with grpc.insecure_channel(paced.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        call = stub.GenerateStream(stream_request(stopping=tokens(1000)), timeout=SECONDS)
        next(call)
    paced.wait_idle()
    wait_until(lambda: cancelled() == 1)


# ---- deadlines ---------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
def test_a_deadline(paced: LocalServer, method: str) -> None:
    before = failed_total(paced, "DEADLINE_EXCEEDED")
    make = request if method == "Generate" else stream_request
    call = getattr(paced.generation, method)
    status = failure(lambda: call(make(stopping=tokens(1000)), timeout=0.1))
    assert (status.code, status.reason) == (Code.DEADLINE_EXCEEDED, None)
    paced.wait_idle()
    wait_until(lambda: failed_total(paced, "DEADLINE_EXCEEDED") == before + 1)


def test_a_deadline_while_waiting(paced: LocalServer) -> None:
    with Started(paced):
        call = paced.generation.GenerateStream
        status = failure(lambda: call(stream_request(), timeout=0.1))
        assert status.code is Code.DEADLINE_EXCEEDED
        wait_until(lambda: paced.stats()["num_waiting"] == 0)
    paced.wait_idle()


def test_a_deadline_that_has_passed_on_arrival(paced: LocalServer) -> None:
    """The front end sees the call after its deadline; the engine never hears of it."""
    before = failed_total(paced, "DEADLINE_EXCEEDED") + failed_total(paced, "CANCELLED")
    is_late = threading.Event()
    accepted = paced.stats()["prompt_tokens_total"]

    def sleep() -> None:
        is_late.set()
        time.sleep(0.3)

    paced.call(sleep)
    is_late.wait(SECONDS)
    status = failure(lambda: paced.generation.Generate(request(), timeout=0.1))
    assert status.code is Code.DEADLINE_EXCEEDED
    assert paced.stats()["prompt_tokens_total"] == accepted
    after = failed_total(paced, "DEADLINE_EXCEEDED") + failed_total(paced, "CANCELLED")
    assert after - before <= 1  # gRPC may not even have shown it to us


# ---- Abort -------------------------------------------------------------------------------------


def abort(server: LocalServer, *ids: str) -> list[str]:
    answer = server.generation.Abort(pb.AbortRequest(request_ids=ids), timeout=SECONDS)
    return [*answer.aborted_request_ids]


def test_abort_ends_a_stream_with_ok(paced: LocalServer) -> None:
    running = Started(paced, request_id="a")
    assert abort(paced, "unknown", "a", "a") == ["a"]
    events = list(running.call)
    assert running.call.code() is Code.OK
    assert events[-1].finished.reason == pb.FINISH_REASON_ABORT
    assert events[-1].usage.completion_tokens == events[-1].finished.completion_tokens < 1000
    assert abort(paced, "a") == [] and abort(paced) == []
    paced.wait_idle()


def test_abort_ends_a_call_and_one_that_waits(paced: LocalServer) -> None:
    first = paced.generation.Generate.future(request(request_id="a", stopping=tokens(1000)))
    wait_until(lambda: paced.stats()["num_running"] == 1)
    second = waiting(paced, request_id="b")
    assert sorted(abort(paced, "a", "b")) == ["a", "b"]
    answer = first.result(SECONDS)
    assert answer.samples[0].finish_reason == pb.FINISH_REASON_ABORT
    events = list(second)
    assert [e.WhichOneof("event") for e in events] == ["started", "finished"]
    assert events[-1].finished.completion_tokens == 0
    assert not events[-1].usage.HasField("queue_time")
    paced.wait_idle()


def test_abort_of_all_samples(steady: LocalServer) -> None:
    sampling = pb.SamplingOptions(n=3)
    running = Started(steady, request_id="a", sampling=sampling)
    assert abort(steady, "a") == ["a"]
    ends = [e.finished for e in running.call if e.HasField("finished")]
    assert sorted(end.index for end in ends) == [0, 1, 2]
    assert {end.reason for end in ends} == {pb.FINISH_REASON_ABORT}
    steady.wait_idle()


@pytest.fixture(scope="module")
def steady(tiny_model: str) -> Any:
    with LocalServer(tiny_model, runner="null", null_steps_per_s=100.0) as running:
        yield running


def test_abort_of_too_many(paced: LocalServer) -> None:
    status = failure(lambda: abort(paced, *map(str, range(1025))))
    assert (status.code, status.reason) == (Code.INVALID_ARGUMENT, "INVALID_PARAMETER")
    assert [field for field, _ in status.violations] == ["request_ids"]


# ---- slow readers ------------------------------------------------------------------------------


def test_a_slow_reader(tiny_model: str) -> None:
    """It reads nothing until its window is full; the engine is not held up, and it is told."""
    narrow = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
    long = pb.SamplingOptions(n=64)
    output = pb.OutputOptions(logprobs=0)
    with (
        LocalServer(
            tiny_model, runner="null", null_steps_per_s=100.0, stream_buffer_tokens=2048
        ) as server,
        grpc.insecure_channel(server.address, options=narrow) as channel,
    ):
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        before = failed_total(server, "ABORTED")
        fields = {"sampling": long, "output": output, "stopping": tokens(1000)}
        call = stub.GenerateStream(stream_request(**fields), timeout=SECONDS)
        next(call)
        wait_until(lambda: failed_total(server, "ABORTED") == before + 1)
        server.wait_idle()
        assert server.generation.Generate(request(PROMPT), timeout=SECONDS).samples
        status = failure(lambda: call)
        assert (status.code, status.reason) == (Code.ABORTED, "SLOW_CONSUMER")
        assert "at most 2048 may wait" in status.message


def test_a_slow_reader_that_catches_up(steady: LocalServer) -> None:
    """What it did not read in time comes in fewer messages."""
    call = Started(steady, stopping=tokens(100)).call
    wait_until(lambda: steady.stats()["num_running"] == 0)
    events = list(call)
    assert sum(len(e.delta.token_ids) for e in events) >= 98
    assert events[-1].finished.completion_tokens == 100


# ---- queue_timeout -----------------------------------------------------------------------------


def test_a_queue_timeout_does_not_end_what_runs(paced: LocalServer) -> None:
    events = list(
        paced.generation.GenerateStream(
            stream_request(queue_timeout=Duration(nanos=100_000_000), stopping=tokens(30))
        )
    )
    assert events[-1].finished.completion_tokens == 30
