"""Traces: one span a request, joined to the caller's, exported over OTLP."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from cupaged.errors import ConfigError, NotSupportedError, PromptError
from cupaged.outputs import RequestMetrics
from cupaged.sampling_params import SamplingParams
from cupaged.server import tracing
from cupaged.server.tracing import RequestSpan, Tracer
from cupaged.server.tracing_otel import OtelTracer

SECRET = "the secret words of a prompt"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Recorded:
    """A tracer and what it has exported."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.tracer = OtelTracer(SimpleSpanProcessor(self._exporter), "tiny")

    def start(self, **more: Any) -> RequestSpan:
        return self.tracer.start("GenerateStream", request_id="req-7", stream=True, **more)

    def spans(self) -> Sequence[ReadableSpan]:
        return self._exporter.get_finished_spans()

    def span(self) -> ReadableSpan:
        (span,) = self.spans()
        return span


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    for name in ("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES", "OTEL_TRACES_SAMPLER"):
        monkeypatch.delenv(name, raising=False)
    return Recorded()


def finish(span: RequestSpan, times: RequestMetrics | None = None) -> None:
    span.finished(reasons=["stop", "length"], num_prompt_tokens=6, num_tokens=9, times=times)


def test_a_request_that_is_answered(recorded: Recorded) -> None:
    span = recorded.start()
    params = SamplingParams(temperature=0.5, top_p=0.9, n=2, seed=3, max_tokens=40, stop=[SECRET])
    span.asked("chat", params)
    finish(span)
    done = recorded.span()
    assert (done.name, done.kind, done.parent) == ("chat tiny", SpanKind.SERVER, None)
    assert done.status.status_code is StatusCode.UNSET
    assert done.resource.attributes["service.name"] == "cupaged"
    assert dict(done.attributes or {}) == {
        "rpc.system": "grpc",
        "rpc.service": "cupaged.v1.GenerationService",
        "rpc.method": "GenerateStream",
        "rpc.grpc.status_code": 0,
        "gen_ai.provider.name": "cupaged",
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.stream": True,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": 0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.max_tokens": 40,
        "gen_ai.request.seed": 3,
        "gen_ai.request.choice.count": 2,
        "gen_ai.response.id": "req-7",
        "gen_ai.response.model": "tiny",
        "gen_ai.response.finish_reasons": ("stop", "length"),
        "gen_ai.usage.input_tokens": 6,
        "gen_ai.usage.output_tokens": 9,
    }


def test_a_method_of_another_service(recorded: Recorded) -> None:
    finish(recorded.tracer.start("of.Others/Infer", request_id="1", stream=False))
    attributes = dict(recorded.span().attributes or {})
    assert (attributes["rpc.service"], attributes["rpc.method"]) == ("of.Others", "Infer")


def test_times_of_the_engine_are_events(recorded: Recorded) -> None:
    now = time.perf_counter()
    times = RequestMetrics(
        arrival_time=now - 4.0,
        first_scheduled_time=now - 3.5,
        first_token_time=now - 2.5,
        finished_time=now - 0.5,
        num_preemptions=0,
    )
    finish(recorded.start(), times)
    done = recorded.span()
    events = [(event.name, dict(event.attributes or {})) for event in done.events]
    assert [name for name, _ in events] == [
        "cupaged.scheduled",
        "cupaged.first_token",
        "cupaged.finished",
    ]
    seconds = {key: value for _, attributes in events for key, value in attributes.items()}
    assert seconds == pytest.approx(
        {"cupaged.queue_time_s": 0.5, "cupaged.prefill_time_s": 1.0, "cupaged.decode_time_s": 2.0}
    )
    scheduled, first_token, finished = (event.timestamp for event in done.events)
    assert (first_token - scheduled, finished - first_token) == pytest.approx((1e9, 2e9), abs=1e4)
    assert done.attributes is not None
    assert done.attributes["gen_ai.response.time_to_first_chunk"] == pytest.approx(1.5)


def test_times_that_are_unknown_are_no_events(recorded: Recorded) -> None:
    finish(recorded.start(), RequestMetrics(1.0, 2.0, None, None, 0))
    assert [event.name for event in recorded.span().events] == ["cupaged.scheduled"]


def test_the_span_joins_the_callers_trace(recorded: Recorded) -> None:
    metadata = [
        ("traceparent", f"00-{TRACE}-{PARENT}-01"),
        ("tracestate", "a=1"),
        ("tracestate", "b=2"),
        ("authorization", "Bearer x"),
        ("trace-bin", b"\x00"),
    ]
    finish(recorded.start(metadata=metadata))
    done = recorded.span()
    assert done.context is not None
    assert done.parent is not None
    assert f"{done.context.trace_id:032x}" == TRACE
    assert f"{done.parent.span_id:016x}" == PARENT
    assert done.context.trace_state.to_header() == "a=1,b=2"


@pytest.mark.parametrize(
    "value", ["", "garbage", f"00-{'0' * 32}-{PARENT}-01", f"00-{TRACE}-{PARENT}", "x" * 5000]
)
def test_a_bad_traceparent_starts_a_new_trace(recorded: Recorded, value: str) -> None:
    finish(recorded.start(metadata=[("traceparent", value)]))
    assert recorded.span().parent is None


