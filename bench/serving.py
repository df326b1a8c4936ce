"""What the gRPC service costs: beside a bare gRPC server, and beside the engine without a service.

`paced_cpu_ratio_64`: processor time of the front end a message, over that of a `grpc.aio` server
that only writes prebuilt messages of the same size; 64 streams, 50 steps a second, one token a step
each. `saturated_tokens_per_s`: tokens a second at 64 streams of a runner that computes nothing.
`added_latency_ms_p50`: what one request waits longer for its first token than in the engine's own
process. `serve_over_offline`: output tokens a second of 64 requests, over those of the engine in
one process with as many threads of BLAS. Writes bench/results/serving.json.

Run it with `python bench/serving.py`; it takes about six minutes. Ratios of processor time bear
other work on the machine, as the compared runs take turns; tokens a second and latencies want an
idle one. The runner that computes nothing draws one token again and again, whose message the front
end has at hand; one that it meets for the first time costs about a microsecond more. Install
`nghttp2-client` for the client h2load.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import grpc
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import report
from bench.serving_load import CLIENT, GENERATE, request, run_client, run_load
from bench.serving_processes import (
    SERVING,
    HelperProcess,
    ServedProcess,
    cpu_seconds,
    watch_health,
)

STREAMS = (1, 16, 64, 256)
BARE = "/bench.Bare/Stream"
STEPS_PER_S = 50
PACED_STREAMS, PACED_TOKENS, PACED_ROUNDS = 64, 400, 6
NULL_TOKENS = {1: 4000, 16: 4000, 64: 3000, 256: 1500}
NULL_ROUNDS = 3
LATENCY_REQUESTS, LATENCY_ROUNDS = 100, 5
MODEL_TOKENS = {1: 48, 16: 24, 64: 16, 256: 8}
OFFLINE_REQUESTS, OFFLINE_ROUNDS = 64, 3
DEATHS = 3
THREADS = 1  # of BLAS, of every engine here
LIMITS = ("--max-num-seqs", "256", "--max-num-queued-reqs", "1024")
NULL = ("--runner", "null", "--max-model-len", "8192", *LIMITS)
MODEL_OPTIONS = {"max_model_len": 1024, "max_num_seqs": 64, "threads": THREADS}
PROMPT = [1000] * 8


def paced_cpu() -> dict[str, Any]:
    """Microseconds a message of a front end and of a bare server, which take turns."""
    message = request(PROMPT, PACED_TOKENS).SerializeToString()
    pace = str(STEPS_PER_S)
    ours: list[float] = []
    bare: list[float] = []
    with ServedProcess(*NULL, "--null-steps-per-s", pace) as server:
        with HelperProcess("serving_client.py") as client:
            one = request(PROMPT, 4).SerializeToString()
            answer = run_client(client, server.address, GENERATE, [one], 1)["requests"][0]
        size = answer["bytes"][answer["tokens"].index(1) + 1]
        num_messages = PACED_TOKENS + 2  # with the first and the last, which bring no token

        def run_ours() -> None:
            before, cpu = written(server), server.cpu_seconds()["frontend"]
            run_load(server.address, GENERATE, message, PACED_STREAMS)
            cpu = server.cpu_seconds()["frontend"] - cpu
            # The first tokens of a stream are no interval: they come on top, as do the two.
            ours.append(1e6 * cpu / (written(server) - before + 3 * PACED_STREAMS))

        with HelperProcess("serving_bare.py", str(size), str(num_messages), pace) as other:
            address = f"127.0.0.1:{int(other.read())}"

            def run_bare() -> None:
                cpu = cpu_seconds(other.pid)
                run_load(address, BARE, message, PACED_STREAMS)
                cpu = cpu_seconds(other.pid) - cpu
                bare.append(1e6 * cpu / (PACED_STREAMS * num_messages))

            take_turns(PACED_ROUNDS, run_ours, run_bare)
    return {
        "paced_cpu_ratio_64": round(sum(ours) / sum(bare), 3),
        "paced": {
            "frontend_us_a_message": round(median(ours), 1),
            "bare_us_a_message": round(median(bare), 1),
            "bytes_a_message": size,
            "ratios_of_rounds": [round(a / b, 2) for a, b in zip(ours, bare, strict=True)],
        },
    }


def saturated() -> dict[str, Any]:
    """Streams of a runner that computes nothing, as fast as they go."""
    results: dict[str, Any] = {}
    with ServedProcess(*NULL) as server:
        run_load(server.address, GENERATE, request(PROMPT, 100).SerializeToString(), 64)
        for streams in STREAMS:
            message = request(PROMPT, NULL_TOKENS[streams]).SerializeToString()
            num_tokens = streams * NULL_TOKENS[streams]
            runs = []
            for _ in range(NULL_ROUNDS):
                before, cpu = written(server), server.cpu_seconds()
                load = run_load(server.address, GENERATE, message, streams)
                used = {role: after - cpu[role] for role, after in server.cpu_seconds().items()}
                runs.append(
                    {
                        "tokens_per_s": round(num_tokens / load.wall_s),
                        "tokens_a_message": round(num_tokens / (written(server) - before), 1),
                        "frontend_us_a_token": round(1e6 * used["frontend"] / num_tokens, 1),
                        "engine_us_a_token": round(1e6 * used["engine"] / num_tokens, 1),
                        "client_cpu_share": round(load.client_cpu_s / load.wall_s, 2),
                    }
                )
            results[str(streams)] = medians(runs)
    return {"saturated_tokens_per_s": results["64"]["tokens_per_s"], "null_runner": results}


def added_latency() -> dict[str, Any]:
    """Waiting for the first token, one request at a time, without a model's time in it."""
    messages = [request(PROMPT, 2).SerializeToString()] * LATENCY_REQUESTS
    job = {"prompts": [PROMPT] * LATENCY_REQUESTS, "max_tokens": [2] * LATENCY_REQUESTS}
    served: list[float] = []
    offline: list[float] = []
    options = json.dumps({"max_model_len": 8192, "max_num_seqs": 256})
    with (
        ServedProcess(*NULL) as server,
        HelperProcess("serving_client.py") as client,
        HelperProcess("serving_offline.py", "null", options) as engine,
    ):

        def run_served() -> None:
            done = run_client(client, server.address, GENERATE, messages, 1)
            served.extend(map(first_token_s, done["requests"]))

        def run_offline() -> None:
            done = json.loads(engine.ask(json.dumps({**job, "at_once": False})))
            offline.extend(done["first_s"])

        take_turns(LATENCY_ROUNDS, run_served, run_offline)
    return {
        "added_latency_ms_p50": round(1e3 * (median(served) - median(offline)), 3),
        "first_token_ms": {"serve": percentiles(served), "in_process": percentiles(offline)},
    }


