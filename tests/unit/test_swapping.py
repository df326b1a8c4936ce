"""Groups that are swapped out and come back: small situations worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cupaged.engine.batch import StepPlan
from cupaged.engine.core import EngineCore
from cupaged.engine.preemption import Recompute
from cupaged.engine.scheduling_policy import PriorityWithBoundedWait
from cupaged.outputs import CoreOutput
from cupaged.request import SequenceStatus
from tests.unit.small_core import drain, endings, recorded, request, small_core, tokens_of


def names(sequences: list[Any]) -> list[tuple[str, int]]:
    return [(s.request.core.request_id, s.index) for s in sequences]


def pool_of(core: EngineCore) -> tuple[int, int]:
    """Used and free blocks of the host."""
    pool = core.swapping.host_pool
    return pool.num_used_blocks, pool.num_free_blocks


def two_that_grow(**limits: Any) -> EngineCore:
    """4 blocks of 4 tokens: two sequences of 7 tokens fill them and both grow past a block edge."""
    core = small_core(
        num_blocks=4,
        max_num_seqs=2,
        enable_prefix_caching=False,
        **{"num_host_blocks": 8, **limits},
    )
    core.add_request(request("a", 7, max_tokens=6))
    core.add_request(request("b", 7, max_tokens=6, seed=1))
    return core


def alone(*asked: Any) -> dict[str, list[list[int]]]:
    """The tokens of requests in a core with room for all."""
    core = small_core(num_blocks=100)
    for one in asked:
        core.add_request(one)
    outputs = drain(core)
    return {
        one.request_id: [tokens_of(outputs, one.request_id, i) for i in range(one.params.n)]
        for one in asked
    }


def test_the_latest_arrival_leaves_with_its_tokens_and_computes_none_again() -> None:
    core = two_that_grow()
    core.add_request(request("c", 3, max_tokens=1))
    outputs = core.step() + core.step() + core.step()  # then position 8 needs a third block each
    plan = recorded(core).plans[2]
    assert (names(plan.preempted), names(plan.swapped_out)) == ([("b", 0)], [("b", 0)])
    assert plan.swap_out == [(2, 0), (3, 1)]
    assert plan.block_tables[0].tolist() == [[0, 1, 3]]  # what has left is used at once
    assert plan.swapped_out[0].status is SequenceStatus.SWAPPED
    assert plan.swapped_out[0].num_computed_tokens == 8
    stats = core.stats()
    assert (stats.num_running, stats.num_preempted, stats.num_swapped) == (1, 1, 1)
    assert (stats.num_used_host_blocks, stats.num_host_blocks) == (2, 8)
    outputs += drain(core)
    assert recorded(core).steps[6] == [("b", 0, 8, 1, 1), ("c", 0, 0, 3, 1)]
    plan = recorded(core).plans[6]
    assert names(plan.swapped_in) == [("b", 0)]
    assert [host for host, _ in plan.swap_in] == [0, 1]
    assert names(plan.admitted) == [("c", 0)]
    stats = core.stats()
    assert (stats.num_preemptions_total, stats.num_swap_preemptions_total) == (1, 1)
    assert (stats.blocks_swapped_out_total, stats.blocks_swapped_in_total) == (2, 2)
    assert pool_of(core) == (0, 8)
    assert tokens_of(outputs, "b") == alone(request("b", 7, max_tokens=6, seed=1))["b"][0]
    assert {o.num_preemptions for o in outputs if o.request_id == "b"} == {0, 1}


def test_a_group_that_an_empty_plan_swaps_out_is_computed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The room that it makes does not help whom it is made for, so nothing runs and is copied."""
    core = two_that_grow()
    outputs = core.step() + core.step()
    with monkeypatch.context() as patched:
        patched.setattr(core.scheduler, "_frees_a_copied_block", lambda plan: True)
        plan = core.scheduler.schedule()
    assert (plan.sequences, plan.swap_out, plan.swapped_out) == ([], [], [])
    assert names(plan.preempted) == [("b", 0)]
    assert plan.preempted[0].status is SequenceStatus.PREEMPTED
    assert plan.preempted[0].num_computed_tokens == 0
    assert pool_of(core) == (0, 8)
    assert core.stats().blocks_swapped_out_total == 0
    core.audit()
    outputs += drain(core)
    assert tokens_of(outputs, "b") == alone(request("b", 7, max_tokens=6, seed=1))["b"][0]


@pytest.mark.parametrize("num_host_blocks", [0, 1])
def test_without_room_on_the_host_it_is_computed_again(num_host_blocks: int) -> None:
    core = two_that_grow(num_host_blocks=num_host_blocks)
    outputs = drain(core)
    assert ("b", 0, 0, 9, 1) in recorded(core).steps[6]
    assert not any(p.swap_out for p in recorded(core).plans)
    stats = core.stats()
    assert (stats.num_preemptions_total, stats.num_swap_preemptions_total) == (1, 0)
    assert endings(outputs) == {("a", 0): ("length", None), ("b", 0): ("length", None)}


def test_the_strategy_decides() -> None:
    core = two_that_grow()
    core.swapping.strategy = Recompute()
    drain(core)
    assert core.stats().num_swap_preemptions_total == 0


