"""Which way of giving way is cheaper, and what the modes are called."""

from __future__ import annotations

import pytest

from cupaged.engine.preemption import (
    Cheaper,
    PreemptionCosts,
    Recompute,
    Swap,
    check_preemption_mode,
    make_strategy,
)
from cupaged.errors import ConfigError
from cupaged.request import CoreRequest, Request, Sequence
from cupaged.sampling_params import SamplingParams
from tests.unit.small_core import small_config


def group(*computed: int) -> list[Sequence]:
    core = CoreRequest("a", (1, 2, 3), SamplingParams())
    request = Request(core, arrival=0, max_tokens=5)
    made = [request.sequences[0], *(request.sequences[0].fork(i) for i in range(1, len(computed)))]
    for sequence, num_tokens in zip(made, computed, strict=True):
        sequence.num_computed_tokens = num_tokens
    return made


def test_the_two_sides_of_the_crossover() -> None:
    """10 ms a swap and 2 ms a block, or 1 ms a token; 16 tokens are a block: at 12 tokens a swap
    costs as much."""
    cheaper = Cheaper(PreemptionCosts(0.010, 0.002, 0.001))
    assert not cheaper.swaps(group(11), 1)
    assert not cheaper.swaps(group(12), 1)
    assert cheaper.swaps(group(13), 1)
    assert cheaper.swaps(group(32), 2)


def test_what_samples_share_is_copied_once_and_computed_once_each() -> None:
    """4 samples of 8 tokens in 1 shared block: 12 ms against 32 ms; one of them alone: 8 ms."""
    cheaper = Cheaper(PreemptionCosts(0.010, 0.002, 0.001))
    assert cheaper.swaps(group(8, 8, 8, 8), 1)
    assert not cheaper.swaps(group(8), 1)


def test_the_other_modes_do_not_compare() -> None:
    assert Swap().swaps(group(1), 1000)
    assert not Recompute().swaps(group(1000), 1)


@pytest.mark.parametrize(
    ("mode", "has_blocks"),
    [("auto", False), ("auto", True), ("swap", True), ("recompute", False), ("recompute", True)],
)
def test_modes(mode: str, has_blocks: bool) -> None:
    check_preemption_mode(mode, has_swap_space=has_blocks)


def test_the_strategy_of_an_engine() -> None:
    costs = PreemptionCosts(1, 2, 3)
    without, some = small_config(), small_config(num_host_blocks=1)
    assert isinstance(make_strategy(without, None), Recompute)
    assert isinstance(make_strategy(without, costs), Recompute)
    assert isinstance(make_strategy(some, None), Swap)
    strategy = make_strategy(some, costs)
    assert isinstance(strategy, Cheaper)
    assert strategy.costs is costs


@pytest.mark.parametrize(("mode", "has_blocks"), [("swop", True), (None, True), ("swap", False)])
def test_what_is_no_mode(mode: object, has_blocks: bool) -> None:
    with pytest.raises(ConfigError, match="preemption_mode"):
        check_preemption_mode(mode, has_swap_space=has_blocks)
