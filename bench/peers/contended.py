"""cupaged beside another program that wants a core: what is left of its quiet rate."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

from bench.peers.contestants import Entry
from bench.peers.figures import RATE
from bench.peers.measurement import CONCURRENT, load, rate
from bench.peers.runner import Requests
from bench.peers.runner_process import RunnerProcess

_BUSY = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): pass"


@contextmanager
def busy_core() -> Iterator[int]:
    """A process that computes without end, by its id. It ends by itself when this one is gone."""
    process = subprocess.Popen([sys.executable, "-c", _BUSY, str(os.getpid())])
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


def measure_contended(entry: Entry, requests: Requests, rounds: int) -> dict[str, Any]:
    """Quiet and contended in turn; each loads the model anew, under the load that it runs under."""

    def once() -> float:
        with RunnerProcess(entry.command) as runner:
            load(runner, entry, CONCURRENT[0], requests)
            return rate(runner.generate(requests))

    quiet, contended = [], []
    for i in range(rounds):
        quiet.append(once())
        with busy_core():
            contended.append(once())
        print(f"round {i + 1}: quiet {quiet[-1]:.1f}, contended {contended[-1]:.1f} {RATE}")
    shares = [c / q for c, q in zip(contended, quiet, strict=True)]
    return {
        "concurrent": CONCURRENT[0],
        "rounds": rounds,
        "requests": len(requests),
        "quiet_output_tokens_per_s": [round(value, 2) for value in quiet],
        "contended_output_tokens_per_s": [round(value, 2) for value in contended],
        "contended_to_quiet": round(median(shares), 3),
    }
