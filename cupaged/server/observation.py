"""What is counted, logged and traced of a request, in one object with exactly one end."""

from __future__ import annotations

import time
from dataclasses import dataclass

from cupaged.engine.text_shell import TextRequest
from cupaged.sampling_params import SamplingParams
from cupaged.server.error_status import RpcStatus
from cupaged.server.log_setup import request_id_var
from cupaged.server.metrics import FrontEndMetrics, RequestMeter
from cupaged.server.request_log import RequestLog
from cupaged.server.rpc import Call
from cupaged.server.tracing import RequestSpan, Tracer

_CLOCKS_DIFFER_S = 0.1  # a client whose deadline has passed cancels, perhaps before ours has


@dataclass(frozen=True, slots=True)
class Observers:
    """Where all requests of a front end are told to."""

    metrics: FrontEndMetrics
    log: RequestLog
    tracer: Tracer


class Observation:
    """One request, from its arrival, when this is made. The first end counts.

    Attributes:
        meter: counts what is written.
        is_answered: the request was answered to its end.
        arrival_time: seconds on the clock of `time.perf_counter`, as all times of the engine.
    """

    def __init__(self, observers: Observers, call: Call, method: str, *, stream: bool) -> None:
        self.arrival_time = time.perf_counter()
        self.meter: RequestMeter = observers.metrics.received(
            stream=stream, num_bytes=call.num_bytes
        )
        self._observers = observers
        self._call = call
        self._method = method
        self._stream = stream
        self._span = RequestSpan()
        self._ended = False
        self.is_answered = False
        call.on_failure = self._failed

    def identified(self, request_id: str) -> None:
        """The request has an id."""
        self._call.request_id = request_id
        request_id_var.set(request_id)
        self._span = self._observers.tracer.start(
            self._method,
            request_id=request_id,
            stream=self._stream,
            metadata=self._call.context.invocation_metadata() or (),
        )

    def asked(self, operation: str, params: SamplingParams, prompt: object) -> None:
        """The request was accepted by this front end. prompt: a text, else token ids."""
        self._span.asked(operation, params)
        self._observers.log.received(self._method, prompt, operation=operation)

    def finished(self, request: TextRequest, num_bytes: int = 0) -> None:
        """The request is answered to its end; `num_bytes` is the size of the last message."""
        self._ended = self.is_answered = True
        now = time.perf_counter()
        times = request.metrics(now)
        reasons = [c.finish_reason or "error" for c in request.completions]
        num_tokens = sum(c.num_tokens for c in request.completions)
        num_prompt_tokens = len(request.prompt_token_ids)
        self.meter.finished(reasons[0], num_tokens=num_tokens, times=times, num_bytes=num_bytes)
        self._span.finished(
            reasons=reasons, num_prompt_tokens=num_prompt_tokens, num_tokens=num_tokens, times=times
        )
        self._observers.log.finished(
            self._method,
            reason=reasons[0],
            prompt_tokens=num_prompt_tokens,
            tokens=num_tokens,
            seconds=now - self.arrival_time,
        )

    def dropped(self) -> None:
        """The call is over without a status from here: cancelled, or past its deadline."""
        remaining = self._call.context.time_remaining()
        expired = remaining is not None and remaining < _CLOCKS_DIFFER_S
        self._end("DEADLINE_EXCEEDED" if expired else "CANCELLED", "", None)

    def _failed(self, status: RpcStatus, error: Exception) -> None:
        self._end(status.code.name, status.reason, error)

    def _end(self, code: str, reason: str, error: Exception | None) -> None:
        if self._ended:
            return
        self._ended = True
        self.meter.failed(code, reason)
        self._span.failed(code, reason, error)
        seconds = time.perf_counter() - self.arrival_time
        self._observers.log.failed(
            self._method, code=code, reason=reason, error=error, seconds=seconds
        )
