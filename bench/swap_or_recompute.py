"""What giving way costs on `cpu`: swapping a sequence out and in, against computing it again.

SmolLM2-135M; for each context the times of both, in turns, and their medians. The crossover is the
least context from which on swapping is cheaper. Memory of the host is copied so much faster than a
processor computes that it lies below one block; so the same is told of links that are slower by
known factors, the times of the copies multiplied. For each of them "auto", with costs from its own
short measurement (its copies multiplied alike), has to pick the side that was measured to be
cheaper. Then a load that does not fit the pool, by both ways and by "auto". All times are of the
process's CPU, so that a busy machine tells the same.

Run it with `python bench/swap_or_recompute.py [--rounds N]`; it writes
bench/results/swap_or_recompute.json.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from bench.report import write
from cupaged.config import EngineConfig
from cupaged.engine.core import EngineCore
from cupaged.engine.preemption import (
    Cheaper,
    PreemptionCosts,
    PreemptionStrategy,
    Recompute,
    Swap,
)
from cupaged.engine.runner import ModelRunner
from cupaged.engine.warm_up import warm_up_batch
from cupaged.loading.model_files import load_model, open_model
from cupaged.ops.numpy_ops import NumpyOps
from cupaged.request import CoreRequest, Request
from cupaged.sampling_params import SamplingParams

BLOCK_SIZE, MAX_LEN = 16, 2048
NUM_BLOCKS = MAX_LEN // BLOCK_SIZE + 8
CONTEXTS = (16, 32, 64, 128, 256, 512, 1024, 2040)
FACTORS = (1, 100, 200, 400)  # how much slower than this memory a link is
LOAD = {
    "requests": 6, "samples": 2, "prompt_tokens": 100, "output_tokens": 80, "pool_blocks": 36
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds for a context: medians of the rounds."""

    swap: float
    recompute: float


