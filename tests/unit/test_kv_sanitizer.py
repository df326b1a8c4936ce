"""The KV sanitizer: every kind of misuse of the pool, done on purpose, and what it says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cupaged.engine import hash_runner, kv_sanitizer
from cupaged.engine.batch import Batch, StepPlan, build_batch
from cupaged.engine.core import EngineCore
from cupaged.errors import KVSanitizerError
from tests.unit.small_core import drain, request, small_core

Damage = Callable[[EngineCore, StepPlan], None]


def misuse(core: EngineCore, num_good_steps: int, damage: Damage) -> KVSanitizerError:
    """Make good steps, and then one whose plan is damaged."""
    schedule = core._schedule
    for _ in range(num_good_steps):
        core.step()

    def schedule_badly() -> StepPlan:
        plan = schedule()
        damage(core, plan)
        return plan

    core._schedule = schedule_badly
    with pytest.raises(KVSanitizerError) as caught:
        core.step()
    return caught.value


def two_decoding(**limits: Any) -> EngineCore:
    """After one step "a" holds blocks 0 and 1 with 6 tokens, and "b" holds 2 and 3 with 6."""
    core = small_core(enable_prefix_caching=False, **limits)
    core.add_request(request("a", 6, max_tokens=8))
    core.add_request(request("b", 6, max_tokens=8))
    return core


def what(error: KVSanitizerError) -> str:
    """The first line, without what all have in common."""
    return str(error).partition("\n")[0].removeprefix("KV sanitizer: ")


# ---- reads ---------------------------------------------------------------------------------------


def test_a_table_that_names_the_block_of_another_sequence() -> None:
    def damage(core: EngineCore, plan: StepPlan) -> None:
        plan.block_tables[0][1, 0] = 0

    error = misuse(two_decoding(), 1, damage)
    assert str(error) == (
        "KV sanitizer: step 1: request 'b' sample 0 reads slot 0 of block 0: the sequence does not "
        "own the block (position 0)\n"
        "block 0:\n"
        "  step 0: handed out to request 'a' sample 0\n"
        "  step 0: slots 0-3 written by request 'a' sample 0"
    )
    assert (error.request_id, error.block, error.slot, error.layer) == ("b", 0, 0, None)
    assert error.history == (
        "step 0: handed out to request 'a' sample 0",
        "step 0: slots 0-3 written by request 'a' sample 0",
    )


def test_the_block_managers_own_table_names_the_block_of_another_sequence() -> None:
    """Plan and table agree; only the tokens tell."""

    def damage(core: EngineCore, plan: StepPlan) -> None:
        core.block_manager.block_table[core.block_manager.row((1, 0)), 0] = 1
        plan.block_tables[0][1, 0] = 1

    error = misuse(two_decoding(), 1, damage)
    assert (
        what(error) == "step 1: request 'a' sample 0 writes slot 2 of block 1: 2 sequences share it"
    )
    core = small_core(enable_prefix_caching=False)
    core.add_request(request("a", 6, max_tokens=8))
    core.add_request(request("b", 10, max_tokens=8))

    def swap(core: EngineCore, plan: StepPlan) -> None:
        row = core.block_manager.row((1, 0))
        for table in (core.block_manager.block_table[row], plan.block_tables[0][1]):
            table[[0, 1]] = table[[1, 0]]

    error = misuse(core, 1, swap)
    assert what(error) == (
        "step 1: request 'b' sample 0 reads slot 0 of block 3: other tokens than the sequence's "
        "own lie there (position 0)"
    )


def test_a_slot_that_was_never_written() -> None:
    """The count of computed tokens is one too high, as if a token had been computed."""
    core = two_decoding()
    core.step()
    sequence = core.scheduler.running[0]
    sequence.append(5)
    sequence.num_computed_tokens += 1
    error = misuse(core, 0, lambda core, plan: None)
    assert what(error) == (
        "step 1: request 'a' sample 0 reads slot 2 of block 1: nothing was written there since the "
        "block was handed out (position 6)"
    )
    assert error.history == (
        "step 0: handed out to request 'a' sample 0",
        "step 0: slots 0-1 written by request 'a' sample 0",
    )


def test_a_block_that_was_given_back() -> None:
    def damage(core: EngineCore, plan: StepPlan) -> None:
        core.block_manager.ref_counts[2] = 0

    error = misuse(two_decoding(), 1, damage)
    assert what(error) == (
        "step 1: request 'b' sample 0 reads slot 0 of block 2: the block was given back "
        "(position 0)"
    )
    assert error.history == (
        "step 0: handed out to request 'b' sample 0",
        "step 0: slots 0-3 written by request 'b' sample 0",
    )


def test_a_block_that_was_handed_out_again() -> None:
    """What it held is gone, though its old holder still names it."""

    def damage(core: EngineCore, plan: StepPlan) -> None:
        core.block_manager.generations[0] += 1

    error = misuse(two_decoding(), 2, damage)
    assert what(error) == (
        "step 2: request 'a' sample 0 reads slot 0 of block 0: nothing was written there since the "
        "block was handed out (position 0)"
    )
    assert error.history[-1] == "step 2: handed out to request 'a' sample 0"


def test_a_sequence_without_blocks() -> None:
    def damage(core: EngineCore, plan: StepPlan) -> None:
        core.block_manager.free((0, 0))

    error = misuse(two_decoding(), 1, damage)
    assert what(error) == (
        "step 1: request 'a' sample 0 reads slot 0 of block 0: the sequence holds no blocks"
    )


def test_a_prefix_of_another_salt_is_another_sequences() -> None:
    core = small_core()
    core.add_request(replace(request("a", 6, max_tokens=1), cache_salt="one"))
    drain(core)
    core.add_request(replace(request("b", 6, max_tokens=1), cache_salt="two"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core.scheduler.prefix_cache, "find", lambda sequence: [0])
        error = misuse(core, 0, lambda core, plan: None)
    assert what(error) == (
        "step 1: request 'b' sample 0 reads slot 0 of block 0: other tokens than the sequence's "
        "own lie there (position 0)"
    )
    assert error.history == (
        "step 0: handed out to request 'a' sample 0",
        "step 0: slots 0-3 written by request 'a' sample 0",
        "step 1: held by request 'b' sample 0",
    )


# ---- writes --------------------------------------------------------------------------------------


def bad_batch(monkeypatch: pytest.MonkeyPatch, damage: Callable[[Batch], Batch]) -> None:
    """Every batch from now on is damaged, for the sanitizer as for the runner."""

    def build_badly(plan: StepPlan, block_size: int) -> Batch:
        return damage(build_batch(plan, block_size))

    monkeypatch.setattr(kv_sanitizer, "build_batch", build_badly)
    monkeypatch.setattr(hash_runner, "build_batch", build_badly)


@pytest.mark.parametrize(
    ("token", "slot", "place", "right"),
    [
        (0, 7, "slot 3 of block 1", "slot 2 of block 1"),
        (1, 6, "slot 2 of block 1", "slot 2 of block 3"),
        (1, 40, "slot 0 of block 10", "slot 2 of block 3"),
        (1, 400, "slot 0 of block 100", "slot 2 of block 3"),
        (0, -1, "slot 3 of block -1", "slot 2 of block 1"),
    ],
)
def test_a_slot_mapping_that_points_elsewhere(
    monkeypatch: pytest.MonkeyPatch, token: int, slot: int, place: str, right: str
) -> None:
    core = two_decoding()
    core.step()

    def damage(batch: Batch) -> Batch:
        batch.groups[0].slot_mapping[token] = slot
        return batch

    bad_batch(monkeypatch, damage)
    assert what(misuse(core, 0, lambda core, plan: None)) == (
        f"step 1: request '{'ab'[token]}' sample 0 writes {place}: position 6 belongs into {right}"
    )


def test_tokens_that_are_not_the_sequences_own(monkeypatch: pytest.MonkeyPatch) -> None:
    core = two_decoding()
    core.step()

    def damage(batch: Batch) -> Batch:
        batch.token_ids[1] += 1
        return batch

    bad_batch(monkeypatch, damage)
    assert what(misuse(core, 0, lambda core, plan: None)) == (
        "step 1: request 'b' sample 0 reads slot 2 of block 3: other tokens than the sequence's "
        "own lie there (position 6)"
    )


def test_a_context_that_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    core = two_decoding()
    core.step()

    def damage(batch: Batch) -> Batch:
        batch.context_len[1] += 1
        return batch

    bad_batch(monkeypatch, damage)
    assert what(misuse(core, 0, lambda core, plan: None)) == (
        "step 1: request 'b' sample 0 reads slot 3 of block 3: position 7 lies beyond the "
        "sequence's tokens"
    )


def test_a_shared_block() -> None:
    """Two samples share the block of the prompt's end; nobody makes a private one."""
    core = small_core(enable_prefix_caching=False)
    core.add_request(request("a", 6, n=2, max_tokens=4))

    def damage(core: EngineCore, plan: StepPlan) -> None:
        manager = core.block_manager
        rows = [manager.row(e.sequence.order) for e in plan.scheduled]
        assert plan.copies == [(1, 2)]
        plan.copies.clear()
        manager.block_table[rows[0], 1] = plan.block_tables[0][0, 1] = 1
        manager.ref_counts[[1, 2]] = 2, 0

    error = misuse(core, 1, damage)
    assert (
        what(error) == "step 1: request 'a' sample 0 writes slot 2 of block 1: 2 sequences share it"
    )
    assert error.history[-1] == "step 1: held by request 'a' sample 0, request 'a' sample 1"


