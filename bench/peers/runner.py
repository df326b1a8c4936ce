"""The runner's side of the protocol: one engine in a process of its own, asked by `bench.peers`.

A line of JSON on standard input is a question, a line on standard output its answer:

    {"ask": "load", "model": ..., "weights": ..., "way": ..., "max_num_seqs": ...,
     "max_model_len": ..., "threads": ...}      -> {"import_s", "load_s", "versions"}
    {"ask": "generate", "requests": [[ids, n]]} -> {"wall_s", "token_ids"}: all requests at once
    {"ask": "stream", "requests": [[ids, n]]}   -> {"token_s", "token_ids"}: one request alone, and
                                                   when each token came, counted from its start

Every answer has `peak_rss_mb`; what fails is {"error"}. All outputs are greedy and have exactly n
tokens. Imports the standard library only, because it runs under the Python of any environment.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

Requests = list[tuple[list[int], int]]  # prompt ids, and how many tokens to append


@dataclass(frozen=True, slots=True)
class Options:
    """How an engine is loaded.

    model: file or folder. weights: "float32", or "file" for the numbers as the file has them.
    way: of computing, a name that the runner knows, "" for its usual one. max_num_seqs: sequences
    that run at once. max_model_len: most tokens of one.
    """

    model: str
    weights: str
    way: str
    max_num_seqs: int
    max_model_len: int
    threads: int


class Engine(Protocol):
    """What a runner file makes of its library."""

    def versions(self) -> dict[str, str]:
        """What the figures depend on."""

    def generate(self, requests: Requests) -> list[list[int]]:
        """The output ids of each, in order."""

    def stream(self, prompt: list[int], num_tokens: int) -> tuple[list[int], list[float]]:
        """The output ids of one request, and `time.perf_counter` when each of them came."""


def serve(load: Callable[[Options], Engine], import_s: float) -> None:
    """Answer until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    engine: Engine | None = None
    for line in sys.stdin:
        asked = json.loads(line)
        kind = asked.pop("ask")
        try:
            start = time.perf_counter()
            if kind == "load":
                engine = load(Options(**asked))
                load_s = time.perf_counter() - start
                answer = {"import_s": import_s, "load_s": load_s, "versions": engine.versions()}
            else:
                assert engine is not None, "nothing has been loaded"
                answer = _ANSWERS[kind](engine, [(ids, n) for ids, n in asked["requests"]])
            answer["peak_rss_mb"] = _peak_rss_mb()
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _generate(engine: Engine, requests: Requests) -> dict[str, Any]:
    start = time.perf_counter()
    token_ids = engine.generate(requests)
    wall_s = time.perf_counter() - start
    _check(token_ids, requests)
    return {"wall_s": wall_s, "token_ids": token_ids}


def _stream(engine: Engine, requests: Requests) -> dict[str, Any]:
    ((prompt, num_tokens),) = requests
    start = time.perf_counter()
    token_ids, times = engine.stream(prompt, num_tokens)
    _check([token_ids], requests)
    assert len(times) == num_tokens, f"{len(times)} times for {num_tokens} tokens"
    return {"token_s": [moment - start for moment in times], "token_ids": token_ids}


_ANSWERS = {"generate": _generate, "stream": _stream}


def _check(token_ids: list[list[int]], requests: Requests) -> None:
    """An engine that stopped early has done less work than the others."""
    for i, (ids, (_, num_tokens)) in enumerate(zip(token_ids, requests, strict=True)):
        assert len(ids) == num_tokens, f"request {i}: {len(ids)} tokens instead of {num_tokens}"


def _peak_rss_mb() -> float:
    """Most resident memory so far. `getrusage` would count the parent's, from before the exec."""
    with open("/proc/self/status", encoding="ascii") as status:
        lines = [line for line in status if line.startswith("VmHWM:")]
    return round(float(lines[0].split()[1]) * 1.024e-3, 1)
