"""Traces through OpenTelemetry (extra `otel`): one span of kind SERVER a request.

Attributes follow the conventions `gen_ai.*` and `rpc.*`; none holds text of a prompt or an answer.
The span joins the trace that the W3C metadata names, and is not recorded where they say so. Times
of the engine become events at their moments, with how long each phase took.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from cupaged._version import __version__
from cupaged.outputs import RequestMetrics
from cupaged.sampling_params import SamplingParams
from cupaged.server.request_log import text_without_prompt
from cupaged.server.tracing import Metadata, RequestSpan, Tracer

_SERVICE = "cupaged.v1.GenerationService"
_GRPC_CODES = {
    name: number
    for number, name in enumerate((
        "OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND",
        "ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION",
        "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS",
        "UNAUTHENTICATED",
    ))
}  # fmt: skip
# The others are the client's doing: the conventions leave the status of a server's span unset.
_OUR_ERRORS = frozenset({
    "UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS",
})  # fmt: skip
_PARAMETERS = {  # field of SamplingParams -> attribute
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "max_tokens": "gen_ai.request.max_tokens",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "seed": "gen_ai.request.seed",
    "n": "gen_ai.request.choice.count",
}
_EVENTS = (  # the moment, how long the phase before it took, and what both are called
    ("first_scheduled_time", "queue_time", "cupaged.scheduled", "cupaged.queue_time_s"),
    ("first_token_time", "prefill_time", "cupaged.first_token", "cupaged.prefill_time_s"),
    ("finished_time", "decode_time", "cupaged.finished", "cupaged.decode_time_s"),
)


def exporting_tracer(otlp_endpoint: str, model_name: str) -> OtelTracer:
    """A tracer whose spans go to a collector in batches, from a thread of their own."""
    exporter = OTLPSpanExporter(endpoint=otlp_endpoint)
    return OtelTracer(BatchSpanProcessor(exporter), model_name)


class OtelTracer(Tracer):
    """Starts recorded spans.

    Args:
        processor: gets the spans that have ended.
        model_name: the first served name.
    """

    def __init__(self, processor: SpanProcessor, model_name: str) -> None:
        named = "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
        service = {} if named or "OTEL_SERVICE_NAME" in os.environ else {"service.name": "cupaged"}
        self._provider = TracerProvider(
            resource=Resource.create({**service, "service.version": __version__}),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("cupaged", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._model_name = model_name

    def start(
        self, method: str, *, request_id: str, stream: bool, metadata: Metadata = ()
    ) -> RequestSpan:
        carrier: dict[str, str] = {}
        for key, value in metadata:
            if key in ("traceparent", "tracestate") and isinstance(value, str):
                carrier[key] = f"{carrier[key]},{value}" if key in carrier else value
        service, _, name = method.rpartition("/")
        span = self._tracer.start_span(
            f"text_completion {self._model_name}",
            context=self._propagator.extract(carrier, Context()),
            kind=SpanKind.SERVER,
            attributes={
                "rpc.system": "grpc",
                "rpc.service": service or _SERVICE,
                "rpc.method": name,
                "gen_ai.provider.name": "cupaged",
                "gen_ai.operation.name": "text_completion",
                "gen_ai.request.model": self._model_name,
                "gen_ai.request.stream": stream,
                "gen_ai.response.id": request_id,
            },
        )
        return OtelSpan(span, self._model_name)

    def close(self, timeout_s: float = 2.0) -> None:
        # An exporter that cannot reach its collector tries for longer than an ending server waits.
        ending = threading.Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        ending.join(timeout_s)


class OtelSpan(RequestSpan):
    """Wraps the span of one request."""

    def __init__(self, span: Span, model_name: str) -> None:
        self._span = span
        self._model_name = model_name

    def asked(self, operation: str, params: SamplingParams) -> None:
        if not self._span.is_recording():
            return
        self._span.update_name(f"{operation} {self._model_name}")
        self._span.set_attribute("gen_ai.operation.name", operation)
        for field, attribute in _PARAMETERS.items():
            value = getattr(params, field)
            if value is not None:
                self._span.set_attribute(attribute, value)

    def finished(
        self,
        *,
        reasons: Sequence[str],
        num_prompt_tokens: int,
        num_tokens: int,
        times: RequestMetrics | None = None,
    ) -> None:
        if not self._span.is_recording():
            return
        self._span.set_attributes({
            "gen_ai.response.model": self._model_name,
            "gen_ai.response.finish_reasons": list(reasons),
            "gen_ai.usage.input_tokens": num_prompt_tokens,
            "gen_ai.usage.output_tokens": num_tokens,
            "rpc.grpc.status_code": _GRPC_CODES["OK"],
        })  # fmt: skip
        if times is not None:
            self._add_events(times)
        self._span.end()

    def failed(self, code: str, reason: str = "", error: BaseException | None = None) -> None:
        if not self._span.is_recording():
            return
        self._span.set_attributes({
            "rpc.grpc.status_code": _GRPC_CODES.get(code, _GRPC_CODES["UNKNOWN"]),
            "error.type": reason or code,
        })  # fmt: skip
        if code in _OUR_ERRORS:
            description = None if error is None else text_without_prompt(error)
            self._span.set_status(Status(StatusCode.ERROR, description))
        self._span.end()

    def _add_events(self, times: RequestMetrics) -> None:
        """Events at the engine's moments, whose clock has another zero than the span's."""
        zero_ns = time.time_ns() - time.perf_counter_ns()
        if times.time_to_first_token is not None:
            self._span.set_attribute(
                "gen_ai.response.time_to_first_chunk", times.time_to_first_token
            )
        for moment, duration, event, attribute in _EVENTS:
            at = getattr(times, moment)
            if at is not None:
                seconds = getattr(times, duration)
                attributes = {} if seconds is None else {attribute: seconds}
                self._span.add_event(event, attributes, timestamp=zero_ns + round(at * 1e9))
