"""The engine core: samples, stopping and aborts, with known tokens."""

from __future__ import annotations

from typing import Any

import pytest

from cupaged.engine.core import EngineCore
from cupaged.engine.runner import FAILED_TOKEN, NullRunner
from cupaged.request import CoreRequest
from tests.unit.small_core import (
    ScriptedRunner,
    drain,
    endings,
    recorded,
    request,
    small_core,
    tokens_of,
)


def scripted(*samples: list[int], request_id: str = "a", **limits: Any) -> EngineCore:
    """A core that draws the given tokens for request "a"."""
    return small_core(lambda _: ScriptedRunner({request_id: samples}), **limits)


# ---- running -------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [3, 4, 5, 7, 8, 9, 12])
def test_the_same_prompt_twice_at_the_edges_of_a_block(length: int) -> None:
    core = small_core()
    core.add_request(request("first", length, max_tokens=2))
    first = tokens_of(drain(core), "first")
    core.add_request(request("second", length, max_tokens=2))
    second = tokens_of(drain(core), "second")
    assert len(first) == 2
    assert first == second
    assert all(num_tokens >= 1 for step in recorded(core).steps for *_, num_tokens, _ in step)
    assert not core.block_manager.ref_counts.any()


def test_samples_share_the_prompt_until_they_write() -> None:
    core = small_core()
    core.add_request(request("a", 6, n=3, max_tokens=4))
    outputs = core.step()
    assert [(o.index, len(o.new_token_ids)) for o in outputs] == [(0, 1), (1, 1), (2, 1)]
    stats = core.stats()
    assert (stats.num_running, stats.num_used_blocks, stats.num_shared_blocks) == (3, 2, 2)
    core.step()  # each writes its first token into the block that was half full
    stats = core.stats()
    assert (stats.num_used_blocks, stats.num_shared_blocks) == (4, 1)
    assert stats.kv_utilisation == (4 + 3 * 3) / 16
    drain(core)
    assert core.stats().num_used_blocks == 0


def test_forks_that_are_preempted_before_they_run_give_what_they_give_with_room() -> None:
    def tokens(num_blocks: int) -> tuple[list[list[int]], int]:
        core = small_core(num_blocks=num_blocks, max_num_batched_tokens=8)
        core.add_request(request("a", 6, n=4, seed=3, max_tokens=7))
        outputs = drain(core)
        return [tokens_of(outputs, "a", i) for i in range(4)], core.stats().num_preemptions_total

    roomy, none = tokens(16)
    tight, some = tokens(3)
    assert none == 0
    assert some >= 3
    assert tight == roomy
    assert [len(t) for t in roomy] == [7, 7, 7, 7]


def test_a_seed_gives_the_same_tokens_in_any_company() -> None:
    def tokens(*others: CoreRequest, before: bool = False, **limits: Any) -> list[int]:
        core = small_core(**limits)
        mine = request("mine", 5, seed=42, max_tokens=8)
        for each in (*others, mine) if before else (mine, *others):
            core.add_request(each)
        outputs = drain(core)
        preempted.append(core.stats().num_preemptions_total)
        return tokens_of(outputs, "mine")

    preempted: list[int] = []
    mate, other = request("mate", 7, max_tokens=9), request("other", 3, seed=7, n=2, max_tokens=9)
    alone = tokens()
    assert len(set(alone)) > 1
    assert tokens(mate) == alone
    assert tokens(mate, other) == alone
    assert tokens(mate, other, before=True) == alone
    assert tokens(mate, other, before=True, max_num_batched_tokens=3) == alone
    assert not any(preempted)
    assert tokens(mate, before=True, num_blocks=4) == alone
    assert preempted[-1] > 0


def test_nothing_is_used_after_two_hundred_requests() -> None:
    core = small_core()
    for number in range(200):
        core.add_request(request(str(number), 1 + number % 9, seed=number, max_tokens=3))
        core.step()
        assert 0 <= core.stats().num_used_blocks <= 16
    drain(core)
    stats = core.stats()
    assert (stats.num_used_blocks, stats.kv_utilisation) == (0, 1.0)
    assert stats.finished_total == {"length": 200}
    assert stats.generation_tokens_total == 600
    assert stats.prompt_tokens_total == 22 * 45 + 1 + 2
    core.add_request(request("201st", 60, max_tokens=4))
    assert endings(drain(core)) == {("201st", 0): ("length", None)}


def test_stepping_without_requests_gives_nothing() -> None:
    core = small_core()
    assert core.step() == []
    assert not core.has_unfinished_requests


def test_the_null_runner_draws_one_token_for_every_sample() -> None:
    core = small_core(lambda _: NullRunner(7))
    core.add_request(request("a", 3, n=2, max_tokens=2))
    outputs = drain(core)
    assert [tokens_of(outputs, "a", i) for i in range(2)] == [[7, 7], [7, 7]]


# ---- stopping ------------------------------------------------------------------------------------


def test_any_of_several_eos_ids_ends_a_sequence() -> None:
    core = scripted([1, 9, 3])
    core.add_request(request("a", 2, eos=(7, 9)))
    outputs = drain(core)
    assert tokens_of(outputs, "a") == [1, 9]
    assert endings(outputs) == {("a", 0): ("stop", None)}


