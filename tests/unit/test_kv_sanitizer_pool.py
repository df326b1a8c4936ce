"""The KV sanitizer: what a step leaves in the pool, poison, and the engine after an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cupaged.config import EngineConfig
from cupaged.engine.batch import StepPlan
from cupaged.engine.core import EngineCore
from cupaged.engine.hash_runner import HashRunner
from cupaged.engine.kv_sanitizer import SanitizedRunner
from cupaged.errors import ConfigError, EngineError, KVSanitizerError
from tests.unit.small_core import RecordingRunner, drain, request, small_core
from tests.unit.test_kv_sanitizer import misuse, two_decoding, what

# ---- what a step has written ---------------------------------------------------------------------


class ForgetfulRunner(RecordingRunner):
    """Does something to the pool after every step that is submitted."""

    def __init__(self, config: EngineConfig, then: Callable[[Any], None]) -> None:
        super().__init__(config)
        self._then = then

    def submit(self, plan: StepPlan) -> int:
        handle = super().submit(plan)
        self._then(self._pool)
        return handle


POISON = np.uint64(0xDEADDEADDEADDEAD)


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ((1, 1), POISON, "has not written slot 1 of block 1 in layer 0: it still holds poison, or "
         "what was computed from poison"),
        ((1, 2), 5, "has written slot 2 of block 1 in layer 0: no token of the step belongs there"),
    ],
)  # fmt: skip
def test_a_kernel_that_writes_too_little_or_too_much(
    place: tuple[int, int], value: Any, said: str
) -> None:
    def then(pool: Any) -> None:
        pool[place] = value

    core = small_core(lambda config: ForgetfulRunner(config, then))
    core.add_request(request("a", 6, max_tokens=4))
    error = misuse(core, 0, lambda core, plan: None)
    assert what(error) == f"step 0: request 'a' sample 0 {said}"
    assert error.layer == 0
    assert error.history[-1] == "step 0: slots 0-1 written by request 'a' sample 0"


def test_a_kernel_that_damages_what_was_there() -> None:
    def then(pool: Any) -> None:
        if len(runners[0].steps) == 2:
            pool[1, 0] = POISON

    runners: list[ForgetfulRunner] = []

    def runner(config: EngineConfig) -> ForgetfulRunner:
        runners.append(ForgetfulRunner(config, then))
        return runners[0]

    core = small_core(runner)
    core.add_request(request("a", 6, max_tokens=4))
    assert what(misuse(core, 1, lambda core, plan: None)) == (
        "step 1: request 'a' sample 0 has damaged slot 0 of block 1 in layer 0: it holds poison, "
        "though it was written before"
    )


# ---- poison --------------------------------------------------------------------------------------


def test_a_block_is_poison_when_it_is_given_back_and_when_it_is_handed_out() -> None:
    core = small_core(enable_prefix_caching=False, num_blocks=4)
    pool = recorded_pool(core)
    core.add_request(request("a", 6, max_tokens=1))
    core.add_request(request("b", 2, max_tokens=3))
    core.step()
    assert (pool[0] != POISON).all()
    core.step()  # "a" has ended
    assert (pool[:2] == POISON).all()
    pool[3] = 7
    core.add_request(request("c", 6, max_tokens=1))
    core.step()
    assert (pool[3] != 7).all()


def test_what_can_be_found_is_not_poisoned() -> None:
    core = small_core()
    pool = recorded_pool(core)
    core.add_request(request("a", 6, max_tokens=1))
    drain(core)
    core.add_request(request("b", 3, max_tokens=2))
    drain(core)
    assert (pool[0] != POISON).all()
    core.add_request(request("c", 6, max_tokens=2))
    assert [o.num_cached_tokens for o in drain(core)] == [4, 4]


def recorded_pool(core: EngineCore) -> Any:
    runner = core._runner
    assert isinstance(runner, SanitizedRunner)
    assert isinstance(runner.inner, HashRunner)
    return runner.inner._pool


# ---- the engine around it ------------------------------------------------------------------------


def test_after_misuse_the_engine_is_dead() -> None:
    """Nobody knows whose blocks are whose: nothing is tidied up, nothing goes on."""
    core = two_decoding()
    error = misuse(core, 1, lambda core, plan: core.block_manager.free((0, 0)))
    assert not core.has_unfinished_requests
    assert not core.holds("b")
    assert not core.abort("b")
    core.add_request(request("c", 3))
    with pytest.raises(KVSanitizerError) as caught:
        core.step()
    assert caught.value is error
    assert not core.has_unfinished_requests


def test_a_step_that_fails_leaves_nothing_to_be_read() -> None:
    """If what it was to write could be found, the next to find it would be told."""

    class Failing(RecordingRunner):
        def collect(self, handle: int) -> Any:
            output = super().collect(handle)
            if handle == 0:
                raise RuntimeError("the device has failed")
            return output

    core = small_core(Failing)
    core.add_request(request("a", 6, max_tokens=2))
    with pytest.raises(EngineError, match="the device has failed"):
        core.step()
    core.add_request(request("b", 6, max_tokens=2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core.scheduler.prefix_cache, "find", lambda sequence: [0])
        error = misuse(core, 0, lambda core, plan: None)
    assert "reads slot 0 of block 0: nothing was written there" in str(error)
    assert "step 0: the step failed" in error.history


def test_without_it_there_is_nothing_of_it_in_the_way() -> None:
    core = small_core(kv_sanitizer=False)
    assert type(core._runner) is RecordingRunner


def test_it_is_on_or_off() -> None:
    with pytest.raises(ConfigError, match="kv_sanitizer"):
        small_core(kv_sanitizer=1)
