"""Which block goes where: small pools worked out by hand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from cupaged.engine.block_manager import UNUSED, BlockManager


def manager_of(num_blocks: int, block_size: int = 4, max_num_seqs: int = 4) -> BlockManager:
    return BlockManager(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_blocks_per_seq=num_blocks,
    )


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks"), [(0, 0), (1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)]
)
def test_blocks_for_counts_whole_and_partial_blocks(num_tokens: int, num_blocks: int) -> None:
    assert manager_of(4).blocks_for(num_tokens) == num_blocks


def test_the_block_that_was_freed_longest_ago_is_taken_first() -> None:
    manager = manager_of(4)
    assert manager.allocate("a", 0, 5) == []
    assert manager.blocks_of("a") == [0, 1]
    manager.free("a")
    assert manager.allocate("b", 0, 16) == []
    assert manager.blocks_of("b") == [2, 3, 1, 0]  # of a sequence the tail goes first
    manager.audit()


def test_tokens_go_into_the_last_block_until_it_is_full() -> None:
    manager = manager_of(4)
    manager.allocate("a", 0, 3)
    assert manager.allocate("a", 3, 1) == []
    assert manager.blocks_of("a") == [0]
    assert manager.allocate("a", 4, 1) == []
    assert manager.blocks_of("a") == [0, 1]
    row = manager.block_table[manager.row("a")].tolist()
    assert row == [0, 1, UNUSED, UNUSED]


def test_nothing_changes_when_too_few_blocks_are_free() -> None:
    manager = manager_of(2)
    assert manager.allocate("a", 0, 9) is None
    assert (manager.num_free_blocks, manager.num_free_rows) == (2, 4)
    assert not manager.holds_blocks("a")
    assert manager.blocks_of("a") == []
    with pytest.raises(KeyError):
        manager.row("a")
    assert manager.allocate("a", 0, 8) == []
    assert manager.allocate("a", 8, 1) is None
    assert manager.blocks_of("a") == [0, 1]
    manager.audit()


def test_reserved_blocks_stay_free() -> None:
    manager = manager_of(4)
    assert manager.allocate("a", 0, 8, reserve=3) is None
    assert manager.allocate("a", 0, 8, reserve=2) == []
    assert manager.num_free_blocks == 2


def test_lookahead_tokens_get_blocks_that_trim_gives_back() -> None:
    manager = manager_of(4)
    manager.allocate("a", 0, 3, num_lookahead_tokens=6)
    assert manager.blocks_of("a") == [0, 1, 2]
    manager.trim("a", 4)
    assert manager.blocks_of("a") == [0]
    assert manager.num_free_blocks == 3
    manager.trim("a", 100)  # there is nothing past its end
    assert manager.blocks_of("a") == [0]
    manager.audit()


def test_the_first_write_to_a_shared_block_copies_it_and_the_last_holder_writes_in_place() -> None:
    manager = manager_of(6)
    manager.allocate("a", 0, 6)
    manager.fork("a", "b")
    manager.fork("a", "c")
    assert manager.ref_counts.tolist() == [3, 3, 0, 0, 0, 0]
    assert (manager.num_used_blocks, manager.num_shared_blocks) == (2, 2)
    assert manager.allocate("a", 6, 1) == [(1, 2)]
    assert manager.allocate("b", 6, 1) == [(1, 3)]
    assert manager.allocate("c", 6, 1) == []
    assert [manager.blocks_of(k) for k in "abc"] == [[0, 2], [0, 3], [0, 1]]
    assert manager.ref_counts.tolist() == [3, 1, 1, 1, 0, 0]
    manager.audit()


def test_a_full_shared_block_is_never_copied() -> None:
    manager = manager_of(4)
    manager.allocate("a", 0, 8)
    manager.fork("a", "b")
    assert manager.allocate("a", 8, 1) == []
    assert manager.allocate("b", 8, 1) == []
    assert (manager.blocks_of("a"), manager.blocks_of("b")) == ([0, 1, 2], [0, 1, 3])
    assert manager.num_shared_blocks == 2


def test_a_copy_needs_a_free_block() -> None:
    manager = manager_of(2)
    manager.allocate("a", 0, 6)
    manager.fork("a", "b")
    assert manager.allocate("b", 6, 1) is None
    assert manager.blocks_of("b") == [0, 1]
    manager.free("a")
    assert manager.allocate("b", 6, 1) == []  # it is alone now
    manager.audit()


def test_shared_blocks_are_free_when_the_last_holder_lets_go() -> None:
    manager = manager_of(4)
    manager.allocate("a", 0, 8)
    manager.fork("a", "b")
    manager.free("a")
    assert (manager.num_free_blocks, manager.num_used_blocks) == (2, 2)
    manager.free("b")
    assert (manager.num_free_blocks, manager.num_used_blocks) == (4, 0)
    manager.audit()


def test_freeing_again_or_freeing_nothing_does_nothing() -> None:
    manager = manager_of(4)
    manager.allocate("a", 0, 8)
    manager.free("a")
    manager.free("a")
    manager.free("unknown")
    assert manager.num_free_blocks == 4
    manager.audit()


def test_one_block_twice_in_a_release_is_a_broken_invariant() -> None:
    manager = manager_of(4)
    manager.allocate("a", 0, 4)
    with pytest.raises(AssertionError, match="is freed twice"):
        manager._release([0, 0])


def test_blocks_freed_in_flight_wait_for_the_steps_that_may_use_them() -> None:
    manager = manager_of(4)
    manager.allocate("a", 0, 8)
    manager.step_submitted(0)
    manager.step_submitted(1)
    manager.free("a")
    assert (manager.num_free_blocks, manager.num_quarantined_blocks) == (2, 2)
    assert manager.num_used_blocks == 0
    assert manager.allocate("b", 0, 12) is None
    manager.step_completed(0)
    assert manager.num_quarantined_blocks == 2
    manager.step_completed(1)
    assert (manager.num_free_blocks, manager.num_quarantined_blocks) == (4, 0)
    manager.audit()


def test_a_later_step_that_fails_does_not_end_the_quarantine_of_an_earlier_one() -> None:
    manager = manager_of(4)
    manager.allocate("a", 0, 8)
    manager.step_submitted(0)
    manager.step_submitted(1)
    manager.step_completed(1)  # it failed at once
    manager.free("a")
    assert manager.num_quarantined_blocks == 2
    manager.step_completed(0)
    assert manager.num_free_blocks == 4


def test_a_block_that_a_step_in_flight_copies_from_is_not_written() -> None:
    manager = manager_of(4)
    manager.allocate("a", 0, 3)
    manager.fork("a", "b")
    copies = manager.allocate("a", 3, 1)
    assert copies == [(0, 1)]
    assert manager.allocate("b", 3, 1) == []  # in the same step: copies are made first
    manager.step_submitted(0, copies)
    assert manager.allocate("b", 3, 1) is None
    manager.step_completed(0)
    assert manager.allocate("b", 3, 1) == []
    assert manager.blocks_of("b") == [0]


def test_utilisation_is_the_share_of_slots_with_a_token() -> None:
    manager = manager_of(8)
    num_computed = np.zeros(len(manager.block_table), np.int32)
    assert manager.kv_utilisation(num_computed) == 1.0
    manager.allocate("a", 0, 5)
    num_computed[manager.row("a")] = 5
    assert manager.kv_utilisation(num_computed) == 5 / 8
    manager.fork("a", "b")
    num_computed[manager.row("b")] = 5
    assert manager.kv_utilisation(num_computed) == 5 / 8  # a shared block counts once
    manager.allocate("c", 0, 12)
    num_computed[manager.row("c")] = 4
    assert manager.kv_utilisation(num_computed) == 9 / 20


def _lose_a_block(manager: BlockManager) -> None:
    manager._free.pop()


def _free_a_block_twice(manager: BlockManager) -> None:
    manager._free.append(manager._free[0])


def _free_a_used_block(manager: BlockManager) -> None:
    manager._free.append(0)


def _invent_a_block(manager: BlockManager) -> None:
    manager._free.append(99)


def _miscount(manager: BlockManager) -> None:
    manager.ref_counts[0] += 1


def _repeat_in_a_row(manager: BlockManager) -> None:
    manager.block_table[manager.row("a"), 1] = 0


def _leave_a_stale_tail(manager: BlockManager) -> None:
    manager.block_table[manager.row("a"), 3] = 0


def _write_a_wild_id(manager: BlockManager) -> None:
    manager.block_table[manager.row("a"), 1] = 99


def _lose_a_row(manager: BlockManager) -> None:
    manager._free_rows.pop()


def _soil_a_free_row(manager: BlockManager) -> None:
    manager.block_table[manager._free_rows[0], 0] = 0


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_lose_a_block, "5 free"),
        (_free_a_block_twice, "free or quarantined twice"),
        (_free_a_used_block, "a free block is in a block table"),
        (_invent_a_block, "out of range"),
        (_miscount, "reference counts differ at blocks"),
        (_repeat_in_a_row, "holds a block twice"),
        (_leave_a_stale_tail, "stale tail"),
        (_write_a_wild_id, "out of range"),
        (_lose_a_row, "a row is lost"),
        (_soil_a_free_row, "stale block"),
    ],
)
def test_audit_sees_damage(damage: Callable[[BlockManager], None], message: str) -> None:
    manager = manager_of(8)
    manager.allocate("a", 0, 5)
    manager.audit()
    damage(manager)
    with pytest.raises(AssertionError, match=message):
        manager.audit()
