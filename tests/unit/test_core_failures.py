"""A runner that raises: the guilty request ends, everything else goes on as if nothing had been."""

from __future__ import annotations

from functools import partial

import pytest

from cupaged.config import EngineConfig
from cupaged.engine.batch import StepPlan
from cupaged.engine.core import EngineCore
from cupaged.engine.runner import StepOutput
from cupaged.errors import EngineError
from tests.unit.small_core import (
    RecordingRunner,
    drain,
    request,
    small_core,
    tokens_of,
)


class Faulty(RecordingRunner):
    """Raises in the steps that hold the request `bad`, when they are submitted or collected."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        at_submit: bool,
        error: BaseException | None = None,
        times: int = 1000,
    ) -> None:
        super().__init__(config)
        self._at_submit = at_submit
        self._times = times
        self._error = error or RuntimeError("a planted failure")
        self._bad: int | None = None

    def submit(self, plan: StepPlan) -> int:
        """Fail now or note the step that will fail."""
        handle = super().submit(plan)
        bad = any(e.sequence.request.core.request_id == "bad" for e in plan.scheduled)
        if bad and self._times:
            self._times -= 1
            self._bad = handle
            if self._at_submit:
                super().collect(handle)
                raise self._error
        return handle

    def collect(self, handle: int) -> StepOutput:
        """Fail for a noted step."""
        output = super().collect(handle)
        if handle == self._bad:
            raise self._error
        return output


@pytest.mark.parametrize("at_submit", [True, False])
def test_only_the_guilty_request_of_a_step_ends(at_submit: bool) -> None:
    """SV-07."""
    expected = small_core()
    expected.add_request(request("good", 6, seed=5, max_tokens=6))
    expected.add_request(request("wide", 6, seed=6, n=3, max_tokens=5))
    outputs = drain(expected)
    good, wide = tokens_of(outputs, "good"), [tokens_of(outputs, "wide", i) for i in range(3)]

    core = small_core(partial(Faulty, at_submit=at_submit), max_num_batched_tokens=16)
    core.add_request(request("good", 6, seed=5, max_tokens=6))
    core.add_request(request("wide", 6, seed=6, n=3, max_tokens=5))
    outputs = core.step() + core.step()
    core.add_request(request("bad", 2, n=2, max_tokens=5))
    core.add_request(request("later", 2, seed=5, max_tokens=2))
    failures = 0
    while core.has_unfinished_requests:
        try:
            outputs += core.step()
        except EngineError as error:
            assert "failed: a planted failure" in str(error)
            assert not core.holds("bad")
            failures += 1
        core.audit()
    assert failures == 1
    assert tokens_of(outputs, "good") == good
    assert [tokens_of(outputs, "wide", i) for i in range(3)] == wide
    assert len(tokens_of(outputs, "later")) == 2
    assert core.stats().finished_total == {"error": 1, "length": 5}


@pytest.mark.parametrize("at_submit", [True, False])
@pytest.mark.parametrize("num_in_flight", [1, 3])
def test_a_passing_failure_of_a_full_step_costs_nobody_anything(
    at_submit: bool, num_in_flight: int
) -> None:
    names = ["good", "bad", "long"]

    def add_to(core: EngineCore) -> None:
        for seed, name in enumerate(names):
            core.add_request(request(name, 9 if name == "long" else 4, seed=seed, max_tokens=6))

    expected = small_core()
    add_to(expected)
    whole = drain(expected)

    core = small_core(
        partial(Faulty, at_submit=at_submit, times=1),
        max_num_batched_tokens=8,
        max_steps_in_flight=num_in_flight,
    )
    add_to(core)
    outputs = drain(core)
    for name in names:
        assert tokens_of(outputs, name) == tokens_of(whole, name)
    core.audit()
    assert core.stats().num_used_blocks == 0


def test_an_abort_takes_a_suspect_out() -> None:
    core = small_core(partial(Faulty, at_submit=False), max_num_batched_tokens=16)
    for name in ("good", "bad", "gone"):
        core.add_request(request(name, 4, max_tokens=3))
    assert core.step() == []
    assert core.scheduler.has_suspects
    assert core.abort("gone")
    assert core.abort("bad")
    outputs = drain(core)
    assert len(tokens_of(outputs, "good")) == 3
    core.audit()
    assert core.stats().finished_total == {"abort": 2, "length": 1}


@pytest.mark.parametrize("at_submit", [True, False])
def test_a_failure_leaves_steps_in_flight_alone(at_submit: bool) -> None:
    expected = small_core()
    expected.add_request(request("good", 4, seed=5, max_tokens=6))
    whole = tokens_of(drain(expected), "good")

    core = small_core(
        partial(Faulty, at_submit=at_submit), max_num_batched_tokens=4, max_steps_in_flight=2
    )
    core.add_request(request("good", 4, seed=5, max_tokens=6))
    core.add_request(request("bad", 4, max_tokens=6))
    outputs = []
    for _ in range(20):
        try:
            outputs += core.step()
        except EngineError:
            assert core.holds("good")
        core.audit()
    assert not core.has_unfinished_requests
    assert tokens_of(outputs, "good") == whole
    assert core.block_manager.num_free_blocks == 16


def test_a_failure_of_an_aborted_request_spares_the_next_one_of_that_name() -> None:
    core = small_core(
        partial(Faulty, at_submit=False, times=1), max_num_batched_tokens=4, max_steps_in_flight=2
    )
    core.add_request(request("first", 4, max_tokens=3))
    core.add_request(request("bad", 4, max_tokens=3))
    core.step()  # the step of `bad` is in flight
    core.abort("bad")
    core.add_request(request("bad", 4, max_tokens=3))
    with pytest.raises(EngineError):
        core.step()
    assert core.holds("bad")
    outputs = drain(core)
    assert len(tokens_of(outputs, "bad")) == 3


def test_an_interrupt_passes_through_and_takes_the_step_along() -> None:
    core = small_core(partial(Faulty, at_submit=False, error=KeyboardInterrupt()))
    core.add_request(request("bad", 4, max_tokens=6))
    with pytest.raises(KeyboardInterrupt):
        core.step()
    assert not core.has_unfinished_requests
    core.add_request(request("next", 4, max_tokens=2))
    assert len(tokens_of(drain(core), "next")) == 2
