"""The paper's numbers about memory: how they are counted, by hand, and that they are reached."""

from __future__ import annotations

import json
from functools import lru_cache
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any

import pytest

from bench import memory, prefix_hit_rate, report
from bench.memory_plots import draw_hit_rates, draw_utilisation
from bench.prefix_hit_rate import best_hit_rate, best_hit_rate_in_order, hit_rate
from bench.simulation import VOCAB_SIZE, simulate
from bench.traces import BlockedRequest, TimedRequest, prefix_blocks
from bench.usage import MeanUsage, StepUsage, mean_usage
from cupaged.config import EngineConfig
from cupaged.engine.simulated_runner import StepCost

RESULTS: dict[str, Any] = json.loads((report.RESULTS / "memory.json").read_text())


def test_means_are_over_a_window() -> None:
    steps = [
        StepUsage(0.0, 9, 99, 99, 99, 9, 1),
        StepUsage(1.0, 1, 10, 4, 6, 4, 2),
        StepUsage(2.0, 3, 30, 8, 2, 6, 6),
        StepUsage(3.0, 9, 99, 99, 99, 9, 1),
    ]
    saving = 100 * (1 - 1 / 1.5)
    assert mean_usage(steps, 100, 1.0, 2.0) == MeanUsage(20, 6, 4, 70, 2, 3, saving)


def small_config() -> EngineConfig:
    return EngineConfig(
        vocab_size=VOCAB_SIZE, num_blocks=8, block_size=4, max_model_len=32, max_num_seqs=4
    )


def test_what_a_sequence_takes_of_the_pool() -> None:
    load = [TimedRequest(0.0, 5, 3), TimedRequest(8.5, 5, 3)]
    steps = simulate(load, small_config(), StepCost(1.0), until_s=9.0)
    assert steps == [
        StepUsage(0.0, 1, 5, 0, 3, 2, 2),
        StepUsage(1.0, 1, 6, 0, 2, 2, 2),
        StepUsage(2.0, 1, 7, 0, 1, 2, 2),
        StepUsage(8.5, 1, 5, 0, 3, 2, 2),
    ]


def test_samples_share_the_full_blocks_of_their_prompt() -> None:
    steps = simulate(
        [TimedRequest(0.0, 5, 3)], small_config(), StepCost(1.0), until_s=9.0, num_samples=2
    )
    # The last block is shared until somebody writes to it.
    assert [(step.logical_blocks, step.physical_blocks) for step in steps] == [
        (4, 2),
        (4, 3),
        (4, 3),
    ]


def trace(*prompts: tuple[int, ...]) -> list[BlockedRequest]:
    return [BlockedRequest(512 * len(ids), 1, ids) for ids in prompts]


def test_hits_are_counted_in_the_prompts() -> None:
    """Each prompt but the last fills a step, so that the next one finds what it stored."""
    first = tuple(range(16))
    requests = trace(first, (*range(10), *range(100, 106)), first)
    # The second finds 10, the third 15: its last block is computed again.
    for strategy in prefix_hit_rate.STRATEGIES:
        assert hit_rate(requests, 200, strategy) == pytest.approx(100 * 25 / 48)
    assert best_hit_rate(requests) == pytest.approx(100 * 25 / 48)
    assert best_hit_rate_in_order(requests, 200) == pytest.approx(100 * 25 / 48)


def test_answers_take_blocks() -> None:
    """In a pool of 33, the second request leaves 16 blocks of the first one, or 13."""
    first, second = tuple(range(16)), tuple(range(100, 116))
    for output_tokens, hits in ((1, 15), (4 * 512, 13)):
        requests = [
            BlockedRequest(16 * 512, 1, first),
            BlockedRequest(16 * 512, output_tokens, second),
            BlockedRequest(16 * 512, 1, first),
        ]
        assert hit_rate(requests, 33, "hash") == pytest.approx(100 * hits / 48)


@pytest.mark.parametrize("seed", range(20))
def test_the_bound_is_the_best_of_all_choices(seed: int) -> None:
    random = Random(seed)
    requests = trace(*(tuple(random.sample(range(5), random.randint(1, 4))) for _ in range(5)))
    references = [(b, b == r.block_ids[-1]) for r in requests for b in r.block_ids]
    num_blocks = random.randint(1, 3)

    @lru_cache(None)
    def most_hits(time: int, kept: frozenset[int]) -> int:
        if time == len(references):
            return 0
        block, is_last = references[time]
        now = kept | {block}
        choices = [now] if len(now) <= num_blocks else map(frozenset, combinations(now, num_blocks))
        hit = block in kept and not is_last
        return hit + max(most_hits(time + 1, choice) for choice in choices)

    expected = 100 * most_hits(0, frozenset()) / len(references)
    assert best_hit_rate_in_order(requests, num_blocks) == pytest.approx(expected)


