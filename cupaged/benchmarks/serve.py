"""`cupaged bench serve`: a load, put on a server, and what came of it.

Owns the order of things: ask the server, make the requests, prepare them, warm up, run, report.
What can be refused is refused before the first request is sent, files that cannot be written too.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from cupaged.benchmarks import metrics, report, token_counts
from cupaged.benchmarks.arrivals import Arrivals
from cupaged.benchmarks.backend import (
    BACKENDS,
    Backend,
    BackendOptions,
    RequestFailed,
    ServerFacts,
    make_backend,
)
from cupaged.benchmarks.datasets import DatasetOptions, Sample, samples_of
from cupaged.benchmarks.load import LoadRun, generate_load
from cupaged.benchmarks.metrics import Selection
from cupaged.benchmarks.plot import check_plot_path, draw
from cupaged.benchmarks.text_prompts import TextPrompts
from cupaged.errors import ConfigError

__all__ = ["ServeBenchmark", "ServeResult", "keep", "run"]

Tell = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class ServeBenchmark:
    """All of a benchmark of a server.

    Args:
        backend: a name of `backend.BACKENDS`.
        server, dataset, arrivals, selection: see their classes.
        tokenizer: name of a model whose tokenizer counts and makes texts, for a backend that takes
            nothing else.
        max_concurrency: requests under way at once, None for no limit.
        num_warmups: how often the first request is sent before the clock runs.
        ready_wait_s: how long a server that is not ready is waited for.
        request_id_prefix: of the ids of the requests; None makes one up.
        label: of the result, by default the backend's name.
        metadata: saved with the result.
        save: whether the result is saved, and whether with all of each request, and added to what
            the file holds.
        result_dir, result_filename: where to; by default a name made of what was run.
        plot: a file of a picture, ending in .svg.

    Raises:
        ConfigError: one of these is out of range.
    """

    backend: str
    server: BackendOptions
    dataset: DatasetOptions = field(default_factory=DatasetOptions)
    arrivals: Arrivals = field(default_factory=Arrivals)
    selection: Selection = field(default_factory=Selection)
    tokenizer: str | None = None
    max_concurrency: int | None = None
    num_warmups: int = 0
    ready_wait_s: float = 0.0
    request_id_prefix: str | None = None
    label: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    save: bool = False
    save_detailed: bool = False
    append_result: bool = False
    result_dir: str | None = None
    result_filename: str | None = None
    plot: str | None = None

    def __post_init__(self) -> None:
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ConfigError("--max-concurrency", self.max_concurrency, ">= 1")
        if not 0 <= self.num_warmups < 2**31:
            raise ConfigError("--num-warmups", self.num_warmups, ">= 0")
        if not 0 <= self.ready_wait_s < math.inf:
            raise ConfigError("--ready-check-timeout-sec", self.ready_wait_s, ">= 0")
        if self.plot is not None:
            check_plot_path(self.plot)
        kind = BACKENDS.get(self.backend)
        if kind is None:
            return  # `make_backend` says so
        if kind.takes_ids and self.tokenizer is not None:
            allowed = f"left out with --backend {self.backend}, whose server counts tokens"
            raise ConfigError("--tokenizer", self.tokenizer, allowed)
        if not kind.takes_ids and self.tokenizer is None and self.dataset.name != "custom":
            allowed = (
                f"that of the model, for --dataset-name {self.dataset.name} with --backend "
                f"{self.backend}, which takes texts"
            )
            raise ConfigError("--tokenizer", None, allowed)
        if kind.is_chat and self.dataset.skip_chat_template:
            allowed = f"left out with --backend {self.backend}, whose server applies it"
            raise ConfigError("--skip-chat-template", True, allowed)


@dataclass(frozen=True, slots=True)
class ServeResult:
    """What came of it.

    Attributes:
        result: the numbers as they are saved, without those of each request.
        lines: the printed report.
        notes: what to know before believing it; for stderr.
        load: the run itself.
        path: where the result is to be saved; None for nowhere.
        arrivals: when requests came, in words.
    """

    result: dict[str, Any]
    lines: list[str]
    notes: list[str]
    load: LoadRun
    path: Path | None
    arrivals: str


def run(
    benchmark: ServeBenchmark,
    *,
    tell: Tell = lambda line: None,
    bar: Callable[[int], Any] | None = None,
) -> ServeResult:
    """Run a benchmark; `keep` saves and draws what it gives.

    Args:
        tell: told what happens, a line at a time.
        bar: makes a progress bar of a number of requests, with `update` and `close`.

    Raises:
        CupagedError: the server cannot be used at all, a file cannot be read or written. Requests
            that fail are counted instead.
    """
    moment = datetime.now()
    backend = make_backend(benchmark.backend, benchmark.server)
    texts = None if benchmark.tokenizer is None else TextPrompts.load(benchmark.tokenizer)
    facts = backend.facts(benchmark.ready_wait_s)
    if texts is None:
        samples = samples_of(benchmark.dataset, facts.model, facts.count_tokens)
    else:
        made = samples_of(benchmark.dataset, texts.describe(facts.model), texts.count)
        samples = [texts.as_text(sample) for sample in made]
    if len(samples) < benchmark.dataset.num_prompts:
        tell(f"{benchmark.dataset.path}: has only {len(samples)} requests that fit the model")
    recorded = _recorded(samples)
    times = benchmark.arrivals.times(len(samples), recorded)
    has_times = recorded is not None
    arrivals = benchmark.arrivals.described(has_times)
    head = _head(benchmark, facts, len(samples), has_times, moment)
    path = None
    if benchmark.save:
        path = report.result_path(
            benchmark.result_dir, benchmark.result_filename, head, moment=moment
        )
    for file in (path, benchmark.plot):
        if file is not None:
            report.check_writable(Path(file))
    tell(
        f"{len(samples)} requests to {facts.model.name} at {benchmark.server.address}: {arrivals}, "
        f"maximum concurrency {benchmark.max_concurrency or 'none'}"
    )
    requests = _prepared(benchmark, backend, samples, "")
    warmups = _prepared(benchmark, backend, samples[:1] * benchmark.num_warmups, "w")
    progress = None if bar is None else bar(len(samples))
    try:
        done = _in_loop(_measured(backend, benchmark, warmups, requests, times, progress))
    finally:
        if progress is not None:
            progress.close()
    counted_by = token_counts.settle(done.records, samples, texts.count if texts else None)
    result = head | metrics.summary(done, benchmark.selection, benchmark.max_concurrency)
    result |= {
        "tokens_counted_by": counted_by,
        "ended_early": _num_ended_early(benchmark, done, samples),
    }
    errors = [record.error for record in done.records]
    return ServeResult(
        result,
        report.report_lines(result, benchmark.selection),
        report.notes(result, errors, scheduled=head["request_rate"] != "inf"),
        done,
        path,
        arrivals,
    )


def keep(benchmark: ServeBenchmark, done: ServeResult) -> list[str]:
    """Save and draw a result where that was asked for; gives the names of the files.

    Raises:
        ResultError: one cannot be written.
    """
    files = []
    if done.path is not None:
        each = metrics.details(done.load, everything=benchmark.save_detailed)
        report.save(done.path, done.result | each, append=benchmark.append_result)
        files.append(str(done.path))
    if benchmark.plot is not None:
        result = done.result
        title = f"{result['model_id']}: {result['output_throughput']:,.0f} output tokens/s"
        answered = f"{result['completed']} of {result['num_prompts']} requests answered"
        draw(benchmark.plot, done.load, title, f"{answered}, {done.arrivals}")
        files.append(benchmark.plot)
    return files


def _prepared(
    benchmark: ServeBenchmark, backend: Backend, samples: Sequence[Sample], mark: str
) -> list[bytes]:
    """The requests, with ids that no other run has."""
    prefix = benchmark.request_id_prefix
    if prefix is None:
        prefix = f"bench-{uuid.uuid4().hex[:8]}-"
    return [backend.prepare(sample, f"{prefix}{mark}{i}") for i, sample in enumerate(samples)]


async def _measured(
    backend: Backend,
    benchmark: ServeBenchmark,
    warmups: Sequence[bytes],
    requests: Sequence[bytes],
    times: Sequence[float],
    progress: Any,
) -> LoadRun:
    try:
        await backend.open()
        limit = benchmark.max_concurrency
        if warmups:
            warm = await generate_load(
                backend, warmups, [0.0] * len(warmups), max_concurrency=limit
            )
            _refuse_failures(warm)
        on_done = (lambda: None) if progress is None else progress.update
        return await generate_load(backend, requests, times, max_concurrency=limit, on_done=on_done)
    finally:
        await backend.close()


def _refuse_failures(warm: LoadRun) -> None:
    """What fails once before the run would fail in it as well."""
    for record in warm.records:
        if record.error_code:
            raise RequestFailed(record.error_code, f"the warm-up failed: {record.error}")


def _num_ended_early(benchmark: ServeBenchmark, done: LoadRun, samples: Sequence[Sample]) -> int:
    """Answers that were to go on to their whole length and did not."""
    if not benchmark.server.sampling.get("ignore_eos"):
        return 0
    return sum(
        not record.error_code and record.has_usage and record.output_tokens < sample.max_tokens
        for record, sample in zip(done.records, samples, strict=True)
    )


def _head(
    benchmark: ServeBenchmark,
    facts: ServerFacts,
    num_requests: int,
    has_times: bool,
    moment: datetime,
) -> dict[str, Any]:
    """What was run, as it stands at the head of a result."""
    arrivals = benchmark.arrivals
    rate = "trace" if arrivals.replays(has_times) else _or_inf(arrivals.request_rate)
    return {
        "date": f"{moment:%Y%m%d-%H%M%S}",
        "endpoint_type": benchmark.backend,
        "backend": benchmark.backend,
        "label": benchmark.label,
        "model_id": facts.model.name,
        "tokenizer_id": benchmark.tokenizer or facts.model.name,
        **benchmark.metadata,
        "num_prompts": num_requests,
        "dataset_name": benchmark.dataset.name,
        "seed": benchmark.dataset.seed,
        "request_rate": rate,
        "burstiness": _or_inf(arrivals.burstiness),
        "max_concurrency": benchmark.max_concurrency,
        "versions": report.versions(),
        "server": dict(facts.about),
    }


def _or_inf(value: float | None) -> float | str:
    """JSON has no infinity."""
    return "inf" if value is None or value == math.inf else value


def _recorded(samples: Sequence[Sample]) -> list[float] | None:
    """Times of a trace; None where it has none."""
    times = [sample.time_s for sample in samples if sample.time_s is not None]
    return times if len(times) == len(samples) else None


def _in_loop(work: Any) -> Any:
    """Run a coroutine, on uvloop where that is installed: it takes less of the client's time."""
    factory: Any = None
    with suppress(ImportError):
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(work)
