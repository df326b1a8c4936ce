"""A runner that raises: the requests of that step end, everything else goes on."""

from __future__ import annotations

from functools import partial

import pytest

from cupaged.config import EngineConfig
from cupaged.engine.batch import StepPlan
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
    """Raises in the step that holds a request, when it is submitted or collected."""

    def __init__(
        self, config: EngineConfig, *, at_submit: bool, error: BaseException | None = None
    ) -> None:
        super().__init__(config)
        self._at_submit = at_submit
        self._error = error or RuntimeError("a planted failure")
        self._bad: int | None = None

    def submit(self, plan: StepPlan) -> int:
        """Fail now or note the step that will fail."""
        handle = super().submit(plan)
        bad = any(e.sequence.request.core.request_id == "bad" for e in plan.scheduled)
        if bad and self._bad is None:
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
def test_a_step_that_fails_ends_its_requests_and_no_other(at_submit: bool) -> None:
    expected = small_core()
    expected.add_request(request("good", 6, seed=5, max_tokens=6))
    whole = tokens_of(drain(expected), "good")

    core = small_core(partial(Faulty, at_submit=at_submit), max_num_batched_tokens=4)
    core.add_request(request("good", 6, seed=5, max_tokens=6))
    core.step()
    core.step()  # 4 and 2 tokens: `good` has its first token
    good = core.step()
    core.add_request(request("bad", 2, n=3, max_tokens=5))
    core.add_request(request("later", 2, seed=5, max_tokens=2))
    with pytest.raises(EngineError, match="step 3 failed: a planted failure"):
        core.step()
    core.audit()
    assert not core.holds("bad")
    assert not core.holds("good")  # it was in that step
    assert core.holds("later")
    assert core.stats().num_used_blocks == 0
    assert tokens_of(good, "good") == whole[1:2]
    assert len(tokens_of(drain(core), "later")) == 2
    assert core.stats().finished_total == {"error": 2, "length": 1}


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
        partial(Faulty, at_submit=False), max_num_batched_tokens=4, max_steps_in_flight=2
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
