"""The results as a table: for a terminal, and as Markdown with the best of each column in bold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

LABELS = {
    "cupaged": "cupaged",
    "llama_cpp": "llama.cpp",
    "vllm": "vLLM for CPUs",
    "transformers": "transformers",
}
FILE_WEIGHTS = "Q4_1"  # of the installed file's linears
WORKLOAD_REQUESTS = 64
# Heading, part, metric, digits, and whether less is better.
_COLUMNS = (
    ("16 at once, tok/s", "16", "output_tokens_per_s", 1, False),
    ("64 at once, tok/s", "64", "output_tokens_per_s", 1, False),
    ("one stream, tok/s", "single", "decode_tokens_per_s", 1, False),
    ("prefill 512, tok/s", "single", "prefill_tokens_per_s", 0, False),
    ("import, s", "start", "import_s", 1, True),
    ("load, s", "start", "load_s", 1, True),
    ("peak RSS of 16, MB", "16", "peak_rss_mb", 0, True),
)


def shown_weights(variant: str) -> str:
    """A variant as people read it: "file" is the type that the file has."""
    return variant.replace("file", FILE_WEIGHTS, 1)


def rows_of(results: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Engine, variant as people read it, and figures of each contestant."""
    for engine, variants in results["engines"].items():
        for variant, found in variants.items():
            yield engine, shown_weights(variant), found


def notes(results: dict[str, Any]) -> list[str]:
    """A line for each engine that did not get all of the workload."""
    numbers = {engine: found["requests"] for engine, _, found in rows_of(results)}
    return [
        f"{LABELS[engine]}: the first {number} of {WORKLOAD_REQUESTS} requests"
        for engine, number in numbers.items()
        if number < WORKLOAD_REQUESTS
    ]


def table(results: dict[str, Any]) -> str:
    """Columns of text: the median, and the range where the metric is a rate of the workload."""
    head = ["engine", "weights", *(heading for heading, *_ in _COLUMNS)]
    lines = [head]
    for engine, variant, found in rows_of(results):
        cells = [_with_range(found[part][metric], digits) if metric == "output_tokens_per_s"
                 else f"{found[part][metric]['median']:.{digits}f}"
                 for _, part, metric, digits, _ in _COLUMNS]  # fmt: skip
        lines.append([LABELS[engine], variant, *cells])
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(w) if i < 2 else cell.rjust(w)
                  for i, (cell, w) in enumerate(zip(line, widths, strict=True))).rstrip()
        for line in lines
    )  # fmt: skip


def markdown(results: dict[str, Any]) -> str:
    """The same medians as a table for the README."""
    rows = list(rows_of(results))
    best = [
        (min if less else max)(found[part][metric]["median"] for _, _, found in rows)
        for _, part, metric, _, less in _COLUMNS
    ]
    lines = [
        "| engine | weights | " + " | ".join(heading for heading, *_ in _COLUMNS) + " |",
        "|---|---|" + "---:|" * len(_COLUMNS),
    ]
    for engine, variant, found in rows:
        cells = []
        for (_, part, metric, digits, _), value_of_best in zip(_COLUMNS, best, strict=True):
            value = found[part][metric]["median"]
            cell = f"{value:,.{digits}f}"
            cells.append(f"**{cell}**" if value == value_of_best else cell)
        lines.append(f"| {LABELS[engine]} | {variant} | {' | '.join(cells)} |")
    return "\n".join([*lines, *("\n" + note for note in notes(results))])


def verdict(results: dict[str, Any]) -> str:
    """Ratios to the best peer, and every metric in which a peer with the same weights leads."""
    lines = notes(results)
    for weights, ratios in results["ratio_to_best_peer"].items():
        lines += [
            f"cupaged {shown_weights(weights)}: {factor:g} times the best peer at {concurrent} "
            f"({results['best_peer'][concurrent]})"
            for concurrent, factor in ratios.items()
        ]
    lines += [
        f"behind with {shown_weights(loss['weights'])}: {loss['metric']} ({loss['part']}), "
        f"{loss['peer']} is better by {loss['factor']:g}"
        for loss in results["behind"]
    ]
    return "\n".join(lines)


def _with_range(spread: dict[str, float], digits: int) -> str:
    return "{:.{d}f} ({:.{d}f}-{:.{d}f})".format(
        spread["median"], spread["min"], spread["max"], d=digits
    )
