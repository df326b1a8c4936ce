"""How fast the engine is on the default model, and where the time of a step goes.

The workload is 64 requests at once (bench/workloads/smollm2_64.json). The limit to compare
with is the same run's own matrix products, replayed bare: blas_replay_fraction is their time over
the wall time of the run. Writes bench/results/engine.json.

Run it with `python bench/engine.py [MODEL]` or `make bench`.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import report
from bench.timed_ops import TimedOps
from cupaged import LLM, SamplingParams

WORKLOAD = Path(__file__).parent / "workloads" / "smollm2_64.json"
CONCURRENT = (1, 4, 16, 64, 256)
GROWTH_PROMPT_TOKENS, GROWTH_OUTPUT_TOKENS = 32, 32
SINGLE_STREAM_TOKENS = 64
MAX_MODEL_LEN = 1024


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


def load(model: str | None, max_num_seqs: int) -> tuple[LLM, TimedOps, float]:
    """An engine whose operations are timed, and how long it took to load."""
    start = time.perf_counter()
    llm = LLM(model, max_model_len=MAX_MODEL_LEN, max_num_seqs=max_num_seqs)
    seconds = time.perf_counter() - start
    return llm, TimedOps.around(llm.engine.core), round(seconds, 2)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", help="default: the installed SmolLM2-135M-Instruct")
    model = parser.parse_args().model
    llm, timed, load_s = load(model, 64)
    llm.generate(prompt(0, 8), params(4), use_tqdm=False)  # touch the weights
    results = {**run_workload(llm, timed), "single_stream_tokens_per_s": single_stream(llm)}
    del llm
    llm, timed, _ = load(model, max(CONCURRENT))
    results["growth"] = growth(llm)
    results["peak_rss_mb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    results["load_s"] = load_s
    results["import_s"] = import_seconds("import cupaged")
    results["import_llm_s"] = import_seconds("from cupaged import LLM; LLM")
    for name, value in results.items():
        print(f"{name:28} {value}")
    print(f"written: {report.write('engine', results)}")


if __name__ == "__main__":
    main()