def test_what_the_caller_does_not_sample_is_not_recorded(recorded: Recorded) -> None:
    span = recorded.start(metadata=[("traceparent", f"00-{TRACE}-{PARENT}-00")])
    span.asked("chat", SamplingParams())
    finish(span)
    recorded.start(metadata=[("traceparent", f"00-{TRACE}-{PARENT}-00")]).failed("INTERNAL")
    assert recorded.spans() == ()


@pytest.mark.parametrize(
    ("code", "reason", "number", "error_type", "status"),
    [
        ("CANCELLED", "", 1, "CANCELLED", StatusCode.UNSET),
        ("INVALID_ARGUMENT", "", 3, "INVALID_ARGUMENT", StatusCode.UNSET),
        ("RESOURCE_EXHAUSTED", "QUEUE_FULL", 8, "QUEUE_FULL", StatusCode.UNSET),
        ("ABORTED", "SLOW_CONSUMER", 10, "SLOW_CONSUMER", StatusCode.UNSET),
        ("DEADLINE_EXCEEDED", "", 4, "DEADLINE_EXCEEDED", StatusCode.ERROR),
        ("INTERNAL", "ENGINE_DEAD", 13, "ENGINE_DEAD", StatusCode.ERROR),
        ("UNAVAILABLE", "DRAINING", 14, "DRAINING", StatusCode.ERROR),
    ],
)
def test_a_request_that_fails(
    recorded: Recorded, code: str, reason: str, number: int, error_type: str, status: StatusCode
) -> None:
    recorded.start().failed(code, reason, PromptError("prompt", SECRET, "a text"))
    done = recorded.span()
    assert done.attributes is not None
    assert done.attributes["rpc.grpc.status_code"] == number
    assert done.attributes["error.type"] == error_type
    assert done.status.status_code is status
    told = "prompt must be a text, got another str" if status is StatusCode.ERROR else None
    assert done.status.description == told


def test_exactly_one_end_counts(recorded: Recorded, caplog: pytest.LogCaptureFixture) -> None:
    span = recorded.start()
    finish(span)
    span.failed("CANCELLED")
    finish(span)
    assert recorded.span().attributes is not None
    assert "error.type" not in (recorded.span().attributes or {})
    assert caplog.records == []


def test_no_text_of_the_prompt_anywhere(recorded: Recorded) -> None:
    span = recorded.start(metadata=[("x-prompt", SECRET)])
    span.asked("text_completion", SamplingParams(stop=[SECRET], bad_words=[SECRET]))
    span.failed("INTERNAL", "", RuntimeError(SECRET))
    assert SECRET not in recorded.span().to_json()


@pytest.mark.parametrize(
    ("variable", "value"),
    [("OTEL_SERVICE_NAME", "mine"), ("OTEL_RESOURCE_ATTRIBUTES", "a=b,service.name=mine")],
)
def test_the_environment_names_the_service(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    other = Recorded()
    finish(other.start())
    assert other.span().resource.attributes["service.name"] == "mine"


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps the names of the spans that it gets."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.names += [span.name for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.fixture
def collector() -> Iterator[tuple[Collector, str]]:
    """A collector of OTLP and its URL."""
    servicer = Collector()
    server = grpc.server(ThreadPoolExecutor(1))
    add: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
    add(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"http://127.0.0.1:{port}"
    server.stop(None).wait()


def test_export_over_otlp(collector: tuple[Collector, str]) -> None:
    servicer, url = collector
    tracer = tracing.build(url, model_name="tiny")
    for _ in range(3):
        finish(tracer.start("Generate", request_id="r", stream=False))
    tracer.close(timeout_s=60)
    assert servicer.names == ["text_completion tiny"] * 3


class Stuck(SpanProcessor):
    """Does not end before it may, as while it waits for a collector that is away."""

    def __init__(self) -> None:
        self.asked, self.may_end = threading.Event(), threading.Event()

    def shutdown(self) -> None:
        self.asked.set()
        self.may_end.wait()


def test_a_collector_that_is_away_does_not_hold_up_the_end() -> None:
    stuck = Stuck()
    OtelTracer(stuck, "tiny").close(timeout_s=0.05)
    assert stuck.asked.wait(60)
    assert not stuck.may_end.is_set()
    stuck.may_end.set()


def test_without_an_endpoint_nothing_happens() -> None:
    tracer = tracing.build(None, model_name="tiny")
    assert type(tracer) is Tracer
    span = tracer.start("Generate", request_id="r", stream=False)
    span.asked("chat", SamplingParams())
    finish(span)
    span.failed("CANCELLED")
    tracer.close()


@pytest.mark.parametrize(
    "endpoint", ["", "localhost:4317", "grpc://x:1", "http://", "http://x:port", "http://x:99999"]
)
def test_a_bad_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^otlp_endpoint must be a URL such as http://"
    ) as caught:
        tracing.check_endpoint(endpoint)
    assert caught.value.value == endpoint


@pytest.mark.parametrize("package", ["opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.grpc"])
def test_packages_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    message = (
        f"otlp_endpoint asks for traces, but the package {package} is not installed: "
        "pip install 'cupaged[otel]'"
    )
    with pytest.raises(NotSupportedError) as caught:
        tracing.build("http://localhost:4317", model_name="tiny")
    assert str(caught.value) == message
    tracing.check_endpoint(None)
