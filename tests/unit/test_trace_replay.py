"""Replays: equal where nothing has changed, and the first difference where something has."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from cupaged.config import EngineConfig
from cupaged.engine.block_manager import BlockManager
from cupaged.engine.kv_sanitizer import SanitizedRunner
from cupaged.engine.runner import Runner, StepOutput
from cupaged.engine.scheduler import Scheduler
from cupaged.engine.step_events import StepEvents
from cupaged.engine.trace_file import TraceHeader
from cupaged.engine.trace_replay import Replay, Replayed
from cupaged.engine.traced_core import TracedCore
from cupaged.errors import EngineError, KVSanitizerError
from tests.unit.small_core import RecordingRunner, drain, request, small_config
from tests.unit.test_core_failures import Faulty
from tests.unit.traced import Kept, traced_core

LIMITS: dict[str, Any] = {"num_blocks": 6, "max_num_batched_tokens": 7}


def recorded(
    runner: Callable[[EngineConfig], Runner] = RecordingRunner, policy: str = "fcfs", **limits: Any
) -> tuple[Kept, TracedCore]:
    """A core with three requests that have made a few steps."""
    kept = Kept()
    core = traced_core(kept, runner, policy, **{**LIMITS, **limits})
    core.add_request(request("a", 9, max_tokens=8, priority=1))
    core.add_request(request("bad", 9, max_tokens=6, n=2))
    core.add_request(request("c", 4, max_tokens=9, priority=-1, prompt_logprobs=1))
    return kept, core


def replay(kept: Kept, policy: str = "fcfs", **limits: Any) -> Replayed:
    header = TraceHeader(small_config(**{**LIMITS, **limits}), policy)
    return Replay(header).run(kept.events)


def num_steps(kept: Kept) -> int:
    return sum(isinstance(event, StepEvents) for event in kept.events)


@pytest.mark.parametrize("in_flight", [1, 3])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_the_same_schedule_runs_again(policy: str, in_flight: int) -> None:
    kept, core = recorded(policy=policy, max_steps_in_flight=in_flight)
    drain(core)
    assert num_steps(kept) > 10
    assert replay(kept, policy, max_steps_in_flight=in_flight) == Replayed(num_steps(kept))


@pytest.mark.parametrize("at_submit", [True, False])
@pytest.mark.parametrize("times", [1, 1000])
def test_failures_are_part_of_it(at_submit: bool, times: int) -> None:
    kept, core = recorded(partial(Faulty, at_submit=at_submit, times=times))
    while core.has_unfinished_requests:
        try:
            core.step()
        except EngineError:
            continue
    assert replay(kept) == Replayed(num_steps(kept))


def test_an_interrupt_of_the_runner_is_part_of_it() -> None:
    kept, core = recorded(partial(Faulty, at_submit=True, times=1, error=KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        drain(core)
    drain(core)
    assert replay(kept) == Replayed(num_steps(kept))


def test_another_policy_is_found_out() -> None:
    kept, core = recorded(max_num_seqs=2)
    drain(core)
    replayed = replay(kept, "priority", max_num_seqs=2)
    assert (replayed.num_steps, replayed.where) == (0, "step 0, after 0 steps")
    assert replayed.difference is not None
    # "c" comes first by priority; "bad" is next, wants two slots, and one is left.
    assert replayed.plans == ("a 0+7", "c 0+4")


def test_another_order_of_free_blocks_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, core = recorded()
    drain(core)
    release = BlockManager._release
    monkeypatch.setattr(BlockManager, "_release", lambda self, b: release(self, b[::-1]))
    replayed = replay(kept)
    assert replayed.difference is not None
    assert replayed.difference.place.startswith("table.blocks")
    assert 0 < replayed.num_steps < num_steps(kept)


def test_a_request_that_is_refused_now_is_a_difference() -> None:
    kept, core = recorded()
    drain(core)
    replayed = replay(kept, num_blocks=3)
    assert replayed.where == "arrival of a, after 0 steps"
    assert replayed.difference is not None
    assert str(replayed.difference.now).startswith("refused: max_tokens must be at most 4")


def test_other_tokens_are_no_excuse() -> None:
    """A trace with a step left out: what comes next is not what was planned then."""
    kept, core = recorded()
    drain(core)
    del kept.events[5]
    replayed = replay(kept)
    assert replayed.difference is not None and replayed.num_steps == 2


def test_a_broken_engine_breaks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failing assertion of the scheduler is what a trace is worth most for."""
    schedule = Scheduler._continue_running

    def breaks(self: Scheduler, plan: Any, budget: int) -> Any:
        assert plan.step_id < 4, "planted"
        return schedule(self, plan, budget)

    kept, core = recorded()
    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "_continue_running", breaks)
        with pytest.raises(AssertionError, match="planted"):
            drain(core)
        assert kept.events[-1].broken == "AssertionError"  # type: ignore[union-attr]
        assert replay(kept) == Replayed(5)
    assert replay(kept) == Replayed(4, broken="AssertionError")


def test_what_the_kv_sanitizer_finds_ends_the_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it sees in the memory of a device nobody sees in a replay, which has none."""
    collect = SanitizedRunner.collect

    def finds(self: SanitizedRunner, handle: int) -> StepOutput:
        output = collect(self, handle)
        if handle == 3:
            raise KVSanitizerError("planted")
        return output

    kept, core = recorded(kv_sanitizer=True)
    with monkeypatch.context() as patch:
        patch.setattr(SanitizedRunner, "collect", finds)
        with pytest.raises(KVSanitizerError):
            drain(core)
        assert replay(kept, kv_sanitizer=True) == Replayed(4)
    assert replay(kept, kv_sanitizer=True) == Replayed(3, broken="KVSanitizerError")
