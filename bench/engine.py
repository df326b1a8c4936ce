"""How fast the engine is on the default model, and where the time of a step goes.

The workload is 64 requests at once (bench/workloads/smollm2_64.json), with 64 and with 16 sequences
running, by the native kernels with float32 weights and with the file's own, and by NumPy, each in a
process of its own. Two limits are measured beside it:

- The same run's matrix products, replayed by BLAS on float32 with nothing between them:
  blas_replay_fraction is their time over the wall time of the run; above 1, the run is faster than
  BLAS alone.
- What the memory gives: a single stream cannot be faster than all weights are read once a token;
  bandwidth_fraction is the share that is reached.

Writes bench/results/engine.json, and the growth with the number of requests as growth.svg. Run it
with `python bench/engine.py [MODEL]` or `make bench`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import growth_plot, report
from bench.timed_ops import TimedOps, packed_bytes
from cupaged import LLM, SamplingParams
from cupaged.resources import read_resources

WORKLOAD = Path(__file__).parent / "workloads" / "smollm2_64.json"
FORMS: dict[str, dict[str, str]] = {
    "float32": {"cpu_weight_dtype": "float32"},
    "file": {"cpu_weight_dtype": "file"},
    "numpy": {"cpu_kernels": "numpy"},
}
RUNNING = (64, 16)
CONCURRENT = (1, 4, 16, 64, 256)
GROWTH_PROMPT_TOKENS, GROWTH_OUTPUT_TOKENS = 32, 32
SINGLE_STREAM_TOKENS = 64
MAX_MODEL_LEN = 1024
POOL_BLOCKS = (500, 2_000, 8_000)
READ_BYTES, READ_PASSES = 512 << 20, 8


def prompt(seed: int, num_tokens: int) -> dict[str, list[int]]:
    """Random ids, none of them special."""
    ids = np.random.default_rng(seed).integers(1000, 49000, num_tokens)
    return {"prompt_token_ids": ids.tolist()}


def params(max_tokens: int) -> SamplingParams:
    """Greedy, to exactly that many tokens."""
    return SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens)


def run_workload(llm: LLM, timed: TimedOps) -> dict[str, Any]:
    """The 64 requests at once."""
    workload = json.loads(WORKLOAD.read_text())
    prompts = [prompt(i, n) for i, n in enumerate(workload["prompt_tokens"])]
    timed.reset()
    start = time.perf_counter()
    outputs = llm.generate(prompts, [params(n) for n in workload["max_tokens"]], use_tqdm=False)
    wall = time.perf_counter() - start
    seconds = timed.seconds
    inside = sum(seconds[part] for part in ("matmul", "attention", "sampling", "rest_of_runner"))
    seconds["scheduling"] = timed.core_seconds - inside
    share = {
        part: round(seconds[part] / wall, 4)
        for part in ("matmul", "attention", "sampling", "scheduling")
    }
    share["other"] = round(1 - sum(share.values()), 4)
    first = [o.metrics.time_to_first_token for o in outputs if o.metrics]
    num_tokens = sum(len(o.outputs[0].token_ids) for o in outputs)
    replay = timed.replay()
    return {
        "output_tokens_per_s": round(num_tokens / wall, 1),
        "ttft_s_p50": round(median(t for t in first if t is not None), 3),
        "wall_s": round(wall, 2),
        "num_steps": timed.num_steps,
        "time_share": share,
        "blas_replay_s": round(replay, 2),
        "blas_replay_fraction": round(replay / wall, 3),
    }


def single_stream(llm: LLM) -> float:
    """Output tokens a second of one request, without its prefill."""
    times = [
        time.perf_counter() for _ in llm.stream(prompt(0, 16), params(SINGLE_STREAM_TOKENS + 1))
    ]
    return round((len(times) - 1) / (times[-1] - times[0]), 1)


def growth(llm: LLM) -> dict[str, float]:
    """Output tokens a second at so many equal requests at once."""
    rates = {}
    for n in CONCURRENT:
        prompts = [prompt(i, GROWTH_PROMPT_TOKENS) for i in range(n)]
        start = time.perf_counter()
        llm.generate(prompts, params(GROWTH_OUTPUT_TOKENS), use_tqdm=False)
        rates[str(n)] = round(n * GROWTH_OUTPUT_TOKENS / (time.perf_counter() - start), 1)
    return rates


def read_bytes_per_s() -> float:
    """Bytes a second that all cores together read from memory, the best of several passes."""
    cores = read_resources().cores
    parts = [np.ones(READ_BYTES // 4 // cores, np.float32) for _ in range(cores)]
    best = 0.0
    with ThreadPoolExecutor(cores) as readers:
        for _ in range(READ_PASSES):
            start = time.perf_counter()
            list(readers.map(np.max, parts))
            best = max(best, READ_BYTES / (time.perf_counter() - start))
    return best


def by_pool_size(model: str | None) -> dict[str, float]:
    """Microseconds of a step of 16 requests outside the operations, by blocks of the pool."""
    found: dict[str, float] = {}
    for num_blocks in (POOL_BLOCKS[0], *POOL_BLOCKS):  # the first once more, warm
        llm, timed, _ = load(model, 16, num_gpu_blocks_override=num_blocks)
        llm.generate([prompt(i, 16) for i in range(16)], params(4), use_tqdm=False)
        timed.reset()
        llm.generate([prompt(i, 16) for i in range(16)], params(32), use_tqdm=False)
        inside = sum(timed.seconds.values())
        found[str(num_blocks)] = round((timed.core_seconds - inside) / timed.num_steps * 1e6)
    return found


def import_seconds(statement: str) -> float:
    """Wall time of a new Python that runs the statement, less that of one that runs nothing."""

    def run(code: str) -> float:
        best = []
        for _ in range(3):
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], check=True)
            best.append(time.perf_counter() - start)
        return min(best)

    return round(run(statement) - run("pass"), 3)


def load(model: str | None, max_num_seqs: int, **options: Any) -> tuple[LLM, TimedOps, float]:
    """An engine whose operations are timed, and how long it took to load."""
    start = time.perf_counter()
    options |= {"device": "cpu", "max_model_len": MAX_MODEL_LEN, "max_num_seqs": max_num_seqs}
    llm = LLM(model, **options)
    seconds = time.perf_counter() - start
    return llm, TimedOps.around(llm.engine.core), round(seconds, 2)


def measure(model: str | None, form: str) -> dict[str, Any]:
    """One form, in this process."""
    results: dict[str, Any] = {}
    for num_running in RUNNING:
        llm, timed, load_s = load(model, num_running, **FORMS[form])
        if num_running == RUNNING[0]:
            results["load_s"] = load_s
        llm.generate(prompt(0, 8), params(4), use_tqdm=False)  # touch the weights
        if num_running == RUNNING[-1]:
            results["single_stream_tokens_per_s"] = single_stream(llm)
            results["weight_mb"] = round(packed_bytes(timed) / 1e6)
        results[f"running_{num_running}"] = run_workload(llm, timed)
        del llm, timed
    return results


def measure_elsewhere(model: str | None, what: str) -> dict[str, Any]:
    """One part, in a process of its own."""
    command = [sys.executable, __file__, "--only", what, *([model] if model else [])]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measure_growth(model: str | None) -> dict[str, Any]:
    """With weights as they come by default."""
    llm, _, _ = load(model, max(CONCURRENT))
    return growth(llm)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", help="default: the installed SmolLM2-135M-Instruct")
    parser.add_argument("--only", choices=(*FORMS, "growth", "pool"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.only:
        parts = {"growth": measure_growth, "pool": by_pool_size}
        if given.only in parts:
            print(json.dumps(parts[given.only](given.model)))
        else:
            print(json.dumps(measure(given.model, given.only)))
        return
    bandwidth = read_bytes_per_s()
    results: dict[str, Any] = {"read_gb_per_s": round(bandwidth / 1e9, 1)}
    for form in FORMS:
        results[form] = found = measure_elsewhere(given.model, form)
        bound = bandwidth / (1e6 * found["weight_mb"])
        found["bandwidth_fraction"] = round(found["single_stream_tokens_per_s"] / bound, 3)
        print(f"{form}: {json.dumps(found, indent=2)}", flush=True)
    results["blas_replay_fraction"] = results["float32"]["running_64"]["blas_replay_fraction"]
    results["growth"] = measure_elsewhere(given.model, "growth")
    results["us_outside_operations_by_pool_blocks"] = measure_elsewhere(given.model, "pool")
    results["import_s"] = import_seconds("import cupaged")
    results["import_llm_s"] = import_seconds("from cupaged import LLM; LLM")
    for name, value in results.items():
        if name not in FORMS:
            print(f"{name:40} {value}")
    print(f"written: {report.write('engine', results)}")
    growth_plot.draw(report.RESULTS / "growth.svg", results["growth"])


if __name__ == "__main__":
    main()
