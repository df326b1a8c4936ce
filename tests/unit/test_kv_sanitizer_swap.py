"""The KV sanitizer and blocks that leave for the host: content is followed there and back."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cupaged.engine.batch import StepPlan
from cupaged.engine.core import EngineCore
from cupaged.errors import KVSanitizerError
from tests.unit.test_kv_sanitizer import what
from tests.unit.test_swapping import two_that_grow

OUT, BACK = 2, 6  # the steps in which "b" leaves with blocks 2 and 3, and comes back


def misuse_at(step: int, damage: Callable[[StepPlan], None]) -> KVSanitizerError:
    """Damage the plan of one step, and go on until somebody complains."""
    core = two_that_grow()
    schedule = core._schedule

    def schedule_badly() -> StepPlan:
        plan = schedule()
        if plan.step_id == step:
            damage(plan)
        return plan

    core._schedule = schedule_badly
    with pytest.raises(KVSanitizerError) as caught:
        run(core)
    return caught.value


def run(core: EngineCore) -> None:
    for _ in range(20):
        core.step()


def test_what_it_runs_on() -> None:
    plans: dict[int, StepPlan] = {}
    core = two_that_grow()
    schedule = core._schedule

    def keep() -> StepPlan:
        plan = schedule()
        return plans.setdefault(plan.step_id, plan)

    core._schedule = keep
    run(core)
    assert plans[OUT].swap_out == [(2, 0), (3, 1)]
    assert [host for host, _ in plans[BACK].swap_in] == [0, 1]


def test_a_block_that_comes_back_from_where_nothing_went() -> None:
    def damage(plan: StepPlan) -> None:
        plan.swap_in[0] = (5, plan.swap_in[0][1])

    error = misuse_at(BACK, damage)
    assert what(error).startswith("step 6: a copy writes slot 0 of block ")
    assert what(error).endswith(
        "nothing was swapped out to block 5 of the host, where it comes from"
    )


def test_a_block_that_never_left() -> None:
    error = misuse_at(OUT, lambda plan: plan.swap_out.clear())
    assert what(error).endswith(
        "nothing was swapped out to block 0 of the host, where it comes from"
    )


def test_blocks_that_come_back_in_each_others_place() -> None:
    def damage(plan: StepPlan) -> None:
        (first, one), (second, other) = plan.swap_in
        plan.swap_in[:] = [(second, one), (first, other)]

    error = misuse_at(BACK, damage)
    assert what(error).startswith("step 6: request 'b' sample 0 reads slot 0 of block ")
    assert what(error).endswith("other tokens than the sequence's own lie there (position 0)")
    assert error.history[-1] == "step 6: swapped in from block 1 of the host"


def test_a_block_that_comes_back_where_nobody_holds_it() -> None:
    unheld: list[int] = []

    def damage(plan: StepPlan) -> None:
        unheld.extend({0, 1, 2, 3} - set(plan.block_tables[0].ravel().tolist()))
        plan.swap_in[1] = (1, unheld[0])

    error = misuse_at(BACK, damage)
    assert what(error) == (
        f"step 6: a copy writes slot 0 of block {unheld[0]}: no sequence holds the block"
    )


def test_the_history_tells_of_both_ways() -> None:
    core = two_that_grow()
    for _ in range(OUT + 1):
        core.step()
    core.block_manager.ref_counts[3] = 0
    with pytest.raises(KVSanitizerError) as caught:
        core.step()
    assert caught.value.history == (
        "step 0: handed out to request 'b' sample 0",
        "steps 0-1: slots 0-3 written by request 'b' sample 0",
        "step 2: swapped out to block 1 of the host",
        "step 2: handed out to request 'a' sample 0",
        "step 2: slot 0 written by request 'a' sample 0",
    )
