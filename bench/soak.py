"""An hour of work in a quarter: 200,000 requests to a runner that computes nothing.

Memory and descriptors of every process have to stay where they were when the server had warmed up,
and the last requests must take no longer than the first ones. Writes bench/results/soak.json.

Run it with `python bench/soak.py`; it takes about a quarter of an hour.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import report
from bench.serving_load import GENERATE, request, run_client
from bench.serving_processes import HelperProcess, ServedProcess

REQUESTS = 200_000
CLIENTS, STREAMS, CONNECTIONS = 2, 32, 4  # streams and connections of each client
BATCHES = 50  # between them the server is idle, and looked at
WARM_BATCHES = 5
_MINUTE_S, _IDLE_S = 60.0, 30.0
# The prefix cache of a small pool is soon as full as it gets; that of a large one grows for long.
_FLAGS = (
    "--runner", "null", "--max-num-queued-reqs", "1024", "--num-gpu-blocks-override", "2048",
)  # fmt: skip
_PROMPT_TOKENS, _OUTPUT_TOKENS = (1, 200), (1, 32)  # drawn evenly


def soak(num_requests: int = REQUESTS, say: Callable[[str], None] = print) -> dict[str, Any]:
    """The whole run.

    Returns:
        `requests`, `seconds`, for each process `resident_mb` and `descriptors` when it had warmed
        up, at most and at the end, and percentiles of `latency_ms` in the first and last minute.
    """
    draw = np.random.default_rng(0)
    starts: list[float] = []
    latencies: list[float] = []
    history: list[dict[str, tuple[float, int]]] = []
    began = time.monotonic()
    with ExitStack() as stack:
        server = stack.enter_context(ServedProcess(*_FLAGS))
        clients = [stack.enter_context(HelperProcess("serving_client.py")) for _ in range(CLIENTS)]
        threads = stack.enter_context(ThreadPoolExecutor(CLIENTS))
        size = num_requests // (BATCHES * CLIENTS)

        def run(client: HelperProcess, messages: list[bytes]) -> list[dict[str, Any]]:
            done = run_client(client, server.address, GENERATE, messages, STREAMS, CONNECTIONS)
            answers: list[dict[str, Any]] = done["requests"]
            return answers

        for _ in range(BATCHES):
            messages = [_messages(draw, size) for _ in clients]
            for answers in threads.map(run, clients, messages):
                starts += [answer["start"] for answer in answers]
                latencies += [answer["times"][-1] - answer["start"] for answer in answers]
            history.append({role: _level(pid) for role, pid in server.pids.items()})
            say(f"{len(starts):7} requests, {time.monotonic() - began:5.0f} s: {history[-1]}")
        _check_idle(server)
    return {
        "requests": len(starts),
        "seconds": round(time.monotonic() - began, 1),
        "processes": {role: _levels([each[role] for each in history]) for role in history[0]},
        "latency_ms": _latencies(np.array(starts), np.array(latencies)),
        "streams": CLIENTS * STREAMS,
    }


def _check_idle(server: ServedProcess) -> None:
    """RuntimeError if blocks stay in use, or not every request was served; pages are a bit old."""
    deadline = time.monotonic() + _IDLE_S
    while used := server.metric("cupaged_kv_cache_usage_perc"):
        if time.monotonic() > deadline:
            raise RuntimeError(f"{used:%} of the blocks stay in use")
        time.sleep(0.1)
    asked = server.metric("cupaged_request_received_total")
    served = server.metric("cupaged_request_success_total")
    if asked != served:
        raise RuntimeError(f"{served:g} of {asked:g} requests were served")


def _messages(draw: np.random.Generator, number: int) -> list[bytes]:
    """Requests of different lengths."""
    prompts = draw.integers(*_PROMPT_TOKENS, number)
    outputs = draw.integers(*_OUTPUT_TOKENS, number)
    return [
        request(draw.integers(1000, 49000, prompt).tolist(), int(output)).SerializeToString()
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def _level(pid: int) -> tuple[float, int]:
    """Resident MB and open descriptors of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    resident = pages * os.sysconf("SC_PAGE_SIZE") / 1e6
    return round(resident, 1), len(os.listdir(f"/proc/{pid}/fd"))


def _levels(history: list[tuple[float, int]]) -> dict[str, Any]:
    """Of one process, between the batches."""
    resident, descriptors = zip(*history, strict=True)
    return {
        name: {"warm": values[WARM_BATCHES - 1], "most": max(values), "last": values[-1]}
        for name, values in (("resident_mb", resident), ("descriptors", descriptors))
    }


def _latencies(starts: Any, latencies: Any) -> dict[str, Any]:
    """From request to last message, of the requests that began in a minute."""
    found = {}
    for name, chosen in (
        ("first_minute", starts < starts.min() + _MINUTE_S),
        ("last_minute", starts > starts.max() - _MINUTE_S),
    ):
        found[name] = {
            "requests": int(chosen.sum()),
            **{f"p{q}": round(1e3 * np.percentile(latencies[chosen], q), 1) for q in (50, 90, 99)},
        }
    return found


def main() -> None:
    """Run, print, write."""
    results = soak()
    print(results)
    print(f"written: {report.write('soak', results)}")


if __name__ == "__main__":
    main()