def samples_and_one(**limits: Any) -> EngineCore:
    """A request that grows, then two samples of one prompt; blocks of 4, 7 in all."""
    core = small_core(num_blocks=7, enable_prefix_caching=False, num_host_blocks=8, **limits)
    core.add_request(request("a", 6, max_tokens=12))
    core.add_request(request("two", 6, n=2, max_tokens=8, seed=2))
    return core


def test_samples_leave_and_come_back_together_and_still_share() -> None:
    """6 tokens of a prompt in blocks of 4: the samples share the first block, and no other."""
    core = samples_and_one()
    outputs: list[CoreOutput] = []
    while not (recorded(core).plans and recorded(core).plans[-1].swapped_out):
        outputs += core.step()
    out = recorded(core).plans[-1]
    assert names(out.swapped_out) == [("two", 0), ("two", 1)]
    held = [core.swapping.host_pool.blocks_of(s.order) for s in out.swapped_out]
    assert held[0][0] == held[1][0]
    assert len(out.swap_out) == len(set(held[0] + held[1])) == len(held[0]) + len(held[1]) - 1
    outputs += drain(core)
    back = next(p for p in recorded(core).plans if p.swapped_in)
    assert names(back.swapped_in) == [("two", 0), ("two", 1)]
    assert len(back.swap_in) == len(out.swap_out)
    rows = back.block_tables[0].tolist()
    assert rows[-2][0] == rows[-1][0]
    expected = alone(request("two", 6, n=2, max_tokens=8, seed=2))["two"]
    assert [tokens_of(outputs, "two", i) for i in range(2)] == expected
    assert pool_of(core) == (0, 8)


def test_a_group_that_is_partly_in_the_step_waits_and_leaves_as_a_whole() -> None:
    """Room for one sample's next block, not for the other's: the other waits for a step."""
    core = samples_and_one()
    drain(core)
    for plan in recorded(core).plans:
        assert names(plan.swapped_out) in ([], [("two", 0), ("two", 1)])
    steps = recorded(core).ids()
    assert any(step.count("two") == 1 for step in steps)


def test_one_sample_of_a_swapped_group_is_aborted() -> None:
    core = samples_and_one()
    while not core.stats().num_swapped:
        core.step()
    used = pool_of(core)[0]
    assert core.abort("two", 1)
    core.audit()
    assert core.stats().num_swapped == 1
    assert 0 < pool_of(core)[0] < used  # what it shared stays
    outputs = drain(core)
    assert endings(outputs)["two", 0] == ("length", None)
    assert pool_of(core) == (0, 8)


def test_a_swapped_request_is_aborted() -> None:
    core = samples_and_one()
    while not core.stats().num_swapped:
        core.step()
    assert core.abort("two")
    core.audit()
    assert (core.stats().num_swapped, pool_of(core)) == (0, (0, 8))
    assert endings(drain(core)) == {("a", 0): ("length", None)}


def test_aborted_while_the_step_that_swaps_it_out_is_in_flight() -> None:
    core = samples_and_one(max_steps_in_flight=2)
    while not core.stats().num_swapped:
        plan = core.scheduler.schedule()
        if not plan.scheduled:
            core.step()
            continue
        core._in_flight.append((plan, core._runner.submit(plan)))
        if not plan.swapped_out:
            core.step()
    used, free = pool_of(core)
    assert core.abort("two")
    core.audit()
    assert pool_of(core) == (0, free)  # used, but by nobody: the step still writes to them
    drain(core)
    assert pool_of(core) == (0, used + free)


def test_two_requests_with_a_cached_prefix_in_common_leave_in_one_step() -> None:
    """7 blocks: two grow past a block edge in one step; the two behind them share a block of 3,
    which goes out twice. Each keeps a copy of its own."""
    core = small_core(num_blocks=7, num_host_blocks=8)
    core.add_request(request("first", 5, max_tokens=1))  # it leaves the prefix
    drain(core)
    asked = [
        replace(request("a", 7, max_tokens=5), cache_salt="a"),
        replace(request("d", 7, max_tokens=5), cache_salt="d"),
        *(request(name, 5, max_tokens=6, seed=ord(name)) for name in "bc"),
    ]
    for one in asked:
        core.add_request(one)
    outputs = drain(core)
    (out,) = (plan for plan in recorded(core).plans if plan.swapped_out)
    assert names(out.swapped_out) == [("c", 0), ("b", 0)]
    blocks = [block for block, _ in out.swap_out[:4]]  # behind them, what the cache gave up
    assert len(set(blocks)) == 3
    assert {n: tokens_of(outputs, n) for n in "bc"} == {n: alone(*asked)[n][0] for n in "bc"}
    assert pool_of(core) == (0, 8)


