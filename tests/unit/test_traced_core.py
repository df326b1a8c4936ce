"""What a traced core tells: every record of a few small runs, worked out by hand."""

from __future__ import annotations

from functools import partial

import pytest

from cupaged.engine.block_manager import BlockManager
from cupaged.engine.core import EngineCore
from cupaged.engine.step_events import (
    FAILED,
    INTERRUPTED,
    AbortEvent,
    AddEvent,
    Ended,
    PoolCounts,
    ResetEvent,
    StepEvents,
    TableReplica,
    TableWatch,
    Taken,
    first_difference,
)
from cupaged.errors import EngineError, PromptError
from tests.unit.small_core import ScriptedRunner, drain, request, small_core
from tests.unit.test_core_failures import Faulty
from tests.unit.traced import Kept, traced_core


def steps_of(kept: Kept) -> list[StepEvents]:
    return [event for event in kept.events if isinstance(event, StepEvents)]


def test_the_records_of_one_request() -> None:
    kept = Kept()
    core = traced_core(kept, lambda config: ScriptedRunner({"a": [[11, 12, 13]]}))
    core.add_request(request("a", 4, max_tokens=3))
    drain(core)
    added, *_ = kept.events
    assert isinstance(added, AddEvent) and added.request == request("a", 4, max_tokens=3)
    first, second, third = steps_of(kept)
    (plan,) = first.plans
    assert (plan.step_id, plan.rows.tolist(), plan.start.tolist()) == (0, [0], [0])
    assert (plan.num_new.tolist(), plan.num_samples.tolist()) == ([4], [1])
    assert plan.admitted == [Taken(0, 0, 0)]
    assert [c.tolist() for c in (plan.table.rows, plan.table.columns, plan.table.blocks)] == [
        [0],
        [0],
        [0],
    ]
    assert plan.pool == PoolCounts(1, 0, 0, 0)
    assert (plan.num_running, plan.num_waiting) == (1, 0)
    assert first.collected is not None and first.collected.tokens.tolist() == [11]
    (plan,) = second.plans
    assert (plan.start.tolist(), plan.num_new.tolist(), plan.admitted) == ([4], [1], [])
    assert (plan.table.columns.tolist(), plan.table.blocks.tolist()) == ([1], [1])
    assert plan.pool == PoolCounts(2, 0, 0, 0)
    assert third.plans[0].table.rows.tolist() == []
    assert third.finished == [Ended(0, 0, "length")]
    assert (third.table.columns.tolist(), third.table.blocks.tolist()) == ([0, 1], [-1, -1])


def test_the_times_are_those_of_the_clock() -> None:
    kept = Kept()
    core = traced_core(kept)
    core.add_request(request("a", 3, max_tokens=1))
    core.step()
    (step,) = steps_of(kept)
    (plan,) = step.plans
    assert step.collected is not None
    parts = (plan.schedule_us, plan.submit_us, step.collected.collect_us)
    assert parts == (1000, 1000, 1000), "one tick each: the clock is looked at before and after"
    assert step.total_us > sum(parts)


def test_forks_share_blocks_and_a_write_copies_one() -> None:
    kept = Kept()
    core = traced_core(kept, lambda config: ScriptedRunner({"a": [[1, 2], [3, 4]]}))
    core.add_request(request("a", 6, n=2, max_tokens=2))
    core.step()
    core.step()
    first, second = steps_of(kept)
    assert first.forked == [Taken(0, 1, 1)]
    assert (first.table.rows.tolist(), first.table.blocks.tolist()) == ([1, 1], [0, 1])
    assert first.collected is not None and first.collected.tokens.tolist() == [1, 3]
    (plan,) = second.plans
    assert plan.copies == [(1, 2)]
    assert plan.pool == PoolCounts(3, 1, 0, 0)
    assert (plan.table.rows.tolist(), plan.table.blocks.tolist()) == ([0], [2])
    assert second.finished == [Ended(0, 0, "length"), Ended(0, 1, "length")]


