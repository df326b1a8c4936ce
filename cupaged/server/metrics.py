"""What each process of the server counts.

A front end makes one `FrontEndMetrics`, the engine process one `EngineMetrics`, the supervisor one
`SupervisorMetrics`. After `store_in`, the first two write into files of one folder, in
prometheus_client's multiprocess mode; `metrics_page.py` reads them all. The names and buckets are
in `metric_table.py`.

Costs: nothing is done for a token. A written message is one observation, a step is three.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, values
from prometheus_client.multiprocess import mark_process_dead

from cupaged.outputs import EngineStats, RequestMetrics
from cupaged.server.batched_histogram import BatchedHistogram
from cupaged.server.metric_table import ENGINE, FRONT_END, MetricSpec

FINISH_REASONS = ("stop", "length", "abort", "error")
METHODS = ("Generate", "GenerateStream")
_FILE_BYTES = 2**16  # of metrics; they need about a quarter of it


def store_in(folder: str | Path, process: str) -> None:
    """Keep the metrics of this process in files of `folder`, under the name `process`.

    Call it once, before `FrontEndMetrics` or `EngineMetrics` is made; without it they live in
    memory.

    The room for them is taken at once: on a disk that is full by then, a write to a mapped file
    without blocks of its own would end the process with SIGBUS.

    Args:
        folder: an existing folder that all processes of one server share and no other uses.
        process: unique among the living ones, without "_": "engine", "frontend-1". A process that
            is started again under the same name goes on with its predecessor's counters, so that
            they never fall and files do not pile up.

    Raises:
        OSError: the disk is full.
    """
    assert "_" not in process, "the reader of the files splits their names at '_'"
    for kind in ("counter", "gauge_livesum", "histogram"):
        _take_room(Path(folder) / f"{kind}_{process}.db")
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(folder)
    make = cast(Callable[..., Any], values.MultiProcessValue)  # it has no annotations
    values.ValueClass = make(process_identifier=lambda: process)


def _take_room(path: Path) -> None:
    with path.open("ab") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, _FILE_BYTES)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None


def process_died(folder: str | Path, process: str) -> None:
    """Take the gauges of a dead process off the page; its counters stay.

    The supervisor calls it after every death, before it starts a successor of that name.
    """
    forget = cast(Callable[..., None], mark_process_dead)
    forget(process, str(folder))


class FrontEndMetrics:
    """The requests of one front end. Make one a process.

    Args:
        model_name: the first served name.
        registry: where the metrics are registered, if they are to be read in this process.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        model_name: str,
        *,
        registry: CollectorRegistry | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        made = _Maker(FRONT_END, model_name, registry)
        self.clock = clock
        self._model_name = model_name
        self._failed = made.counter("request_failed_total")
        received = made.counter("request_received_total")
        self.received_total = {m: received.labels(model_name, m) for m in METHODS}
        success = made.counter("request_success_total")
        self.success_total = {r: success.labels(model_name, r) for r in FINISH_REASONS}
        self.streams_active = made.one_gauge("streams_active")
        self.received_bytes = made.one_counter("received_bytes_total")
        self.sent_bytes = made.one_counter("sent_bytes_total")
        self.prompt_tokens = made.one_counter("prompt_tokens_total")
        self.request_prompt_tokens = made.one_histogram("request_prompt_tokens")
        self.request_generation_tokens = made.one_histogram("request_generation_tokens")
        self.time_to_first_token = made.one_histogram("time_to_first_token_seconds")
        self.inter_token_latency = made.batched_histogram("inter_token_latency_seconds")
        self.e2e_latency = made.one_histogram("e2e_request_latency_seconds")
        self.queue_time = made.one_histogram("request_queue_time_seconds")
        self.prefill_time = made.one_histogram("request_prefill_time_seconds")
        self.decode_time = made.one_histogram("request_decode_time_seconds")

    def received(self, *, stream: bool, num_bytes: int = 0) -> RequestMeter:
        """A call of Generate or GenerateStream arrived; `num_bytes` is the size of its message.

        Call it first thing in the handler, and end what it returns in every case: `finished`, or
        `failed`, also for a request that is refused at the door.
        """
        self.received_total["GenerateStream" if stream else "Generate"].inc()
        if num_bytes:
            self.received_bytes.inc(num_bytes)
        if stream:
            self.streams_active.inc()
        return RequestMeter(self, stream)

    def count_failed(self, code: str, reason: str) -> None:
        """Count a request that ended with this status; `RequestMeter.failed` calls it."""
        self._failed.labels(self._model_name, code, reason).inc()