def test_the_pool_is_the_papers() -> None:
    """Table 1: 12 GiB hold 15.7K slots of OPT-13B, 800 KiB each."""
    assert memory.KV_BYTES_PER_TOKEN == 819_200
    assert (memory.NUM_SLOTS, memory.NUM_BLOCKS) == (15_728, 983)


def check_utilisation(figures: dict[str, float]) -> None:
    assert figures["ours"] >= 96
    for system, percent in (("orca_max", 20.4), ("orca_pow2", 26.8), ("orca_oracle", 38.2)):
        assert figures[system] == pytest.approx(percent, abs=0.5)


def check_parallel_saving(figures: dict[str, dict[str, float]]) -> None:
    for num_samples, percent in (("2", 6.1), ("4", 8.5), ("6", 9.8)):
        assert figures["alpaca"][num_samples] == pytest.approx(percent, abs=1)
        assert 16 <= figures["sharegpt"][num_samples] <= 30


@pytest.mark.slow
def test_utilisation_is_the_papers() -> None:
    means = memory.utilisation()
    figures = {system: mean.token for system, mean in means.items()}
    check_utilisation(figures)
    assert means["orca_max"].other == pytest.approx(8.9, abs=0.1)
    assert means["orca_max"].num_sequences == 7
    assert figures == pytest.approx(RESULTS["utilisation"], abs=0.5)


@pytest.mark.slow
def test_hits_in_an_unbounded_pool_are_the_traces() -> None:
    assert hit_rate(prefix_blocks(), memory.UNBOUNDED, "hash") == pytest.approx(36.6, abs=0.5)


def test_the_results_on_file_reach_what_they_should() -> None:
    check_utilisation(RESULTS["utilisation"])
    check_parallel_saving(RESULTS["parallel_saving"])
    assert RESULTS["mooncake_hit_rate"] == pytest.approx(36.6, abs=0.5)
    found = RESULTS["hit_rate"]
    for strategy in prefix_hit_rate.STRATEGIES:
        assert found[strategy] == sorted(found[strategy])
        assert max(found[strategy]) <= found["best"]
        if "longest" not in strategy:
            assert all(a <= b for a, b in zip(found[strategy], found["best_in_order"], strict=True))


def test_pictures_show_the_results(tmp_path: Path) -> None:
    draw_utilisation(tmp_path / "bars.svg", RESULTS)
    draw_hit_rates(tmp_path / "curves.svg", RESULTS)
    bars, curves = (tmp_path / "bars.svg").read_text(), (tmp_path / "curves.svg").read_text()
    assert f"{RESULTS['utilisation']['ours']:.1f}" in bars
    assert bars == (report.RESULTS / "memory_utilisation.svg").read_text()
    assert curves == (report.RESULTS / "memory_hit_rate.svg").read_text()


def test_the_readme_quotes_the_results() -> None:
    text = (Path(__file__).resolve().parents[2] / "README.md").read_text()
    section = text.split("## How memory is used")[1].split("\n## ")[0]
    utilisation, batch = RESULTS["utilisation"], RESULTS["mean_batch"]["sharegpt"]
    found = RESULTS["hit_rate"]
    at = found["num_blocks"].index(5000)
    in_order, longest_first = found["radix"][at], found["radix longest-prefix"][at]
    orcas = ("orca_max", "orca_pow2", "orca_oracle")
    for pattern, figures in (
        ("{:.1f} %; with contiguous memory {:.1f}, {:.1f} and {:.1f} %", utilisation),
        ("{:.1f}; with contiguous memory {:.1f}, {:.1f} and {:.1f} |", batch),
    ):
        assert pattern.format(figures["ours"], *(figures[name] for name in orcas)) in section
    saving = RESULTS["parallel_saving"]
    for name, shown in (("Alpaca", saving["alpaca"]), ("ShareGPT", saving["sharegpt"])):
        assert "{} {:.1f}, {:.1f} and {:.1f} %".format(name, *shown.values()) in section
    assert f"{RESULTS['mooncake_hit_rate']:.1f} %, all that can be" in section
    assert f"5,000 blocks of 512 tokens {in_order:.1f} %, and {longest_first:.1f} % with" in section


@pytest.mark.slow
def test_savings_and_batches_are_the_papers() -> None:
    check_parallel_saving(memory.parallel_saving())
    batches = memory.batches()
    for name, systems in (
        ("sharegpt", {"orca_max": 7.0, "orca_pow2": 9.81, "orca_oracle": 13.62}),
        ("alpaca", {"orca_max": 7.0, "orca_pow2": 43.24, "orca_oracle": 72.75}),
    ):
        for system, number in systems.items():
            assert batches[name][system].num_sequences == pytest.approx(number, rel=0.05)
