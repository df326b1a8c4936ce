"""What a benchmark prints and saves: the lines and the JSON keys of `vllm bench serve`."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from cupaged._version import __version__
from cupaged.benchmarks.metrics import METRICS, Selection
from cupaged.errors import CupagedError

__all__ = [
    "ResultError",
    "check_writable",
    "notes",
    "report_lines",
    "result_path",
    "save",
    "versions",
]

_WIDTH = 50
# A schedule is kept if 99 of 100 requests are not later than this: asyncio alone takes one or two.
_LATE_MS = 20.0
_BUSY_SHARE = 0.85
_PACKAGES = ("numpy", "grpcio", "protobuf", "uvloop", "h11")


class ResultError(CupagedError):
    """A file of results that cannot be written."""


def report_lines(result: Mapping[str, Any], selection: Selection) -> list[str]:
    """The printed result.

    vLLM's lines in vLLM's order, and before the last one a section on the load generator.

    result: of `metrics.summary`, with `request_rate`, `max_concurrency` and `tokens_counted_by`
        beside it.
    """
    lines = [_title(" Serving Benchmark Result ", "=")]
    lines.append(_line("Successful requests:", result["completed"]))
    lines.append(_line("Failed requests:", result["failed"]))
    for code, count in sorted(result["failed_by_code"].items()):
        lines.append(_line(f"  {code}:", count))
    if result["max_concurrency"] is not None:
        lines.append(_line("Maximum request concurrency:", result["max_concurrency"]))
    if isinstance(result["request_rate"], float):
        lines.append(_line("Request rate configured (RPS):", result["request_rate"]))
    lines.append(_line("Benchmark duration (s):", result["duration"]))
    lines.append(_line("Total input tokens:", result["total_input_tokens"]))
    lines.append(_line("Total generated tokens:", result["total_output_tokens"]))
    lines.append(_line("Request throughput (req/s):", result["request_throughput"]))
    if result["request_goodput"] is not None:
        lines.append(_line("Request goodput (req/s):", result["request_goodput"]))
    lines.append(_line("Output token throughput (tok/s):", result["output_throughput"]))
    peak = float(result["max_output_tokens_per_s"])
    lines.append(_line("Peak output token throughput (tok/s):", peak))
    lines.append(_line("Peak concurrent requests:", float(result["max_concurrent_requests"])))
    lines.append(_line("Total token throughput (tok/s):", result["total_token_throughput"]))
    for name, label, header in METRICS:
        if name not in selection.metrics or f"mean_{name}_ms" not in result:
            continue
        lines.append(_title(header, "-"))
        lines.append(_line(f"Mean {label} (ms):", result[f"mean_{name}_ms"]))
        lines.append(_line(f"Median {label} (ms):", result[f"median_{name}_ms"]))
        for p in selection.percentiles:
            lines.append(_line(f"P{p:g} {label} (ms):", result[f"p{p:g}_{name}_ms"]))
    lines.append(_title("Load Generator", "-"))
    if result["request_rate"] != "inf":
        lines.append(_line("Request rate sent (RPS):", result["request_rate_sent"]))
    lines.append(_line("Tokens counted by:", result["tokens_counted_by"]))
    lines.append(_line("P99 lateness (ms):", result["p99_lateness_ms"]))
    lines.append(_line("Max lateness (ms):", result["max_lateness_ms"]))
    lines.append(_line("CPU time of this client (s):", result["client_cpu_seconds"]))
    lines.append(_line("CPU share of this client (cores):", result["client_cpu_share"]))
    lines.append("=" * _WIDTH)
    return lines


def notes(result: Mapping[str, Any], errors: Sequence[str], *, scheduled: bool) -> list[str]:
    """What a reader has to know before believing the numbers; empty if all is well.

    errors: of the failed requests; the first of each kind is shown.
    scheduled: the arrivals were spread over time, so that being late means falling behind.
    """
    found = []
    if scheduled and result["p99_lateness_ms"] > _LATE_MS:
        found.append(
            f"the load generator fell behind: requests were sent up to "
            f"{result['max_lateness_ms']:.0f} ms late (P99 {result['p99_lateness_ms']:.0f} ms); "
            f"{result['request_rate_sent']:.4g} requests/s were sent"
        )
    if result["client_cpu_share"] > _BUSY_SHARE:
        found.append(
            f"the load generator used {result['client_cpu_share']:.2f} of a core: it may limit "
            f"what is measured; use several processes, or fewer messages"
        )
    if result["tokens_counted_by"] == "messages":
        found.append(
            "the server does not tell how many tokens it made: each message was counted as one, "
            "which may be too few; --tokenizer counts them by their texts"
        )
    if result["ended_early"]:
        found.append(
            f"{result['ended_early']} answers ended before their whole length: the server seems "
            f"not to know ignore_eos"
        )
    return found + [f"failed: {error}" for error in dict.fromkeys(filter(None, errors))][:10]


def versions() -> dict[str, str]:
    """Versions on this side."""
    found = {"cupaged": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def result_path(
    folder: str | None, name: str | None, head: Mapping[str, Any], *, moment: datetime
) -> Path:
    """Where a result is saved: `LABEL-RATEqps[-concurrencyN]-MODEL-DATE.json`, unless named.

    head: with the keys backend, label, model_id, request_rate, max_concurrency.
    """
    limit = head["max_concurrency"]
    rate = head["request_rate"]
    parts = [str(head["label"] or head["backend"]), "trace" if rate == "trace" else f"{rate}qps"]
    parts += [] if limit is None else [f"concurrency{limit}"]
    parts += [str(head["model_id"]).rpartition("/")[2], f"{moment:%Y%m%d-%H%M%S}"]
    return Path(folder or ".") / (name or "-".join(parts) + ".json")


def check_writable(path: Path) -> None:
    """Make the folder of a file, and refuse a file that could not be written later.

    Raises:
        ResultError: says why not.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResultError(f"{path}: cannot be written: {error.strerror}") from None
    if path.is_dir():
        raise ResultError(f"{path}: cannot be written: it is a folder")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ResultError(f"{path}: cannot be written: no permission")


def save(path: Path, result: Mapping[str, Any], *, append: bool = False) -> None:
    """Write a result as a line of JSON; `append` adds it to what is there.

    Raises:
        ResultError: the file cannot be written.
    """
    check_writable(path)
    try:
        with path.open("a" if append else "w", encoding="utf-8") as file:
            file.write(json.dumps(result, allow_nan=False) + "\n")
    except OSError as error:
        raise ResultError(f"{path}: cannot be written: {error.strerror}") from None


def _title(text: str, fill: str) -> str:
    return f"{text:{fill}^{_WIDTH}}"


def _line(label: str, value: float | str) -> str:
    shown = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label:<40} {shown}"