def first_token() -> dict[str, Any]:
    """When messages come of a request that wants 16 tokens in each, in steps since its start."""
    with (
        ServedProcess(*NULL, "--null-steps-per-s", str(STEPS_PER_S)) as server,
        HelperProcess("serving_client.py") as client,
    ):
        message = request(PROMPT, 33, interval_tokens=16).SerializeToString()
        runs = [run_client(client, server.address, GENERATE, [message], 1) for _ in range(3)]
        answer = runs[-1]["requests"][0]
    brought = [
        (round(STEPS_PER_S * (at - answer["start"]), 1), tokens)
        for at, tokens in zip(answer["times"], answer["tokens"], strict=True)
        if tokens
    ]
    return {
        "first_token_flushed": {
            "interval_tokens": 16,
            "tokens_of_messages": [tokens for _, tokens in brought],
            "steps_since_start": [steps for steps, _ in brought],
        }
    }


def engine_death() -> dict[str, Any]:
    """How soon the health service tells that the engine was killed."""
    runs = []
    for _ in range(DEATHS):
        with (
            ServedProcess(*NULL, "--restart-engine") as server,
            grpc.insecure_channel(server.address) as channel,
        ):
            watch = watch_health(channel)
            while next(watch).status != SERVING:
                pass
            began = time.perf_counter()
            os.kill(server.pids["engine"], signal.SIGKILL)
            while next(watch).status == SERVING:
                pass
            runs.append(time.perf_counter() - began)
            watch.cancel()
    return {"engine_killed_to_not_serving_ms": round(1e3 * median(runs), 1)}