class RequestMeter:
    """Observes one request, from its arrival (when it is made) to exactly one end.

    The first end counts and later ones do nothing, so that a handler may call
    `failed("CANCELLED")` in its `finally`.

    num_prompt_tokens: set it when the prompt is tokenised; it is counted with the first token.
    """

    __slots__ = (
        "_ended",
        "_last",
        "_metrics",
        "_start",
        "_stream",
        "num_prompt_tokens",
        "num_sent",
    )

    def __init__(self, metrics: FrontEndMetrics, stream: bool) -> None:
        self._metrics = metrics
        self._stream = stream
        self._start = metrics.clock()
        self._last: float | None = None  # when the last message with tokens was written
        self._ended = False
        self.num_prompt_tokens = 0
        self.num_sent = 0  # bytes

    def wrote(self, num_bytes: int = 0) -> None:
        """A message with new tokens is handed to gRPC; `num_bytes` is its size if it is known."""
        now = self._metrics.clock()
        self.num_sent += num_bytes
        if self._last is None:
            self._first_token(now - self._start)
        else:
            self._metrics.inter_token_latency.observe(now - self._last, now)
        self._last = now

    def finished(
        self,
        reason: str,
        *,
        num_tokens: int,
        times: RequestMetrics | None = None,
        num_bytes: int = 0,
    ) -> None:
        """The request is answered to its end, and its status is OK.

        Args:
            reason: finish reason of the first sample: stop, length, abort or error.
            num_tokens: generated, over all samples.
            times: the engine's, for queue, prefill and decode time; for a call that writes no
                stream also for the time to the first token.
            num_bytes: size of the last or only message.
        """
        if self._ended:
            return
        metrics = self._metrics
        metrics.success_total[reason].inc()
        metrics.e2e_latency.observe(metrics.clock() - self._start)
        metrics.request_prompt_tokens.observe(self.num_prompt_tokens)
        metrics.request_generation_tokens.observe(num_tokens)
        if times is not None:
            if self._last is None and times.time_to_first_token is not None:
                self._first_token(times.time_to_first_token)
            for histogram, seconds in (
                (metrics.queue_time, times.queue_time),
                (metrics.prefill_time, times.prefill_time),
                (metrics.decode_time, times.decode_time),
            ):
                if seconds is not None:
                    histogram.observe(seconds)
        self.num_sent += num_bytes
        self._end()

    def failed(self, code: str, reason: str = "") -> None:
        """The request ended with another status than OK.

        Args:
            code: name of the gRPC code, such as RESOURCE_EXHAUSTED or CANCELLED.
            reason: that of the ErrorInfo, such as QUEUE_FULL; empty without one.
        """
        if self._ended:
            return
        self._metrics.count_failed(code, reason)
        self._end()

    def _first_token(self, seconds: float) -> None:
        self._metrics.time_to_first_token.observe(seconds)
        self._metrics.prompt_tokens.inc(self.num_prompt_tokens)

    def _end(self) -> None:
        self._ended = True
        self._metrics.inter_token_latency.flush()
        if self.num_sent:
            self._metrics.sent_bytes.inc(self.num_sent)
        if self._stream:
            self._metrics.streams_active.dec()


# Counts of `EngineStats`, and the counters that tell them.
_TOTALS = {
    "num_preemptions_total": "num_preemptions_total",
    "num_swap_preemptions_total": "num_swap_preemptions_total",
    "blocks_swapped_out_total": "swapped_out_blocks_total",
    "blocks_swapped_in_total": "swapped_in_blocks_total",
    "blocks_offloaded_total": "offloaded_blocks_total",
    "blocks_loaded_total": "loaded_blocks_total",
    "prefix_cache_queries_total": "prefix_cache_queries_total",
    "prefix_cache_hits_total": "prefix_cache_hits_total",
}


