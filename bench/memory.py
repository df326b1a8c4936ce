"""The PagedAttention paper's numbers about KV memory, and what prefix caching finds.

The engine core, its scheduler and its block manager are the real ones; the model is a sum of a few
terms, fitted to OPT-13B on one A100 with 40 GB. The allocators of the paper's comparison are in
`baselines/`. Loads are drawn as the paper's were, from the lengths in `traces/`. Nothing is random
and nothing is timed, so every run gives the same figures. Writes bench/results/memory.json and two
pictures beside it.

Run it with `python bench/memory.py`; it takes three minutes of one core.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import report, traces
from bench.baselines.contiguous import OUTPUT_ESTIMATES, simulate_contiguous
from bench.baselines.request_level import simulate_request_level
from bench.memory_plots import draw_hit_rates, draw_utilisation
from bench.prefix_hit_rate import STRATEGIES, best_hit_rate, best_hit_rate_in_order, hit_rate
from bench.simulation import VOCAB_SIZE, simulate
from bench.usage import MeanUsage, mean_usage
from cupaged.config import EngineConfig
from cupaged.engine.simulated_runner import StepCost

# OPT-13B in float16: keys and values of 40 layers of 5120.
KV_BYTES_PER_TOKEN = 2 * 2 * 40 * 5120
KV_POOL_BYTES = 12 * 2**30
NUM_SLOTS = KV_POOL_BYTES // KV_BYTES_PER_TOKEN
BLOCK_SIZE = 16
NUM_BLOCKS = NUM_SLOTS // BLOCK_SIZE
NUM_HOST_BLOCKS = 20 * 2**30 // (KV_BYTES_PER_TOKEN * BLOCK_SIZE)
# Terms of memory and prefill from steps measured on an A100 with 80 GB (DistServe, Zhong et al.,
# OSDI 2024), those of memory scaled by bandwidth; the terms of a step and of a sequence are fitted
# to the two mean batch sizes that the paper gives for its own system (Fig 13). Blocks of
# 13.1 MB are swapped at 25 GB/s.
OPT_13B = StepCost(
    step_s=23.3e-3, sequence_s=0.304e-3, context_token_s=7.77e-7,
    prefill_token_s=0.1405e-3, prefill_pair_s=8.1e-9, swapped_block_s=0.52e-3,
)  # fmt: skip
DURATION_S = 900.0
SATURATED_RATE = 4.0  # requests a second of ShareGPT: more than any of them serves
BATCH_RATES = {"sharegpt": 2.0, "alpaca": 30.0}
SAVING_RATES = {"alpaca": 20.0, "sharegpt": 0.5}  # the paper states the first one only
OTHER_SAVING_RATES = (1.0, 2.0)  # of ShareGPT: with them the pool is full, whatever n is
REQUEST_LEVEL_BATCH = {"sharegpt": 5, "alpaca": 14}
NUM_SAMPLES = (2, 4, 6)
POOL_SIZES = (1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
UNBOUNDED = 400_000  # more blocks than the trace has

# What the paper prints; percent of the pool, sequences, percent of blocks saved.
PAPER: dict[str, Any] = {
    "utilisation": {"ours": 96.3, "orca_oracle": 38.2, "orca_pow2": 26.8, "orca_max": 20.4},
    "mean_batch": {
        "sharegpt": {"ours": 30.42, "orca_oracle": 13.62, "orca_pow2": 9.81, "orca_max": 7.0},
        "alpaca": {"ours": 132.44, "orca_oracle": 72.75, "orca_pow2": 43.24, "orca_max": 7.0},
    },
    "parallel_saving": {"alpaca": {"2": 6.09, "4": 8.53, "6": 9.79}, "sharegpt": [16.2, 30.5]},
}


def engine_config(num_samples: int) -> EngineConfig:
    """The paper's: 2,560 tokens a step, one percent of the pool kept free, and 20 GiB of the host.

    Requests of several sequences are swapped; those of one are computed again.
    """
    return EngineConfig(
        vocab_size=VOCAB_SIZE, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE,
        max_model_len=traces.MAX_MODEL_LEN, max_num_seqs=2048, max_num_batched_tokens=2560,
        watermark=0.01, num_host_blocks=NUM_HOST_BLOCKS if num_samples > 1 else 0,
    )  # fmt: skip


def usage(
    system: str, name: str, rate: float, *, begin_s: float, num_samples: int = 1
) -> MeanUsage:
    """How a system uses its pool under a load, from `begin_s` to the end.

    `system` is ours, request_level, or orca_ and a name in `OUTPUT_ESTIMATES`.
    """
    load = traces.poisson_load(traces.lengths(name), rate=rate, duration_s=DURATION_S)
    if system == "ours":
        steps = simulate(
            load, engine_config(num_samples), OPT_13B, until_s=DURATION_S, num_samples=num_samples
        )
    elif system == "request_level":
        size = REQUEST_LEVEL_BATCH[name]
        steps = simulate_request_level(load, size, OPT_13B, until_s=DURATION_S)
    else:
        estimate = system.removeprefix("orca_")
        steps = simulate_contiguous(
            load, estimate, OPT_13B, num_blocks=NUM_BLOCKS, until_s=DURATION_S
        )
    return mean_usage(steps, NUM_SLOTS, begin_s, DURATION_S)


SYSTEMS = ("ours", *(f"orca_{name}" for name in OUTPUT_ESTIMATES), "request_level")


def utilisation() -> dict[str, MeanUsage]:
    """Of the pool, when more requests come than can be served (Fig 2)."""
    return {system: usage(system, "sharegpt", SATURATED_RATE, begin_s=300.0) for system in SYSTEMS}


def batches() -> dict[str, dict[str, MeanUsage]]:
    """Sequences in a step at the paper's rates (Fig 13), once the pool is full."""
    return {
        name: {system: usage(system, name, rate, begin_s=600.0) for system in SYSTEMS}
        for name, rate in BATCH_RATES.items()
    }


