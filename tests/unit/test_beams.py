"""Requests of beams in an engine core: what they share, when they wait, how they end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cupaged.engine.batch import StepPlan
from cupaged.engine.core import EngineCore
from cupaged.engine.runner import FAILED_TOKEN, StepOutput
from cupaged.engine.scheduling_policy import PriorityWithBoundedWait
from cupaged.errors import BadValueError, CapacityError, InvalidParameterError
from cupaged.outputs import CoreOutput
from cupaged.request import CoreRequest, SequenceStatus
from cupaged.sampling_params import BeamSearchParams, SamplingParams
from tests.fuzz.oracle import answers
from tests.unit.small_core import (
    RecordingRunner,
    drain,
    recorded,
    request,
    small_config,
    small_core,
    tokens_of,
)


def beams(
    request_id: str, length: int, *, eos: tuple[int, ...] = (), priority: int = 0, **params: Any
) -> CoreRequest:
    """A request of 3 beams and 6 tokens whose prompt is 1, 2, 3, ..."""
    asked = BeamSearchParams(**{"beam_width": 3, "max_tokens": 6, **params})
    plain = request(request_id, length, eos=eos, priority=priority)
    return replace(plain, params=asked.sampling_params(eos), beams=asked)


def check_answers(core: EngineCore, outputs: list[CoreOutput], asked: CoreRequest) -> None:
    """The outputs of a request are what the search finds for it alone, best first."""
    got = [o for o in outputs if o.request_id == asked.request_id]
    expected = answers(asked, core.config)
    assert [o.index for o in got] == [*range(len(expected))]
    assert [o.new_token_ids for o in got] == [a.token_ids for a in expected]
    assert [o.finish_reason for o in got] == [a.finish_reason for a in expected]
    told = [[p.logprobs[0] for p in o.logprobs or ()] for o in got]
    assert [sum(values) for values in told] == [a.cumulative_logprob for a in expected]


# ---- blocks --------------------------------------------------------------------------------------


def test_beams_share_the_prompt_and_part_by_copies() -> None:
    """A prompt of 2 full blocks and one token: the third block is copied for all beams but one."""
    core = small_core(num_blocks=40)
    asked = beams("a", 9, beam_width=4, max_tokens=7)
    core.add_request(asked)
    core.step()
    assert core.block_manager.num_used_blocks == 3
    assert core.block_manager.num_shared_blocks == 3
    outputs, most = [], 0
    for _ in range(3):  # 12 tokens: the third block is full
        outputs += core.step()
        most = max(most, core.block_manager.num_used_blocks)
        core.audit()
    assert len(recorded(core).plans[1].copies) == 3
    assert most <= 2 + 4
    outputs += drain(core)
    check_answers(core, outputs, asked)
    assert core.block_manager.num_free_blocks == 40


def test_the_most_blocks_at_once_are_far_fewer_than_without_sharing() -> None:
    """64 tokens of prompt: 16 blocks once, not 4 times; of 16 tokens of output at most 4 x 4."""
    core = small_core(num_blocks=200)
    asked = beams("a", 64, beam_width=4, max_tokens=16)
    core.add_request(asked)
    outputs, most = [], 0
    while core.has_unfinished_requests:
        outputs += core.step()
        core.audit()
        most = max(most, core.block_manager.num_used_blocks)
    check_answers(core, outputs, asked)
    assert 16 + 4 <= most <= 16 + 4 * 4 < 4 * 20 / 2
    assert core.block_manager.num_free_blocks == 200


def test_beams_that_nothing_follows_give_their_blocks_back() -> None:
    """At every moment exactly the blocks of the live beams are used."""
    core = small_core(num_blocks=100)
    core.add_request(beams("a", 5, max_tokens=30))
    while core.has_unfinished_requests:
        core.step()
        held = {b for s in core.scheduler.running for b in core.block_manager.blocks_of(s.order)}
        assert core.block_manager.num_used_blocks == len(held)
        assert len(core.scheduler.running) in (0, 1, 3)


# ---- steps ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_num_batched_tokens", [1, 2, 5])
@pytest.mark.parametrize("max_steps_in_flight", [1, 3])
def test_beams_in_different_steps(max_num_batched_tokens: int, max_steps_in_flight: int) -> None:
    core = small_core(
        num_blocks=100,
        max_num_batched_tokens=max_num_batched_tokens,
        max_steps_in_flight=max_steps_in_flight,
    )
    asked = [beams("a", 9), request("b", 5, max_tokens=9), beams("c", 9, beam_width=1)]
    for each in asked:
        core.add_request(each)
    outputs = drain(core)
    check_answers(core, outputs, asked[0])
    check_answers(core, outputs, asked[2])
    assert tokens_of(outputs, "b") == answers(asked[1], core.config)[0].token_ids


def test_a_beam_that_has_told_waits_without_being_computed_again() -> None:
    """With one token a step, three beams take three steps for each position."""
    core = small_core(num_blocks=100, max_num_batched_tokens=1)
    core.add_request(beams("a", 2, max_tokens=4))
    drain(core)
    computed = [(index, start) for ((_, index, start, _, _),) in recorded(core).steps]
    assert computed[:2] == [(0, 0), (0, 1)]
    positions = [start for _, start in computed[2:]]
    assert positions == [2, 2, 2, 3, 3, 3, 4, 4, 4]
    assert all(len({*computed[i : i + 3]}) == 3 for i in (2, 5, 8))


def test_a_pool_that_holds_the_beams_only_as_long_as_they_share() -> None:
    """An older request takes blocks, beams are preempted, and without a cache come back unshared:
    those that wait for them give way, and nothing of what is found changes."""
    core = small_core(num_blocks=9, enable_prefix_caching=False)
    old, asked = request("old", 3, max_tokens=24), beams("a", 13, max_tokens=8)
    core.add_request(old)
    core.add_request(asked)
    outputs, statuses = [], set()
    while core.has_unfinished_requests:
        outputs += core.step()
        core.audit()
        live = core._requests.get("a")
        statuses |= {s.status for s in live.sequences} if live else set()
    check_answers(core, outputs, asked)
    assert tokens_of(outputs, "old") == answers(old, core.config)[0].token_ids
    assert SequenceStatus.PARKED in statuses
    assert core.block_manager.num_free_blocks == 9


def test_priorities() -> None:
    """The request that counts more is searched first, and both find what they must."""
    core = small_core(policy=PriorityWithBoundedWait(), num_blocks=40, max_num_seqs=3)
    asked = [beams("late", 9, priority=1), beams("early", 9, priority=0)]
    for each in asked:
        core.add_request(each)
    outputs = drain(core)
    assert outputs[0].request_id == "early"
    for each in asked:
        check_answers(core, outputs, each)


def test_a_prefix_that_others_have_computed() -> None:
    core = small_core(num_blocks=100)
    first, second = beams("a", 13), beams("b", 13)
    core.add_request(first)
    outputs = drain(core)
    core.add_request(second)
    outputs += drain(core)
    for each in (first, second):
        check_answers(core, outputs, each)
    assert {o.num_cached_tokens for o in outputs if o.request_id == "b"} == {12}


# ---- ends ----------------------------------------------------------------------------------------


def test_an_eos_that_the_best_output_draws_ends_outputs() -> None:
    free = answers(beams("a", 9), small_config(num_blocks=100))
    core = small_core(num_blocks=100)
    asked = beams("a", 9, eos=(free[0].token_ids[2],), length_penalty=0.0)
    core.add_request(asked)
    outputs = drain(core)
    check_answers(core, outputs, asked)
    assert "stop" in {o.finish_reason for o in outputs}
    finished = core.stats().finished_total
    assert sum(finished.values()) == 3
    assert core.stats().generation_tokens_total == sum(len(o.new_token_ids) for o in outputs)


def test_what_is_there_can_be_had_before_an_abort() -> None:
    core = small_core(num_blocks=100)
    core.add_request(beams("a", 9))
    assert core.best_so_far("a") == []
    core.step()
    core.step()
    outputs = core.best_so_far("a")
    assert [o.index for o in outputs] == [0, 1, 2]
    assert [len(o.new_token_ids) for o in outputs] == [2, 2, 2]
    assert [o.finish_reason for o in outputs] == ["abort"] * 3
    assert core.unfinished_samples("a") == [0, 1, 2]
    assert not core.abort("a", 1), "beams end together"
    assert core.abort("a")
    assert core.best_so_far("a") == []
    core.audit()
    assert core.block_manager.num_free_blocks == 100
    assert not core.abort("a")


class NotNumbers(RecordingRunner):
    """From some step on, logits are not numbers."""

    def submit(self, plan: StepPlan) -> int:
        """Compute it."""
        return super().submit(plan)

    def collect(self, handle: int) -> StepOutput:
        """Say that the last sample of the step failed."""
        output = super().collect(handle)
        if handle >= 2:
            output.token_ids[-1][:] = [FAILED_TOKEN]
        return output


def test_logits_that_are_not_numbers_end_the_whole_request() -> None:
    core = small_core(NotNumbers, num_blocks=100)
    core.add_request(beams("a", 9))
    outputs = drain(core)
    assert [(o.index, o.finish_reason) for o in outputs] == [(i, "error") for i in range(3)]
    assert core.stats().finished_total == {"error": 3}
    assert core.block_manager.num_free_blocks == 100


# ---- the door ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "limits", "error", "message"),
    [
        (
            beams("a", 5, beam_width=5),
            {},
            InvalidParameterError,
            r"beam_width must be at most 4 \(max_num_seqs=4\), got 5",
        ),
        (
            beams("a", 5, beam_width=3, eos=(7, 9)),
            {"max_logprobs": 8},
            InvalidParameterError,
            r"beam_width must be at most 2 \(max_logprobs=8 / 3, since 3 candidates .*, got 3",
        ),
        (
            beams("a", 1, beam_width=3, eos=(0,)),
            {"vocab_size": 3},
            InvalidParameterError,
            r"beam_width must be at most 2 \(the tokens that do not end an output\), got 3",
        ),
        (
            beams("a", 13, beam_width=3, max_tokens=8),
            {"num_blocks": 8},
            CapacityError,
            r"beam_width must be at most 2 for a prompt of 13 and max_tokens=8: the KV pool has 8 "
            r"blocks of 4 tokens, got 3",
        ),
        (
            replace(beams("a", 5), params=SamplingParams(n=3)),
            {},
            InvalidParameterError,
            "params must be what its beams ask for",
        ),
    ],
)
def test_what_is_refused(
    asked: CoreRequest, limits: dict[str, Any], error: type[BadValueError], message: str
) -> None:
    core = small_core(**limits)
    with pytest.raises(error, match=message):
        core.add_request(asked)
    assert not core.has_unfinished_requests


def test_the_widest_that_fits_is_served() -> None:
    """3 shared blocks and two of its own for each of 3 beams: 9 blocks, not one less."""
    asked = beams("a", 13, max_tokens=8)
    core = small_core(num_blocks=9)
    core.add_request(asked)
    check_answers(core, drain(core), asked)