class EngineMetrics:
    """The steps and the state of the engine. Make one a process, in the engine's.

    Args:
        model_name: the first served name.
        block_size: tokens of a block of the KV cache.
        num_blocks: blocks of the KV cache.
        registry: where the metrics are registered, if they are to be read in this process.
    """

    def __init__(
        self,
        model_name: str,
        *,
        block_size: int,
        num_blocks: int,
        registry: CollectorRegistry | None = None,
    ) -> None:
        made = _Maker(ENGINE, model_name, registry)
        self._running = made.one_gauge("num_requests_running")
        self._waiting = made.one_gauge("num_requests_waiting")
        self._tokens_waiting = made.one_gauge("num_tokens_waiting")
        self._kv_usage = made.one_gauge("kv_cache_usage_perc")
        self._swapped = made.one_gauge("num_requests_swapped")
        self._host_usage = made.one_gauge("host_cache_usage_perc")
        self._offloaded = made.one_gauge("host_cache_offloaded_perc")
        self._totals = {field: made.one_counter(name) for field, name in _TOTALS.items()}
        self._counted = dict.fromkeys(_TOTALS, 0)
        self._generated = made.one_counter("generation_tokens_total")
        self._step_tokens = made.one_histogram("iteration_tokens_total")
        self._step_time = made.one_histogram("step_time_seconds")
        info = made.gauge("cache_config_info")
        info.labels(model_name, str(block_size), str(num_blocks)).set(1)

    def step(self, seconds: float, *, num_computed: int, num_generated: int) -> None:
        """A step is done.

        Args:
            seconds: what it took.
            num_computed: tokens it computed, of prompts and of answers.
            num_generated: tokens it drew.
        """
        self._step_time.observe(seconds)
        self._step_tokens.observe(num_computed)
        if num_generated:
            self._generated.inc(num_generated)

    def update(self, stats: EngineStats) -> None:
        """Set the gauges. Call it once a second, also once after the last work has ended."""
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting + stats.num_preempted)
        self._tokens_waiting.set(stats.num_queued_tokens)
        self._kv_usage.set(stats.num_used_blocks / stats.num_blocks if stats.num_blocks else 0.0)
        self._swapped.set(stats.num_swapped)
        num_host_blocks = max(1, stats.num_host_blocks)
        self._host_usage.set(stats.num_used_host_blocks / num_host_blocks)
        self._offloaded.set(stats.num_kept_host_blocks / num_host_blocks)
        for field, counter in self._totals.items():
            total = getattr(stats, field)
            counter.inc(total - self._counted[field])
            self._counted[field] = total


class SupervisorMetrics:
    """What the supervisor counts: restarts. Set by its main thread, read by those of the page."""

    def __init__(self) -> None:
        self.engine_restarts = 0
        self.frontend_restarts = 0

    def engine_restarted(self) -> None:
        """The engine process was started again after its death."""
        self.engine_restarts += 1

    def frontend_restarted(self) -> None:
        """A front end was started again after its death."""
        self.frontend_restarts += 1


class _Maker:
    """Makes the objects of a part of the table; `one_*` those whose only label is the model."""

    def __init__(
        self, specs: tuple[MetricSpec, ...], model_name: str, registry: CollectorRegistry | None
    ) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._model_name = model_name
        self._registry = registry

    def counter(self, name: str) -> Counter:
        spec = self._spec(name, "counter")
        return Counter(spec.full_name, spec.documentation, spec.labels, registry=self._registry)

    def gauge(self, name: str) -> Gauge:
        spec = self._spec(name, "gauge")
        return Gauge(
            spec.full_name,
            spec.documentation,
            spec.labels,
            registry=self._registry,
            multiprocess_mode="livesum",
        )

    def one_counter(self, name: str) -> Counter:
        return self.counter(name).labels(self._model_name)

    def one_gauge(self, name: str) -> Gauge:
        return self.gauge(name).labels(self._model_name)

    def one_histogram(self, name: str) -> Histogram:
        spec = self._spec(name, "histogram")
        histogram = Histogram(
            spec.full_name,
            spec.documentation,
            spec.labels,
            registry=self._registry,
            buckets=spec.buckets,
        )
        return histogram.labels(self._model_name)

    def batched_histogram(self, name: str) -> BatchedHistogram:
        return BatchedHistogram(self.one_histogram(name), self._spec(name, "histogram").buckets)

    def _spec(self, name: str, kind: str) -> MetricSpec:
        spec = self._specs[name]
        assert spec.kind == kind, f"{name} is a {spec.kind}"
        return spec