def parallel_saving() -> dict[str, dict[str, float]]:
    """Percentage of blocks saved where n samples share their prompt (Fig 15)."""
    return {name: _saving(name, rate) for name, rate in SAVING_RATES.items()}


def saving_by_rate() -> dict[str, dict[str, float]]:
    """The same for ShareGPT at other rates."""
    return {f"{rate:g}": _saving("sharegpt", rate) for rate in OTHER_SAVING_RATES}


def _saving(name: str, rate: float) -> dict[str, float]:
    return {
        str(n): usage("ours", name, rate, begin_s=300.0, num_samples=n).sharing_saving
        for n in NUM_SAMPLES
    }


def hit_rates() -> dict[str, Any]:
    """By the size of the pool, for each strategy, and the bounds."""
    trace = traces.prefix_blocks()
    return {
        "num_blocks": POOL_SIZES,
        **{name: [hit_rate(trace, size, name) for size in POOL_SIZES] for name in STRATEGIES},
        "best_in_order": [best_hit_rate_in_order(trace, size) for size in POOL_SIZES],
        "best": best_hit_rate(trace),
        "unbounded": {name: hit_rate(trace, UNBOUNDED, name) for name in STRATEGIES},
    }


def rounded(value: Any) -> Any:
    """Two digits behind the point, in whatever holds the figures."""
    if isinstance(value, float):
        return round(value, 2)
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [rounded(item) for item in value]
    return value


def measure() -> dict[str, Any]:
    """Everything, as it is written."""
    saturated, by_load, found = utilisation(), batches(), hit_rates()
    results = {
        "utilisation": {system: mean.token for system, mean in saturated.items()},
        "pool_parts": {
            system: {part: getattr(mean, part) for part in ("token", "reserved", "unused", "other")}
            for system, mean in saturated.items()
        },
        "mean_batch": {
            name: {system: mean.num_sequences for system, mean in systems.items()}
            for name, systems in by_load.items()
        },
        "max_batch": {
            name: {system: mean.max_sequences for system, mean in systems.items()}
            for name, systems in by_load.items()
        },
        "parallel_saving": parallel_saving(),
        "sharegpt_saving_by_rate": saving_by_rate(),
        "mooncake_hit_rate": found["unbounded"]["hash"],
        "hit_rate": found,
        "pool": {"slots": NUM_SLOTS, "blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE},
        "paper": PAPER,
    }
    return {key: rounded(value) for key, value in results.items()}


def main() -> None:
    """Write the figures and the pictures, and print the figures beside the paper's."""
    results = measure()
    path = report.write("memory", results)
    draw_utilisation(report.RESULTS / "memory_utilisation.svg", results)
    draw_hit_rates(report.RESULTS / "memory_hit_rate.svg", results)
    for key in ("utilisation", "mean_batch", "parallel_saving"):
        print(f"{key}\n  here:  {results[key]}\n  paper: {PAPER[key]}")
    print(f"mooncake_hit_rate: {results['mooncake_hit_rate']}")
    for name, rates in results["hit_rate"].items():
        print(f"  {name}: {rates}")
    print(f"written: {path}")


if __name__ == "__main__":
    main()
