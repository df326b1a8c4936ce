"""What prefix caching costs a step of the engine core when nothing is ever found.

A runner that computes nothing, random prompts; the same requests without a cache and with each kind
of it, in turns, so that all see the same machine. The pool is soon full of what ended, so that
every block that is taken was evicted. Prompts and answers have the mean lengths of ShareGPT's
conversations (Kwon et al., SOSP 2023, figure 11); caching costs something a request and nothing a
step, so that it weighs more where answers are short. Prints microseconds of processor time per
scheduled sequence and step, the medians of the rounds and the ratios.

Run it with `python bench/prefix_cache_cost.py [--sequences N] [--output-tokens N] [--rounds N]`.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from pathlib import Path
from random import Random
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cupaged.config import PREFIX_CACHES, EngineConfig
from cupaged.engine.batch import StepPlan, build_batch
from cupaged.engine.core import EngineCore
from cupaged.engine.runner import NullRunner
from cupaged.request import CoreRequest
from cupaged.sampling_params import SamplingParams

VOCAB_SIZE, BLOCK_SIZE = 50_000, 16
PROMPT_TOKENS = (82, 240)


class BatchingRunner(NullRunner):
    """Builds the batch, as every runner does, and computes nothing."""

    def submit(self, plan: StepPlan) -> int:
        """Lay the step out."""
        build_batch(plan, BLOCK_SIZE)
        return super().submit(plan)


def run(num_sequences: int, output_tokens: int, seed: int, cache: str) -> tuple[float, int]:
    """Seconds of all steps, and how many sequences they scheduled."""
    config = EngineConfig(
        vocab_size=VOCAB_SIZE, num_blocks=num_sequences * 40, block_size=BLOCK_SIZE,
        max_model_len=1024, max_num_seqs=num_sequences, max_num_batched_tokens=8192,
        enable_prefix_caching=cache != "off",
        prefix_cache=PREFIX_CACHES[0] if cache == "off" else cache,
    )  # fmt: skip
    core = EngineCore(config, BatchingRunner())
    random = Random(seed)
    params = SamplingParams(max_tokens=output_tokens, ignore_eos=True)
    for i in range(num_sequences * 2):  # the second half comes as the first one leaves
        prompt = tuple(random.choices(range(VOCAB_SIZE), k=random.randint(*PROMPT_TOKENS)))
        core.add_request(CoreRequest(str(i), prompt, params, seed=i))
    scheduled = 0
    gc.collect()
    start = time.process_time()
    while core.has_unfinished_requests:
        scheduled += len(core.step())
    seconds = time.process_time() - start
    assert core.stats().prefix_cache_hits_total == 0
    return seconds, scheduled


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=338)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    cost: dict[str, list[float]] = {name: [] for name in ("off", *PREFIX_CACHES)}
    for i in range(arguments.rounds):
        for name in sorted(cost, reverse=i % 2 == 1):
            seconds, scheduled = run(arguments.sequences, arguments.output_tokens, i, name)
            cost[name].append(seconds / scheduled * 1e6)
    print("us a sequence and step:", *(f"{n} {median(c):.3f}" for n, c in cost.items()))
    for name in PREFIX_CACHES:
        ratios = [on / off for on, off in zip(cost[name], cost["off"], strict=True)]
        extra = median([on - off for on, off in zip(cost[name], cost["off"], strict=True)])
        print(
            f"{name} / off: median {median(ratios):.4f}, best {min(ratios):.4f}, "
            f"worst {max(ratios):.4f}; {extra:+.4f} us"
        )


if __name__ == "__main__":
    main()