@pytest.mark.parametrize(("num_blocks", "num_preemptions"), [(4, 0), (3, 1)])
def test_a_group_too_large_for_the_pool_is_taken_apart(
    num_blocks: int, num_preemptions: int
) -> None:
    """Two samples of up to 3 blocks share one. With 4 the second waits for the end of the first;
    with 3 it gives way to it, and is computed again."""
    core = small_core(num_blocks=num_blocks, enable_prefix_caching=False, num_host_blocks=8)
    core.add_request(request("two", 4, n=2, max_tokens=9))
    outputs = drain(core)
    stats = core.stats()
    assert (stats.num_preemptions_total, stats.num_swap_preemptions_total) == (num_preemptions, 0)
    expected = alone(request("two", 4, n=2, max_tokens=9))["two"]
    assert [tokens_of(outputs, "two", i) for i in range(2)] == expected


def test_whoever_comes_after_a_group_leaves_it_the_blocks_to_copy_what_it_shares() -> None:
    """5 blocks: `two` leaves with its 2 shared ones before it has copied the last, as `one` has 3.
    When it comes back, there are 3 left, which `last` would fill, and one of them is for the copy.
    """
    core = small_core(num_blocks=5, enable_prefix_caching=False, num_host_blocks=8)
    asked = (
        request("one", 11, max_tokens=2),
        request("two", 5, n=2, max_tokens=2, seed=1),
        request("last", 11, max_tokens=1, seed=2),
    )
    for one in asked:
        core.add_request(one)
    outputs = drain(core)
    back = next(plan for plan in recorded(core).plans if plan.swapped_in)
    assert names(back.sequences) == [("two", 0), ("two", 1)]
    assert len(back.copies) == 1
    for name, expected in alone(*asked).items():
        assert [tokens_of(outputs, name, i) for i in range(len(expected))] == expected


def test_who_is_swapped_comes_back_before_new_requests() -> None:
    """One waits since before, of equal priority."""
    core = two_that_grow(policy=PriorityWithBoundedWait())
    while not core.stats().num_swapped:
        core.step()
    core.add_request(request("new", 3, max_tokens=1))
    drain(core)
    ids = recorded(core).ids()
    came_back = next(i for i, p in enumerate(recorded(core).plans) if p.swapped_in)
    assert min(i for i, step in enumerate(ids) if "new" in step) >= came_back


@pytest.mark.parametrize("first", ["low", "high"])
def test_the_least_urgent_leaves_and_is_not_in_the_plan(first: str) -> None:
    """Two blocks, full; the urgent sequence is served first and needs one more."""
    core = small_core(num_blocks=2, policy=PriorityWithBoundedWait(), num_host_blocks=4)
    requests = {
        "low": request("low", 2, priority=2, max_tokens=3),
        "high": request("high", 4, priority=-1, max_tokens=2),
    }
    for name in (first, *(requests.keys() - {first})):
        core.add_request(requests[name])
    core.step()
    core.step()
    plan = recorded(core).plans[1]
    assert [e.sequence.request.core.request_id for e in plan.scheduled] == ["high"]
    assert names(plan.swapped_out) == [("low", 0)]
    assert plan.num_tokens == 1
    drain(core)


class FailingOnce:
    """Fails for the first step of a kind."""

    def __init__(self, core: EngineCore, kind: str) -> None:
        self._inner, self._kind, self.failed = core._runner, kind, False
        core._runner = self

    def submit(self, plan: StepPlan) -> int:
        if getattr(plan, self._kind) and not self.failed:
            self.failed = True
            raise ValueError("planted")
        return self._inner.submit(plan)

    def collect(self, handle: int) -> Any:
        return self._inner.collect(handle)


@pytest.mark.parametrize("kind", ["swap_out", "swap_in"])
@pytest.mark.filterwarnings("ignore")
def test_after_a_failed_step_with_swaps_all_is_computed_again(kind: str) -> None:
    """Three requests, so that none of them is guilty; nobody knows what the copies left behind."""
    asked = [
        request("a", 7, max_tokens=9),
        request("two", 6, n=2, max_tokens=8, seed=2),
        request("c", 7, max_tokens=9, seed=3),
    ]
    core = small_core(num_blocks=8, enable_prefix_caching=False, num_host_blocks=12)
    failing = FailingOnce(core, kind)
    for one in asked:
        core.add_request(one)
    outputs: list[CoreOutput] = []
    for _ in range(1000):
        if not core.has_unfinished_requests:
            break
        try:
            outputs += core.step()
        except Exception as error:
            assert "planted" in str(error)
        core.audit()
    assert failing.failed
    expected = alone(*asked)
    ended = {request_id for request_id, _ in endings(outputs)}
    assert len(ended) >= 2
    for one in asked:
        if one.request_id in ended:
            got = [tokens_of(outputs, one.request_id, i) for i in range(one.params.n)]
            assert got == expected[one.request_id]
    assert pool_of(core) == (0, 12)


def test_nothing_is_shared_with_those_that_were_swapped_at_a_reset() -> None:
    """What was computed before a reset is not found after it, wherever it was meanwhile."""
    core = small_core(num_blocks=4, max_num_seqs=2, num_host_blocks=8)
    core.add_request(request("a", 7, max_tokens=6))
    core.add_request(request("b", 7, max_tokens=7, seed=1))
    while not core.stats().num_swapped:
        core.step()
    core.reset_prefix_cache()
    drain(core)
    assert core.block_manager.prefix_cache.num_evictable_blocks == 0