def test_preemption_gives_blocks_back() -> None:
    kept = Kept()
    core = traced_core(kept, num_blocks=4, enable_prefix_caching=False)
    core.add_request(request("a", 7, max_tokens=5))
    core.add_request(request("b", 7, max_tokens=4))
    drain(core)
    plans = [plan for step in steps_of(kept) for plan in step.plans]
    (preempting,) = [plan for plan in plans if plan.preempted]
    assert preempting.preempted == [(1, 0)]
    assert preempting.num_waiting == 1
    again = [plan.admitted for plan in plans if plan.admitted]
    assert [taken[:2] for taken in again[0]] == [(0, 0), (1, 0)]
    assert [taken[:2] for taken in again[1]] == [(1, 0)]


def test_aborts_and_resets_are_told_when_they_do_something() -> None:
    kept = Kept()
    core = traced_core(kept)
    core.add_request(request("a", 9, max_tokens=5))
    core.step()
    assert not core.abort("nobody")
    assert core.abort("a", reason="stop")
    assert core.reset_prefix_cache() == 2
    assert core.step() == []
    kinds = [type(event) for event in kept.events]
    assert kinds == [AddEvent, StepEvents, AbortEvent, ResetEvent]
    abort, reset = kept.events[2:]
    assert isinstance(abort, AbortEvent) and isinstance(reset, ResetEvent)
    assert (abort.request_id, abort.index, abort.reason) == ("a", None, "stop")
    assert abort.finished == [Ended(0, 0, "stop")]
    assert reset.num_blocks == 2


def test_what_is_refused_is_not_told() -> None:
    kept = Kept()
    core = traced_core(kept)
    with pytest.raises(PromptError):
        core.add_request(request("a", 0))
    assert kept.events == []


@pytest.mark.parametrize("at_submit", [True, False])
def test_a_failing_step(at_submit: bool) -> None:
    kept = Kept()
    core = traced_core(kept, partial(Faulty, at_submit=at_submit))
    core.add_request(request("bad", 3, max_tokens=2))
    with pytest.raises(EngineError):
        core.step()
    (step,) = steps_of(kept)
    outcomes = (step.plans[0].outcome, step.collected and step.collected.outcome)
    assert outcomes == ((FAILED, None) if at_submit else ("ok", FAILED))
    assert step.finished == [Ended(0, 0, "error")]
    assert step.broken == ""


def test_an_interrupted_step() -> None:
    kept = Kept()
    failing = partial(Faulty, at_submit=False, error=KeyboardInterrupt(), times=1)
    core = traced_core(kept, failing)
    core.add_request(request("bad", 3, max_tokens=2))
    with pytest.raises(KeyboardInterrupt):
        core.step()
    (step,) = steps_of(kept)
    assert step.collected is not None and step.collected.outcome == INTERRUPTED
    assert step.broken == ""


def test_a_core_that_is_not_traced_has_nothing_of_it() -> None:
    core = small_core()
    assert type(core) is EngineCore
    assert type(core.scheduler) is EngineCore.scheduler_class


def test_the_table_again_from_its_changes() -> None:
    manager = BlockManager(num_blocks=6, block_size=4, max_num_seqs=3, max_blocks_per_seq=4)
    watch, replica = TableWatch(manager), TableReplica(3, 4, 6)
    manager.allocate("a", 0, 9)
    assert replica.apply(watch.changes()) == (3, 0, 0)
    manager.fork("a", "b")
    assert replica.apply(watch.changes()) == (0, 0, 3)
    manager.allocate("b", 9, 1)  # its last block is shared: it gets one of its own
    assert replica.apply(watch.changes()) == (1, 0, 0)
    manager.free("a")
    assert replica.apply(watch.changes()) == (0, 1, 0)
    assert (replica.table == manager.block_table).all()
    assert (replica.ref_counts == manager.ref_counts).all()
    assert replica.apply(watch.changes()) == (0, 0, 0)


def test_the_first_difference_is_found() -> None:
    one, other = Kept(), Kept()
    for kept, seed in ((one, 0), (other, 1)):
        core = traced_core(kept)
        core.add_request(request("a", 6, max_tokens=4, seed=seed))
        drain(core)
    assert first_difference(one.events[0], one.events[0]) is None
    difference = first_difference(one.events[0], other.events[0])
    assert difference is not None and difference == ("request.seed", 0, 1)
    found = [first_difference(a, b) for a, b in zip(one.events[1:], other.events[1:], strict=True)]
    assert {d.place for d in found if d is not None} == {"collected.tokens[0]"}