def test_ignore_eos_ignores_every_eos_id_but_no_stop_id() -> None:
    core = scripted([1, 9, 7, 4, 5])
    core.add_request(request("a", 2, eos=(7, 9), ignore_eos=True, max_tokens=5))
    outputs = drain(core)
    assert tokens_of(outputs, "a") == [1, 9, 7, 4, 5]
    assert endings(outputs) == {("a", 0): ("length", None)}
    core.add_request(request("a", 2, eos=(7, 9), ignore_eos=True, stop_token_ids=[9], max_tokens=5))
    outputs = drain(core)
    assert tokens_of(outputs, "a") == [1, 9]
    assert endings(outputs) == {("a", 0): ("stop", 9)}


def test_nothing_stops_before_min_tokens() -> None:
    core = scripted([9, 7, 9, 1])
    core.add_request(request("a", 2, eos=(7,), stop_token_ids=[9], min_tokens=3))
    outputs = drain(core)
    assert tokens_of(outputs, "a") == [9, 7, 9]
    assert endings(outputs) == {("a", 0): ("stop", 9)}


def test_min_tokens_keeps_the_ending_tokens_from_being_drawn() -> None:
    core = small_core()
    core.add_request(request("free", 2, max_tokens=3))
    drawn = tokens_of(drain(core), "free")
    core.add_request(
        request("held", 2, eos=drawn[:1], stop_token_ids=drawn[1:], min_tokens=3, max_tokens=3)
    )
    outputs = drain(core)
    assert len(tokens_of(outputs, "held")) == 3
    assert not {*tokens_of(outputs, "held")} & {*drawn}


def test_samples_end_one_by_one() -> None:
    core = scripted([1, 2, 3], [9], [1, 9])
    core.add_request(request("a", 2, n=3, stop_token_ids=[9], max_tokens=3))
    outputs = drain(core)
    assert endings(outputs) == {
        ("a", 0): ("length", None),
        ("a", 1): ("stop", 9),
        ("a", 2): ("stop", 9),
    }
    assert [tokens_of(outputs, "a", i) for i in range(3)] == [[1, 2, 3], [9], [1, 9]]


def test_the_context_cuts_the_output_and_the_last_token_needs_no_slot() -> None:
    core = small_core(max_model_len=10)
    core.add_request(request("a", 7, max_tokens=10**18))
    assert len(tokens_of(drain(core), "a")) == 3
    core = small_core(num_blocks=2)
    core.add_request(request("a", 6, max_tokens=3))
    core.add_request(request("rest", 6, max_tokens=None))
    outputs = drain(core)
    assert len(tokens_of(outputs, "a")) == len(tokens_of(outputs, "rest")) == 3


def test_logits_that_are_not_numbers_end_only_their_sample() -> None:
    core = scripted([1, 2], [FAILED_TOKEN])
    core.add_request(request("a", 2, n=2, max_tokens=2))
    outputs = drain(core)
    assert endings(outputs) == {("a", 0): ("length", None), ("a", 1): ("error", None)}
    assert tokens_of(outputs, "a", 1) == []


# ---- aborting ------------------------------------------------------------------------------------


def test_abort_twice_finished_or_unknown() -> None:
    core = small_core()
    core.add_request(request("a", 9, max_tokens=5))
    core.step()
    assert core.stats().num_used_blocks == 3
    assert core.abort("a")
    assert core.stats().num_used_blocks == 0
    assert not core.abort("a")
    assert not core.abort("unknown")
    core.add_request(request("b", 2, max_tokens=1))
    drain(core)
    assert not core.abort("b")
    core.audit()
    assert core.stats().finished_total == {"abort": 1, "length": 1}


def test_one_sample_is_aborted_alone() -> None:
    core = small_core()
    core.add_request(request("a", 3, n=3, max_tokens=4))
    core.step()
    assert core.abort("a", 1)
    assert not core.abort("a", 1)
    assert not core.abort("a", 3)
    assert set(endings(drain(core))) == {("a", 0), ("a", 2)}


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_a_sample_can_be_aborted_before_the_prompt_is_done(gone: int) -> None:
    core = small_core(max_num_batched_tokens=2)
    core.add_request(request("a", 3, n=3, max_tokens=2))
    assert core.abort("a", gone)
    core.step()
    assert not core.abort("a", gone)
    assert not core.abort("a", 3)
    assert core.holds("a")
    outputs = drain(core)
    assert {o.index for o in outputs} == {0, 1, 2} - {gone}
    assert set(endings(outputs)) == {("a", i) for i in range(3) if i != gone}


def test_aborting_every_sample_before_the_prompt_is_done_ends_the_request() -> None:
    core = small_core(max_num_batched_tokens=2)
    core.add_request(request("a", 3, n=2, max_tokens=2))
    core.step()
    assert core.abort("a", 1)
    assert core.abort("a", 0)
    assert not core.holds("a")
    assert core.stats().num_used_blocks == 0
    assert drain(core) == []


def test_an_id_can_be_used_again_while_its_aborted_step_is_in_flight() -> None:
    core = small_core(max_num_batched_tokens=4, max_steps_in_flight=3)
    for request_id in "abc":
        core.add_request(request(request_id, 4, seed=1, max_tokens=3))
    core.step()  # `b` and `c` are in flight now
    assert core.abort("b")
    core.audit()
    assert core.block_manager.num_quarantined_blocks == 1
    core.add_request(request("b", 4, seed=1, max_tokens=3))
    outputs = drain(core)
    assert tokens_of(outputs, "b") == tokens_of(outputs, "c")
    assert core.block_manager.num_free_blocks == 16