def real_model() -> dict[str, Any]:
    """The default model: so many streams at once, and 64 requests beside the engine alone."""
    flags = [f for k, v in MODEL_OPTIONS.items() for f in (f"--{k.replace('_', '-')}", str(v))]
    prompts = [prompt(seed, 8 + 7 * (seed % 8)) for seed in range(OFFLINE_REQUESTS)]
    lengths = [16 + 4 * (seed % 9) for seed in range(OFFLINE_REQUESTS)]
    job = {"prompts": prompts, "max_tokens": lengths, "at_once": True}
    requests = [request(p, n).SerializeToString() for p, n in zip(prompts, lengths, strict=True)]
    streams: dict[str, Any] = {}
    served: list[dict[str, float]] = []
    offline: list[dict[str, float]] = []
    with (
        ServedProcess(*flags, "--max-num-queued-reqs", "1024", threads=THREADS) as server,
        HelperProcess("serving_client.py") as client,
        HelperProcess(
            "serving_offline.py", "model", json.dumps(MODEL_OPTIONS), threads=THREADS
        ) as engine,
    ):
        run_client(client, server.address, GENERATE, requests[:4], 4)  # touches the weights
        engine.ask(json.dumps({"prompts": [PROMPT], "max_tokens": [4], "at_once": True}))
        for n in STREAMS:
            equal = [request(prompt(i, 16), MODEL_TOKENS[n]).SerializeToString() for i in range(n)]
            streams[str(n)] = of_streams(run_client(client, server.address, GENERATE, equal, n))

        def run_served() -> None:
            cpu = server.cpu_seconds()
            done = run_client(client, server.address, GENERATE, requests, len(requests), 8)
            used = {role: after - cpu[role] for role, after in server.cpu_seconds().items()}
            served.append(
                {
                    "tokens_per_s": round(sum(lengths) / done["wall_s"], 1),
                    "engine_cpu_s": round(used["engine"], 2),
                    "frontend_cpu_s": round(used["frontend"], 2),
                    "client_cpu_s": round(done["cpu_s"], 2),
                }
            )

        def run_offline() -> None:
            done = json.loads(engine.ask(json.dumps(job)))
            offline.append(
                {
                    "tokens_per_s": round(done["tokens"] / done["wall_s"], 1),
                    "engine_cpu_s": round(done["cpu_s"], 2),
                }
            )

        take_turns(OFFLINE_ROUNDS, run_served, run_offline)
    serve, alone = medians(served), medians(offline)
    return {
        "serve_over_offline": round(serve["tokens_per_s"] / alone["tokens_per_s"], 3),
        "offline_cpu_over_serve_cpu": round(alone["engine_cpu_s"] / serve["engine_cpu_s"], 3),
        "blas_threads": THREADS,
        "requests_64": {"serve": serve, "offline": alone, "output_tokens": sum(lengths)},
        "model": streams,
    }


def written(server: ServedProcess) -> float:
    """Messages with tokens, but for the first of each stream, that the front end has written."""
    return server.metric("cupaged_inter_token_latency_seconds_count")


def take_turns(rounds: int, first: Callable[[], None], second: Callable[[], None]) -> None:
    """Run both that often; every other round the other way round."""
    for turn in range(rounds):
        for run in (second, first) if turn % 2 else (first, second):
            run()


def of_streams(done: dict[str, Any]) -> dict[str, float]:
    """Rates and times of answers that came together."""
    answers = done["requests"]
    gaps = [
        (after - before) / tokens
        for answer in answers
        for before, after, tokens in zip(
            answer["times"], answer["times"][1:], answer["tokens"][1:], strict=False
        )
        if tokens
    ]
    num_tokens = sum(sum(answer["tokens"]) for answer in answers)
    return {
        "tokens_per_s": round(num_tokens / done["wall_s"], 1),
        "first_token_ms_p50": round(1e3 * median(map(first_token_s, answers)), 1),
        "token_ms_p50": round(1e3 * median(gaps), 1),
        "client_cpu_s": round(done["cpu_s"], 2),
    }


def first_token_s(answer: dict[str, Any]) -> float:
    """Seconds until the first message that brought tokens."""
    first = next(i for i, tokens in enumerate(answer["tokens"]) if tokens)
    return float(answer["times"][first] - answer["start"])


def prompt(seed: int, num_tokens: int) -> list[int]:
    """Random ids, none of them special."""
    ids: list[int] = np.random.default_rng(seed).integers(1000, 49000, num_tokens).tolist()
    return ids


def percentiles(seconds: list[float]) -> dict[str, float]:
    """In milliseconds."""
    return {f"p{q}": round(1e3 * float(np.percentile(seconds, q)), 3) for q in (50, 90, 99)}


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    """Of each key."""
    return {key: median(run[key] for run in runs) for key in runs[0]}


PARTS = (paced_cpu, saturated, added_latency, first_token, engine_death, real_model)


def main() -> None:
    """Measure, print, write."""
    results: dict[str, Any] = {}
    for part in PARTS:
        found = part()
        for name, value in found.items():
            print(f"{name:28} {value}", flush=True)
        results |= found
    goals = ("paced_cpu_ratio_64", "saturated_tokens_per_s", "added_latency_ms_p50")
    keys = (*goals, "serve_over_offline")
    first = {key: results.pop(key) for key in keys}
    path = report.write("serving", {**first, "load_client": CLIENT, **results})
    print(f"written: {path}")


if __name__ == "__main__":
    main()
