"""What is measured of a contestant in one round, each number of requests at once in a new process.

One process loads the model for 16 sequences, decodes one stream, prefills one prompt and computes
the workload; another does the workload with 64. Before anything is timed some tokens are generated.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.peers.contestants import Entry
from bench.peers.runner import Options, Requests
from bench.peers.runner_process import RunnerProcess

WORKLOAD = Path(__file__).resolve().parents[1] / "workloads" / "smollm2_64.json"
CONCURRENT = (16, 64)
STREAM_PROMPT_TOKENS, STREAM_OUTPUT_TOKENS = 16, 64
PREFILL_TOKENS = 512
_FIRST_TOKEN, _LAST_TOKEN = 1000, 49000  # no special tokens
_WARM_UP, _STREAM, _PREFILL = 10_000, 10_001, 10_002  # seeds that the workload does not use

Sample = dict[str, dict[str, float]]  # part ("16", "64", "single", "start") -> metric -> value


@dataclass(slots=True)
class Measured:
    """A round of one contestant. token_ids: of the workload with the fewest sequences at once."""

    sample: Sample = field(default_factory=dict)
    token_ids: list[list[int]] = field(default_factory=list)
    versions: Mapping[str, str] = field(default_factory=dict)


def prompt(seed: int, num_tokens: int) -> list[int]:
    """Random ids, as the workload's note says."""
    ids = np.random.default_rng(seed).integers(_FIRST_TOKEN, _LAST_TOKEN, num_tokens)
    return [int(token) for token in ids]


def workload(num_requests: int | None) -> Requests:
    """The first requests of the workload; None for all."""
    known = json.loads(WORKLOAD.read_text(encoding="utf-8"))
    lengths = zip(known["prompt_tokens"], known["max_tokens"], strict=True)
    requests = [(prompt(i, length), most) for i, (length, most) in enumerate(lengths)]
    return requests[:num_requests]


def most_tokens(requests: Requests) -> int:
    """Of the longest sequence that a round has; a multiple of 32, the largest block in use."""
    lengths = [len(ids) + num_tokens for ids, num_tokens in requests]
    alone = (PREFILL_TOKENS + 1, STREAM_PROMPT_TOKENS + STREAM_OUTPUT_TOKENS + 1)
    return -(-max(*lengths, *alone) // 32) * 32


def measure(entry: Entry, requests: Requests) -> Measured:
    """One round of a contestant.

    Raises:
        RunnerError: its runner failed.
    """
    measured = Measured()
    for concurrent in CONCURRENT:
        with RunnerProcess(entry.command) as runner:
            loaded = load(runner, entry, concurrent, requests)
            if concurrent == CONCURRENT[0]:
                measured.versions = loaded["versions"]
                measured.sample["start"] = {k: loaded[k] for k in ("import_s", "load_s")}
                measured.sample["single"] = _single(runner)
            done = runner.generate(requests)
        if concurrent == CONCURRENT[0]:
            measured.token_ids = done["token_ids"]
        measured.sample[str(concurrent)] = {
            "output_tokens_per_s": rate(done),
            "wall_s": done["wall_s"],
            "peak_rss_mb": done["peak_rss_mb"],
        }
    return measured


def load(
    runner: RunnerProcess, entry: Entry, concurrent: int, requests: Requests
) -> dict[str, Any]:
    """Load an entry's model for the requests, and generate a few tokens; what loading took."""
    loaded = runner.load(
        Options(
            model=entry.model, weights=entry.contestant.weights,
            way=entry.contestant.way, max_num_seqs=concurrent,
            max_model_len=most_tokens(requests), threads=len(os.sched_getaffinity(0)),
        )
    )  # fmt: skip
    runner.generate([(prompt(_WARM_UP, 16), 8)] * 2)
    return loaded


def rate(done: dict[str, Any]) -> float:
    """Output tokens a second of what `RunnerProcess.generate` gave."""
    return float(sum(len(ids) for ids in done["token_ids"]) / done["wall_s"])


def _single(runner: RunnerProcess) -> dict[str, float]:
    token_s = runner.stream(prompt(_STREAM, STREAM_PROMPT_TOKENS), STREAM_OUTPUT_TOKENS + 1)[
        "token_s"
    ]
    first_s = runner.stream(prompt(_PREFILL, PREFILL_TOKENS), 1)["token_s"][0]
    return {
        "decode_tokens_per_s": (len(token_s) - 1) / (token_s[-1] - token_s[0]),
        "prefill_tokens_per_s": PREFILL_TOKENS / first_s,
    }