class Bench:
    """The model, and one pool for all measurements."""

    def __init__(self) -> None:
        self.files = open_model(None)
        self.ops = NumpyOps()
        self.model: Any = load_model(self.files, self.ops, max_model_len=MAX_LEN)
        self.config = self._config(NUM_BLOCKS, NUM_BLOCKS)
        self.runner = self._runner(self.config)
        for cache in (*self.runner._kv_caches, *self.runner._host_caches):
            cache.k[...] = cache.v[...] = 0  # the first touch of memory is another cost

    def measure(self, num_tokens: int, rounds: int) -> Measured:
        """Both sides of one context, in turns."""
        swaps, computed = [], []
        for i in range(rounds):
            swaps.append(self._swap(num_tokens, i))
            computed.append(self._recompute(num_tokens, i))
        return Measured(median(swaps), median(computed))

    def load(self, strategy: PreemptionStrategy) -> dict[str, Any]:
        """Requests that do not fit the pool together: seconds, and who gave way."""
        config = self._config(LOAD["pool_blocks"], 4 * LOAD["pool_blocks"])
        core = EngineCore(config, self._runner(config), preemption=strategy)
        for i in range(LOAD["requests"]):
            params = SamplingParams(
                n=LOAD["samples"],
                max_tokens=LOAD["output_tokens"],
                temperature=1.0,
                ignore_eos=True,
            )
            core.add_request(_request(f"{i}", LOAD["prompt_tokens"], i, params))
        start = time.process_time()
        while core.has_unfinished_requests:
            core.step()
        seconds, stats = time.process_time() - start, core.stats()
        return {
            "seconds": round(seconds, 2),
            "preemptions": stats.num_preemptions_total,
            "by_swapping": stats.num_swap_preemptions_total,
            "tokens_computed": core.num_computed_tokens,
        }

    def _swap(self, num_tokens: int, seed: int) -> float:
        """Blocks that lie anywhere, to any place on the host, and back to others."""
        random, count = np.random.default_rng(seed), -(-num_tokens // BLOCK_SIZE)
        here, there, later = (random.permutation(NUM_BLOCKS)[:count] for _ in range(3))
        batch = warm_up_batch(1, self.config)
        step = self.ops.begin_step(
            _with_pairs(batch, np.stack([here, there], 1), np.stack([there, later], 1))
        )
        start = time.process_time()
        self.ops.swap_out(self.runner._kv_caches, self.runner._host_caches, step)
        self.ops.swap_in(self.runner._kv_caches, self.runner._host_caches, step)
        return time.process_time() - start

    def _recompute(self, num_tokens: int, seed: int) -> float:
        """All steps of a prompt, in chunks as the scheduler makes them."""
        core = EngineCore(self.config, self.runner)
        core.add_request(_request("a", num_tokens, seed, SamplingParams(max_tokens=1)))
        start = time.process_time()
        while core.has_unfinished_requests:
            core.step()
        return time.process_time() - start

    def _config(self, num_blocks: int, num_host_blocks: int) -> EngineConfig:
        return EngineConfig(
            vocab_size=self.files.config.vocab_size, num_blocks=num_blocks, block_size=BLOCK_SIZE,
            max_model_len=MAX_LEN, max_num_seqs=16, num_host_blocks=num_host_blocks,
            enable_prefix_caching=False,
        )  # fmt: skip

    def _runner(self, config: EngineConfig) -> ModelRunner:
        specs = self.files.model_class.kv_cache_specs(self.files.config, BLOCK_SIZE, "float32")
        return ModelRunner(self.model, specs, self.ops, config)


def _with_pairs(batch: Any, out: Any, back: Any) -> Any:
    return replace(batch, swap_out=out.astype(np.int32), swap_in=back.astype(np.int32))


def _request(name: str, num_tokens: int, seed: int, params: SamplingParams) -> CoreRequest:
    ids = np.random.default_rng(seed).integers(3, 40_000, num_tokens).tolist()
    return CoreRequest(name, tuple(ids), params, seed=seed)


def slower(costs: PreemptionCosts, factor: float) -> PreemptionCosts:
    """The same with copies that take longer."""
    return PreemptionCosts(costs.per_swap * factor, costs.per_block * factor, costs.per_token)


def crossover(is_swap_cheaper: Callable[[int], bool]) -> int | None:
    """The least context from which on swapping is cheaper; None if it is at no end."""
    least = None
    for num_tokens in reversed(CONTEXTS):
        if not is_swap_cheaper(num_tokens):
            break
        least = num_tokens
    return least


def picks(costs: PreemptionCosts, num_tokens: int) -> bool:
    """Whether "auto" swaps one sequence of that many computed tokens."""
    sequence = Request(CoreRequest("a", (0,), SamplingParams()), arrival=0, max_tokens=1).sequences[
        0
    ]
    sequence.num_computed_tokens = num_tokens
    return Cheaper(costs).swaps([sequence], -(-num_tokens // BLOCK_SIZE))


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    bench = Bench()
    costs = bench.runner.measure_costs(time.process_time)
    measured = {c: bench.measure(c, arguments.rounds) for c in CONTEXTS}
    print("tokens   swap out+in   compute again   ratio")
    for num_tokens, m in measured.items():
        print(
            f"{num_tokens:6} {1e3 * m.swap:10.2f} ms {1e3 * m.recompute:12.2f} ms "
            f"{m.recompute / m.swap:7.1f}"
        )
    links = []
    for factor in FACTORS:
        right = {c: m.swap * factor < m.recompute for c, m in measured.items()}
        auto = {c: picks(slower(costs, factor), c) for c in CONTEXTS}
        link = {
            "slower_by": factor,
            "crossover_tokens": crossover(right.__getitem__),
            "auto_swaps_from": crossover(auto.__getitem__),
            "auto_is_right": [c for c in CONTEXTS if auto[c] == right[c]],
            "auto_is_wrong": {
                c: round(measured[c].swap * factor / measured[c].recompute, 2)
                for c in CONTEXTS
                if auto[c] != right[c]
            },
        }
        links.append(link)
        print(link)
    load = {
        name: bench.load(strategy)
        for name, strategy in (
            ("recompute", Recompute()), ("swap", Swap()), ("auto", Cheaper(costs)),
        )
    }  # fmt: skip
    for name, told in load.items():
        print(name, told)
    results = {
        "model": bench.files.path.name,
        "rounds": arguments.rounds,
        "ms": {
            c: {"swap": round(1e3 * m.swap, 3), "recompute": round(1e3 * m.recompute, 3)}
            for c, m in measured.items()
        },
        "auto_costs_ms": {
            "per_swap": round(1e3 * costs.per_swap, 4),
            "per_block": round(1e3 * costs.per_block, 4),
            "per_token": round(1e3 * costs.per_token, 4),
        },
        "links": links,
        "load": {**LOAD, **load},
    }
    print(write("swap_or_recompute", results))


if __name__ == "__main__":
    main()
