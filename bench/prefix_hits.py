"""What cached prefixes save: time to the first token, and blocks.

The default model on `cpu`. Prompts of 512 shared tokens and 16 of their own, one at a time: the
first finds nothing, the second finds the 512. Each pair is a sample, with a fresh prefix, in turns
with and without a cache, so that both see the same machine. Then 16 such requests run together, and
the most blocks that they hold are counted. Writes bench/results/prefix_hits.json.

Run it with `python bench/prefix_hits.py [--rounds N]`.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import report
from cupaged import LLM, SamplingParams
from cupaged.config import PREFIX_CACHES

SHARED_TOKENS, OWN_TOKENS = 512, 16
TOGETHER, OUTPUT_TOKENS = 16, 16
KINDS = ("off", *PREFIX_CACHES)


def ids(seed: int, num_tokens: int) -> list[int]:
    """Random ids, none of them special."""
    drawn: list[int] = np.random.default_rng(seed).integers(1000, 49000, num_tokens).tolist()
    return drawn


def params(max_tokens: int) -> SamplingParams:
    """Greedy, to exactly that many tokens."""
    return SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens)


def build(kind: str) -> LLM:
    """An engine with that kind of cache."""
    return LLM(
        device="cpu",
        max_model_len=1024,
        num_gpu_blocks_override=1024,
        enable_prefix_caching=kind != "off",
        prefix_cache=PREFIX_CACHES[0] if kind == "off" else kind,
    )


def first_token_ms(llm: LLM, prompt: list[int]) -> tuple[float, int]:
    """Milliseconds from asking to the first token, and the tokens that were found."""
    start = time.perf_counter()
    (output,) = llm.generate({"prompt_token_ids": prompt}, params(1), use_tqdm=False)
    return (time.perf_counter() - start) * 1e3, output.num_cached_tokens


def times(engines: dict[str, LLM], rounds: int) -> dict[str, Any]:
    """First tokens of a cold and of a warm prompt, for each kind of cache."""
    samples: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for i in range(rounds):
        shared = ids(i, SHARED_TOKENS)
        prompts = [shared + ids(1000 + 2 * i + k, OWN_TOKENS) for k in range(2)]
        for kind in KINDS if i % 2 else KINDS[::-1]:
            (cold, nothing), (warm, found) = (first_token_ms(engines[kind], p) for p in prompts)
            assert (nothing, found) == (0, 0 if kind == "off" else SHARED_TOKENS)
            samples[kind].append((cold, warm))
    return {
        kind: {
            "cold_ms": round(median(cold for cold, _ in pairs), 2),
            "warm_ms": round(median(warm for _, warm in pairs), 2),
            "cold_to_warm": round(median(cold / warm for cold, warm in pairs), 2),
        }
        for kind, pairs in samples.items()
    }


def most_blocks(llm: LLM) -> int:
    """Blocks that requests with one beginning hold at most, all of them running."""
    shared = ids(7, SHARED_TOKENS)
    prompts = [{"prompt_token_ids": shared + ids(2000 + i, OWN_TOKENS)} for i in range(TOGETHER)]
    llm.reset_prefix_cache()
    most = 0
    for _ in llm.stream(prompts, params(OUTPUT_TOKENS)):
        stats = llm.get_stats()
        if stats.num_running == TOGETHER:
            most = max(most, stats.num_used_blocks)
    return most


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    engines = {kind: build(kind) for kind in KINDS}
    for llm in engines.values():
        llm.generate({"prompt_token_ids": ids(3000, 64)}, params(2), use_tqdm=False)
    results = {
        "model": "SmolLM2-135M-Instruct, the installed GGUF",
        "shared_tokens": SHARED_TOKENS,
        "own_tokens": OWN_TOKENS,
        "rounds": rounds,
        "time_to_first_token": times(engines, rounds),
        "blocks_of_16_requests": {kind: most_blocks(llm) for kind, llm in engines.items()},
    }
    for kind in KINDS:
        first = results["time_to_first_token"][kind]
        blocks = results["blocks_of_16_requests"][kind]
        print(
            f"{kind}: first token {first['cold_ms']} ms, then {first['warm_ms']} ms "
            f"({first['cold_to_warm']} times); 16 requests hold {blocks} blocks"
        )
    print(f"wrote {report.write('prefix_hits', results)}")


if __name__ == "__main__":
    main()
