"""Statistics of a run, with the definitions and the names of `vllm bench serve`.

Of a request that was answered, with times from the client's clock:

- TTFT, time to first token: from sending to the first message that holds tokens.
- E2EL, end-to-end latency: from sending to the last message, also one that only tells of the end.
- TPOT, time per output token: (E2EL - TTFT) / (n - 1) over its n tokens; none where n < 2. The n is
  the server's count, else that of `token_counts`. A goodput limit on TPOT takes such a request for
  0, as vLLM does.
- ITL, inter-token latency: from each message that holds tokens to the next, one value a gap. As in
  vLLM a gap is not divided by the tokens of the message that ends it: where a server sends several
  tokens together, ITL is what a reader waits between two pieces, and TPOT is the time of a token.

Mean, standard deviation (of the population) and percentiles (NumPy's linear method) are over all
values of all answered requests. Throughputs divide by the time from the start of the run to the end
of its last request. The peak of output throughput is the fullest of the seconds that begin with the
first request; tokens are counted as for TPOT.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cupaged.benchmarks.load import LoadRun, RequestRecord
from cupaged.errors import ConfigError

__all__ = ["METRICS", "Metric", "Selection", "details", "latencies_ms", "summary"]


class Metric(NamedTuple):
    """How a latency is called: in keys and flags, in lines, above its lines."""

    name: str
    label: str
    header: str


METRICS = (
    Metric("ttft", "TTFT", "Time to First Token"),
    Metric("tpot", "TPOT", "Time per Output Token (excl. 1st token)"),
    Metric("itl", "ITL", "Inter-token Latency"),
    Metric("e2el", "E2EL", "End-to-end Latency"),
    Metric("client_queue_time", "Client Queue Time", "Client-side Queueing"),
    Metric(
        "e2el_including_client_queue",
        "E2EL incl. Client Queue",
        "Queue-inclusive End-to-end Latency",
    ),
)
_WITH_LIMIT = ("client_queue_time", "e2el_including_client_queue")
_GOODPUT = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, slots=True)
class Selection:
    """What is reported of the latencies.

    Args:
        metrics: names whose statistics are printed.
        percentiles: in [0, 100], printed and saved.
        goodput: limits in milliseconds by the names ttft, tpot, e2el; a request is good if it keeps
            them all. Empty: goodput is not reported.
    """

    metrics: Sequence[str] = ("ttft", "tpot", "itl")
    percentiles: Sequence[float] = (99.0,)
    goodput: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        names = [metric.name for metric in METRICS]
        for name in self.metrics:
            if name not in names:
                raise ConfigError("--percentile-metrics", name, f"of {', '.join(names)}")
        for percentile in self.percentiles:
            if not 0 <= percentile <= 100:
                raise ConfigError("--metric-percentiles", percentile, "in [0, 100]")
        for name, limit in (self.goodput or {}).items():
            if name not in _GOODPUT:
                raise ConfigError("--goodput", name, f"a limit of {', '.join(_GOODPUT)}")
            if not 0 <= limit < math.inf:
                raise ConfigError(f"--goodput {name}", limit, ">= 0 milliseconds")


def summary(run: LoadRun, selection: Selection, max_concurrency: int | None) -> dict[str, Any]:
    """The numbers of a run by vLLM's keys, and beside them what tells of the generator itself.

    Beyond vLLM's keys: `failed_by_code`; `client_cpu_seconds` of this process and
    `client_cpu_share`, that by the duration (1 is a core); `request_rate_sent`, from the first to
    the last request sent;
    `mean_`, `p99_` and `max_lateness_ms`, how much later than due the generator came to a request.
    """
    done = [record for record in run.records if not record.error_code]
    seconds = run.duration_s
    num_input = sum(record.prompt_tokens for record in done)
    num_output = sum(record.output_tokens for record in done)
    result: dict[str, Any] = {
        "duration": seconds,
        "completed": len(done),
        "failed": len(run.records) - len(done),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": _rate(len(done), seconds),
        "request_goodput": _goodput(done, selection.goodput, seconds),
        "output_throughput": _rate(num_output, seconds),
        "total_token_throughput": _rate(num_input + num_output, seconds),
        "max_output_tokens_per_s": _peak_tokens_per_s(done),
        "max_concurrent_requests": _peak_concurrency(done),
    }
    for metric in METRICS:
        if metric.name not in _WITH_LIMIT or max_concurrency is not None:
            result |= _statistics(metric.name, _values(metric.name, done), selection.percentiles)
    late = np.array([r.arrived_s - r.due_s for r in run.records] or [0.0]) * 1000
    sent = sorted(record.sent_s for record in run.records)
    return result | {
        "failed_by_code": dict(Counter(r.error_code for r in run.records if r.error_code)),
        "client_cpu_seconds": run.cpu_s,
        "client_cpu_share": _rate(run.cpu_s, seconds),
        "request_rate_sent": _rate(len(sent) - 1, sent[-1] - sent[0]) if sent else 0.0,
        "mean_lateness_ms": float(late.mean()),
        "p99_lateness_ms": float(np.percentile(late, 99)),
        "max_lateness_ms": float(late.max()),
    }


def details(run: LoadRun, *, everything: bool) -> dict[str, Any]:
    """Values of each request, in the order of their times; seconds; 0 and empty where it failed.

    everything: also those that vLLM saves with --save-detailed.
    """
    records = run.records
    few: dict[str, Any] = {
        "ttfts": [_ttft(record) or 0.0 for record in records],
        "itls": [_gaps(record) for record in records],
        "errors": [record.error for record in records],
    }
    if not everything:
        return few
    return few | {
        "input_lens": [record.prompt_tokens for record in records],
        "output_lens": [record.output_tokens for record in records],
        "latencies": [record.end_s - record.sent_s for record in records],
        "start_times": [record.sent_s for record in records],
        "queue_times": [record.sent_s - record.arrived_s for record in records],
        "due_times": [record.due_s for record in records],
        "message_tokens": [record.message_tokens for record in records],
    }


def latencies_ms(name: str, done: Sequence[RequestRecord]) -> list[float]:
    """All values of one of `METRICS`, of requests that were answered."""
    return [value * 1000 for value in _values(name, done)]


def _ttft(record: RequestRecord) -> float | None:
    times = record.message_times_s
    return times[0] - record.sent_s if times and not record.error_code else None


def _tpot(record: RequestRecord) -> float | None:
    ttft = _ttft(record)
    if ttft is None or record.output_tokens < 2:
        return None
    return (record.end_s - record.sent_s - ttft) / (record.output_tokens - 1)


def _gaps(record: RequestRecord) -> list[float]:
    return [] if record.error_code else np.diff(record.message_times_s).tolist()


def _values(name: str, done: Sequence[RequestRecord]) -> list[float]:
    """All values of a latency, in seconds."""
    if name == "ttft":
        return [value for record in done if (value := _ttft(record)) is not None]
    if name == "tpot":
        return [value for record in done if (value := _tpot(record)) is not None]
    if name == "itl":
        return [gap for record in done for gap in _gaps(record)]
    if name == "e2el":
        return [record.end_s - record.sent_s for record in done]
    if name == "client_queue_time":
        return [record.sent_s - record.arrived_s for record in done]
    return [record.end_s - record.arrived_s for record in done]


def _statistics(name: str, values: list[float], percentiles: Sequence[float]) -> dict[str, float]:
    """In milliseconds; 0 where there are no values."""
    ms = np.array(values or [0.0]) * 1000
    found = {
        f"mean_{name}_ms": float(ms.mean()),
        f"median_{name}_ms": float(np.median(ms)),
        f"std_{name}_ms": float(ms.std()),
    }
    for percentile in percentiles:
        found[f"p{percentile:g}_{name}_ms"] = float(np.percentile(ms, percentile))
    return found


def _goodput(
    done: Sequence[RequestRecord], limits: Mapping[str, float] | None, seconds: float
) -> float | None:
    if not limits:
        return None

    def is_good(record: RequestRecord) -> bool:
        latency = record.end_s - record.sent_s
        ttft = _ttft(record)
        took = {"ttft": latency if ttft is None else ttft, "tpot": _tpot(record) or 0.0}
        took["e2el"] = latency
        return all(took[name] * 1000 <= limit for name, limit in limits.items())

    return _rate(sum(map(is_good, done)), seconds)


def _peak_tokens_per_s(done: Sequence[RequestRecord]) -> float:
    start = min((record.sent_s for record in done), default=0.0)
    fullest: Counter[int] = Counter()
    for record in done:
        for time_s, num_tokens in zip(record.message_times_s, record.message_tokens, strict=True):
            fullest[int(time_s - start)] += num_tokens
    return float(max(fullest.values(), default=0))


def _peak_concurrency(done: Sequence[RequestRecord]) -> int:
    """Most requests at one moment; one that ends as another begins does not overlap it."""
    events = sorted(
        [(record.sent_s, 1) for record in done] + [(record.end_s, -1) for record in done]
    )
    return max(np.cumsum([change for _, change in events]).tolist(), default=0)


def _rate(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
