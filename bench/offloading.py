"""What the host's tier of the prefix cache saves on a hit, and what it costs where there is none.

The default model on `cpu`, with a pool of the device that holds one prompt of 512 shared and 16 own
tokens. Such a prompt is asked for cold, again at once (a hit on the device), and again after
another one has evicted it: computed without the tier, loaded with it. Then prompts of 128 tokens
that never come again run with and without the tier, in turns: all that they leave is saved for
nothing. Writes bench/results/offloading.json.

Run it with `python bench/offloading.py [--rounds N]`.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import report
from bench.prefix_hits import OWN_TOKENS, SHARED_TOKENS, first_token_ms, ids, params
from cupaged import LLM

NUM_BLOCKS, SWAP_SPACE = 33, 0.25
UNIQUE_PROMPTS, UNIQUE_TOKENS, UNIQUE_OUTPUTS = 12, 128, 16


def build(swap_space: float) -> LLM:
    """An engine with or without a tier on the host."""
    return LLM(
        device="cpu",
        max_model_len=SHARED_TOKENS + OWN_TOKENS + 1,
        num_gpu_blocks_override=NUM_BLOCKS,
        swap_space=swap_space,
        preemption_mode="swap" if swap_space else "auto",
    )


def hit_times(engines: dict[str, LLM], rounds: int) -> dict[str, Any]:
    """Milliseconds to the first token: cold, found on the device, and asked for when evicted."""
    samples: dict[str, list[tuple[float, ...]]] = {name: [] for name in engines}
    for i in range(rounds):
        shared = ids(i, SHARED_TOKENS)
        cold, warm, again = (shared + ids(1000 + 3 * i + k, OWN_TOKENS) for k in range(3))
        other = ids(5000 + i, SHARED_TOKENS + OWN_TOKENS)
        for name, llm in engines.items():
            told = [first_token_ms(llm, prompt) for prompt in (cold, warm, other, again)]
            found = [num_found for _, num_found in told]
            expected = SHARED_TOKENS if name == "on" else 0
            assert found == [0, SHARED_TOKENS, 0, expected], f"{name}: {found}"
            samples[name].append((told[0][0], told[1][0], told[3][0]))
    return {
        name: {
            key: round(median(column), 2)
            for key, column in zip(
                ("cold_ms", "on_device_ms", "evicted_ms"), zip(*rows, strict=True), strict=True
            )
        }
        for name, rows in samples.items()
    }


def run_unique(llm: LLM, seed: int) -> float:
    """Seconds of the processor for prompts that nobody asks for again."""
    first = 10_000 + 100 * seed
    prompts = [{"prompt_token_ids": ids(first + i, UNIQUE_TOKENS)} for i in range(UNIQUE_PROMPTS)]
    start = time.process_time()
    llm.generate(prompts, params(UNIQUE_OUTPUTS), use_tqdm=False)
    return time.process_time() - start


def cost(engines: dict[str, LLM], rounds: int) -> dict[str, Any]:
    """Time with the tier over time without, where nothing is ever found."""
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    before = engines["on"].get_stats().blocks_offloaded_total
    for i in range(rounds):
        for name in sorted(engines, reverse=bool(i % 2)):
            seconds[name].append(run_unique(engines[name], i))
    saved = engines["on"].get_stats().blocks_offloaded_total - before
    ratios = [on / off for on, off in zip(seconds["on"], seconds["off"], strict=True)]
    return {
        "cpu_s_off": round(median(seconds["off"]), 3),
        "on_to_off": round(median(ratios), 4),
        "ratios": [round(ratio, 4) for ratio in ratios],
        "blocks_saved_a_run": round(saved / rounds, 1),
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    engines = {"off": build(0), "on": build(SWAP_SPACE)}
    for llm in engines.values():
        llm.generate({"prompt_token_ids": ids(5, 64)}, params(2), use_tqdm=False)
    results = {
        "model": "SmolLM2-135M-Instruct, the installed GGUF",
        "shared_tokens": SHARED_TOKENS,
        "own_tokens": OWN_TOKENS,
        "num_blocks": NUM_BLOCKS,
        "num_host_blocks": engines["on"].get_stats().num_host_blocks,
        "rounds": rounds,
        "time_to_first_token": hit_times(engines, rounds),
        "without_hits": cost(engines, rounds),
    }
    for name, times in results["time_to_first_token"].items():
        print(
            f"tier {name}: first token {times['cold_ms']} ms, {times['on_device_ms']} ms when the "
            f"device has its prefix, {times['evicted_ms']} ms when that was evicted"
        )
    without = results["without_hits"]
    print(
        f"without hits: {without['on_to_off']} of the time, "
        f"{without['blocks_saved_a_run']} blocks saved a run of {without['cpu_s_off']} s"
    )
    print(f"wrote {report.write('offloading', results)}")


if __name__ == "__main__":
    main()
