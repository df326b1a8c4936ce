"""Traces: recorded lengths of prompts and answers, and when they came.

Formats, told apart by what the file holds:

- CSV with the columns TIMESTAMP, ContextTokens, GeneratedTokens (Azure's LLM inference traces).
  A time is a date with a time of day, up to seven digits behind the second, or seconds.
- CSV with the columns input_tokens, output_tokens: no times. A column time_s adds them.
- JSON lines with input_length, output_length, timestamp in milliseconds, and hash_ids, which name
  the blocks of 512 tokens that the prompt is made of: equal ids, equal tokens (Mooncake's traces).
  timestamp and hash_ids may be left out.
- JSON with a list "requests" of prompt_tokens, max_tokens and, if there are times, arrival_unit in
  seconds: workloads of this project's benchmarks. --trace-speed R makes R requests a second of a
  workload whose unit is the mean interval.

Prompts are made up. Where no hash_ids say otherwise, request i has the ids
`numpy.random.default_rng(seed + i).integers(1000, 49000, num_tokens)`, in a small vocabulary what
`datasets.drawn_ids` makes of it; i counts all requests of the file.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, NamedTuple

from cupaged.benchmarks.datasets import (
    DatasetError,
    DatasetOptions,
    ModelFacts,
    Sample,
    drawn_ids,
    json_lines,
    read_file,
)

__all__ = ["TraceEntry", "read_trace", "trace_samples"]

HASH_BLOCK_TOKENS = 512
# Columns of a CSV file: input, output, time; the last may be missing.
_COLUMNS = (
    ("ContextTokens", "GeneratedTokens", "TIMESTAMP"),
    ("input_tokens", "output_tokens", "time_s"),
)
_DATE = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(\.\d+)?(Z|[+-]\d\d:?\d\d)?")


class TraceEntry(NamedTuple):
    """A recorded request; `time_s` is on any clock, None where there are no times."""

    input_tokens: int
    output_tokens: int
    time_s: float | None = None
    hash_ids: tuple[int, ...] = ()


def trace_samples(options: DatasetOptions, model: ModelFacts) -> list[Sample]:
    """The first `num_prompts` requests of a trace that fit the model, in the order of their times.

    Left out are those with an empty prompt or answer, and those longer than the context. Times
    start at 0.

    Raises:
        DatasetError: the file is of none of the formats, or nothing in it fits.
    """
    path = str(options.path)
    entries = list(enumerate(read_trace(path)))
    if all(entry.time_s is not None for _, entry in entries):
        entries.sort(key=lambda pair: pair[1].time_s or 0.0)
    elif any(entry.time_s is not None for _, entry in entries):
        raise DatasetError(f"{path}: some of its requests have a time and some have none")
    chosen = [
        (i, entry)
        for i, entry in entries
        if entry.input_tokens >= 1 <= entry.output_tokens
        and entry.input_tokens + entry.output_tokens <= model.max_model_len
    ][: options.num_prompts]
    if not chosen:
        raise DatasetError(
            f"{path}: none of its {len(entries)} requests fits; prompt and answer of {model.name} "
            f"have at most {model.max_model_len} tokens"
        )
    start = chosen[0][1].time_s
    return [
        Sample(
            _ids(options.seed, i, entry, model.vocab_size),
            entry.output_tokens,
            entry.input_tokens,
            time_s=None if start is None or entry.time_s is None else entry.time_s - start,
        )
        for i, entry in chosen
    ]


def read_trace(path: str) -> list[TraceEntry]:
    """All requests of a file, in its order.

    Raises:
        DatasetError: names the line and what is wrong there.
    """
    text = read_file(path)
    entries = list(_json(path, text) if text.lstrip()[:1] == "{" else _csv(path, text))
    if not entries:
        raise DatasetError(f"{path}: holds no request")
    return entries


def _csv(path: str, text: str) -> Iterator[TraceEntry]:
    lines = text.splitlines()
    head = next(csv.reader(lines), [])
    names = next((names for names in _COLUMNS if {*names[:2]} <= {*head}), None)
    if names is None:
        known = " or ".join(", ".join(columns[:2]) for columns in _COLUMNS)
        raise DatasetError(f"{path}: its first line must name the columns {known}")
    places = [head.index(name) if name in head else None for name in names]
    reader = csv.reader(lines[1:])
    for row in reader:
        if not row:
            continue
        line = reader.line_num + 1
        given, wanted, time = (
            None if place is None else row[place] if place < len(row) else "" for place in places
        )
        yield TraceEntry(
            _count(path, line, names[0], given),
            _count(path, line, names[1], wanted),
            None if time is None else _time(path, line, names[2], time),
        )


def _json(path: str, text: str) -> Iterator[TraceEntry]:
    try:
        whole = json.loads(text)
    except ValueError:
        whole = {}  # lines of JSON, or nothing that is valid: their reader tells which
    if isinstance(whole.get("requests"), list):
        for i, entry in enumerate(whole["requests"]):
            yield _workload(path, i, entry)
        return
    for line, entry in json_lines(path, text):
        ids = entry.get("hash_ids", [])
        if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
            raise DatasetError(f"{path}: line {line}: hash_ids must be a list of integers >= 0")
        num_tokens = _count(path, line, "input_length", entry.get("input_length"))
        if ids and len(ids) != -(-num_tokens // HASH_BLOCK_TOKENS):
            raise DatasetError(
                f"{path}: line {line}: {num_tokens} tokens are "
                f"{-(-num_tokens // HASH_BLOCK_TOKENS)} blocks of {HASH_BLOCK_TOKENS}, "
                f"got {len(ids)} hash_ids"
            )
        time = entry.get("timestamp")
        yield TraceEntry(
            num_tokens,
            _count(path, line, "output_length", entry.get("output_length")),
            None if time is None else _time(path, line, "timestamp", time) / 1000,
            tuple(ids),
        )


def _workload(path: str, i: int, entry: Any) -> TraceEntry:
    if not isinstance(entry, dict):
        raise DatasetError(f"{path}: requests[{i}] must be an object, got {entry!r:.80}")
    time, place = entry.get("arrival_unit"), f"requests[{i}]"
    return TraceEntry(
        _count(path, place, "prompt_tokens", entry.get("prompt_tokens")),
        _count(path, place, "max_tokens", entry.get("max_tokens")),
        None if time is None else _time(path, place, "arrival_unit", time),
    )


def _ids(seed: int, i: int, entry: TraceEntry, vocab_size: int) -> tuple[int, ...]:
    if not entry.hash_ids:
        return drawn_ids(seed + i, entry.input_tokens, vocab_size)
    ids: list[int] = []
    for block in entry.hash_ids:
        ids += drawn_ids((seed, block), HASH_BLOCK_TOKENS, vocab_size)
    return tuple(ids[: entry.input_tokens])


def _count(path: str, line: int | str, name: str, value: object) -> int:
    """A count of tokens: of JSON an integer, of CSV its digits."""
    if isinstance(value, str) and re.fullmatch(r"\s*\d{1,9}\s*", value, re.ASCII):
        return int(value)
    if type(value) is int and 0 <= value < 2**31:
        return value
    raise _wrong(path, line, name, value, "a number of tokens")


def _time(path: str, line: int | str, name: str, value: object) -> float:
    """A date as seconds since 1970, or a number as it is."""
    if isinstance(value, str) and (match := _DATE.fullmatch(value.strip())):
        zone = (match[3] or "Z").replace("Z", "+00:00")
        try:
            moment = datetime.fromisoformat(match[1] + zone)
        except ValueError:
            raise _wrong(path, line, name, value, "a date") from None
        return moment.astimezone(UTC).timestamp() + float(match[2] or 0)
    try:
        number = float(value) if not isinstance(value, bool) else -1.0  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = -1.0
    if not 0 <= number < 1e12:
        raise _wrong(path, line, name, value, "a date, or a number >= 0")
    return number


def _wrong(path: str, line: int | str, name: str, value: object, allowed: str) -> DatasetError:
    place = f"line {line}" if isinstance(line, int) else line
    return DatasetError(f"{path}: {place}: {name} must be {allowed}, got {value!r:.80}")
