"""The load generator: sends each request when it is due, and notes what comes when.

The loop is open: a request is sent at its time whether or not earlier ones have been answered,
unless `max_concurrency` holds it back. How late the generator itself was is noted for each request,
so that a run which fell behind its own schedule can be told from a slow server. Latencies count
from the moment of sending, as in vLLM; a wait for `max_concurrency` is noted apart.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cupaged.benchmarks.backend import Backend, RequestFailed

__all__ = ["LoadRun", "RequestRecord", "generate_load"]


@dataclass(slots=True)
class RequestRecord:
    """What happened to a request; times in seconds after the start of the run.

    Attributes:
        due_s: when it was to be sent.
        arrived_s: when the generator came to it.
        sent_s: when it was sent; later than `arrived_s` only by the wait for `max_concurrency`.
        end_s: when the last message or the failure came.
        message_times_s, message_tokens: of the messages that held tokens.
        prompt_tokens, output_tokens: the server's counts; 0 if it failed.
        error_code, error: "" if it was answered.
        message_texts: of the messages, where the server tells texts and no tokens; then
            `message_tokens` are filled in by `token_counts.settle`.
        has_usage: the counts are the server's.
    """

    due_s: float
    arrived_s: float = 0.0
    sent_s: float = 0.0
    end_s: float = 0.0
    message_times_s: list[float] = field(default_factory=list)
    message_tokens: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    error_code: str = ""
    error: str = ""
    message_texts: list[str] = field(default_factory=list)
    has_usage: bool = False


@dataclass(frozen=True, slots=True)
class LoadRun:
    """A run: its requests in the order of their times, and what it took.

    `cpu_s` is the processor time of this whole process, gRPC's threads included.
    """

    records: list[RequestRecord]
    duration_s: float
    cpu_s: float


async def generate_load(
    backend: Backend,
    requests: Sequence[bytes],
    times_s: Sequence[float],
    *,
    max_concurrency: int | None = None,
    on_done: Callable[[], object] = lambda: None,
) -> LoadRun:
    """Send every request at its time; return when all have ended.

    Args:
        backend: opened.
        requests: prepared by the backend.
        times_s: when they are due, ascending.
        max_concurrency: how many may be under way at once; None for no limit.
        on_done: called after each one.

    A request that fails is recorded; anything else that goes wrong, and cancellation, ends the run.
    """
    limit = (
        contextlib.nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
    )
    records = [RequestRecord(due) for due in times_s]
    gc.collect()
    gc.freeze()  # the collector would walk over all requests in the middle of the run
    try:
        cpu = time.process_time()
        start = time.perf_counter()

        async def send(request: bytes, record: RequestRecord) -> None:
            record.arrived_s = time.perf_counter() - start
            async with limit:
                await _answered(backend, request, record, start)
            on_done()

        async with asyncio.TaskGroup() as tasks:
            for request, record in zip(requests, records, strict=True):
                # A loop's timers may go off a little early.
                while (delay := start + record.due_s - time.perf_counter()) > 0:
                    await asyncio.sleep(delay)
                tasks.create_task(send(request, record))
        return LoadRun(records, time.perf_counter() - start, time.process_time() - cpu)
    finally:
        gc.unfreeze()


async def _answered(backend: Backend, request: bytes, record: RequestRecord, start: float) -> None:
    """Send one request, and fill in its record."""
    record.sent_s = time.perf_counter() - start
    times, tokens = record.message_times_s, record.message_tokens
    texts = record.message_texts
    try:
        async for time_s, num_tokens, usage, text in backend.request(request):
            record.end_s = time_s - start
            if num_tokens:
                times.append(record.end_s)
                tokens.append(num_tokens)
            elif text:
                times.append(record.end_s)
                texts.append(text)
            if usage is not None:
                record.prompt_tokens, record.output_tokens = usage
                record.has_usage = True
    except RequestFailed as error:
        record.end_s = time.perf_counter() - start
        record.error_code, record.error = error.code, str(error)
        record.prompt_tokens = record.output_tokens = 0