def test_a_block_of_nobody() -> None:
    def damage(core: EngineCore, plan: StepPlan) -> None:
        core.block_manager.ref_counts[3] = 0

    error = misuse(two_decoding(), 1, damage)
    assert what(error) == (
        "step 1: request 'b' sample 0 writes slot 2 of block 3: the block was given back"
    )


# ---- copies --------------------------------------------------------------------------------------


def sampling_core() -> EngineCore:
    """After one step two samples share block 1, and a copy of it into block 2 is due."""
    core = small_core(enable_prefix_caching=False)
    core.add_request(request("a", 6, n=2, max_tokens=4))
    return core


@pytest.mark.parametrize(
    ("copies", "said"),
    [
        ([], "request 'a' sample 0 reads slot 0 of block 2: nothing was written there since the "
         "block was handed out (position 4)"),
        ([(0, 2)], "request 'a' sample 0 reads slot 0 of block 2: other tokens than the sequence's "
         "own lie there (position 4)"),
        ([(5, 2)], "a copy reads slot 0 of block 5: nothing was written there since the block was "
         "handed out"),
        ([(1, 2), (1, 0)], "a copy writes slot 0 of block 0: 2 sequences hold the block"),
        ([(1, 2), (1, 7)], "a copy writes slot 0 of block 7: 0 sequences hold the block"),
    ],
)  # fmt: skip
def test_a_list_of_copies_that_is_wrong(copies: list[tuple[int, int]], said: str) -> None:
    def damage(core: EngineCore, plan: StepPlan) -> None:
        assert plan.copies == [(1, 2)]
        plan.copies[:] = copies

    assert what(misuse(sampling_core(), 1, damage)) == f"step 1: {said}"


def test_a_copy_is_in_the_history() -> None:
    core = sampling_core()
    error = misuse(core, 2, lambda core, plan: core.block_manager.ref_counts.put(2, 0))
    assert error.history == (
        "step 1: handed out to request 'a' sample 0",
        "step 1: copied from block 1",
        "step 1: slot 2 written by request 'a' sample 0",
    )
