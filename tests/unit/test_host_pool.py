"""The host's blocks: who holds which, and when they are free again."""

from __future__ import annotations

import pytest

from cupaged.engine.host_pool import HostPool


def test_what_is_shared_is_kept_once() -> None:
    pool = HostPool(6)
    pairs = pool.swap_out({"a": [4, 7], "b": [4, 9]}, 0)
    assert pairs == [(4, 0), (7, 1), (9, 2)]
    assert pool.blocks_of("a") == [0, 1]
    assert pool.blocks_of("b") == [0, 2]
    assert (pool.num_used_blocks, pool.num_free_blocks) == (3, 3)
    pool.audit()


def test_a_shared_block_is_free_when_its_last_holder_is_gone() -> None:
    pool = HostPool(3)
    pool.swap_out({"a": [4, 7], "b": [4, 9]}, 0)
    pool.step_ended(0)
    pool.release("a")
    assert (pool.num_used_blocks, pool.num_free_blocks) == (2, 1)
    pool.release("a")  # the second time it holds nothing
    pool.audit()
    pool.release("b")
    assert (pool.num_used_blocks, pool.num_free_blocks) == (0, 3)
    pool.audit()


def test_blocks_are_not_free_before_the_step_that_writes_them_has_ended() -> None:
    pool = HostPool(2)
    pool.swap_out({"a": [5]}, 3)
    assert not pool.is_written("a")
    pool.release("a")  # aborted
    assert (pool.num_used_blocks, pool.num_free_blocks) == (0, 1)
    pool.step_ended(2)
    assert pool.num_free_blocks == 1
    pool.audit()
    pool.step_ended(3)
    assert pool.num_free_blocks == 2
    pool.audit()


def test_blocks_are_not_free_before_the_step_that_reads_them_has_ended() -> None:
    pool = HostPool(2)
    pool.swap_out({"a": [5]}, 3)
    pool.step_ended(3)
    assert pool.is_written("a")
    pool.release("a", 8)
    assert pool.num_free_blocks == 1
    pool.step_ended(8)
    assert pool.num_free_blocks == 2
    pool.audit()


def test_one_sequence_leaves_once() -> None:
    pool = HostPool(4)
    pool.swap_out({"a": [5]}, 0)
    with pytest.raises(AssertionError, match="twice"):
        pool.swap_out({"a": [5]}, 1)


def test_the_audit_sees_a_lost_block() -> None:
    pool = HostPool(2)
    pool._free.pop()
    with pytest.raises(AssertionError, match="lost"):
        pool.audit()


def test_kept_blocks_count_as_free_and_the_oldest_gives_way() -> None:
    pool = HostPool(3)
    assert pool.keep([(7, b"a"), (8, b"b")], 0) == [(7, 0), (8, 1)]
    assert (pool.num_free_blocks, pool.num_kept_blocks) == (1, 2)  # the step writes two
    assert pool.find(b"a") is None
    pool.step_ended(0)
    assert (pool.find(b"a"), pool.find(b"b"), pool.find(b"c")) == (0, 1, None)
    assert pool.num_free_blocks == 3
    pool.use(b"a", 1)
    pool.audit()
    assert pool.swap_out({"s": [4, 5]}, 1) == [(4, 2), (5, 1)]  # what is free, then b
    assert (pool.find(b"a"), pool.find(b"b")) == (0, None)
    assert pool.keep([(9, b"c")], 1) == []  # no room: step 1 uses a
    pool.step_ended(1)
    assert pool.keep([(9, b"c")], 2) == [(9, 0)]
    assert pool.find(b"a") is None
    pool.audit()


def test_what_is_kept_already_is_used_and_not_written() -> None:
    pool = HostPool(2)
    pool.keep([(7, b"a"), (8, b"b")], 0)
    pool.step_ended(0)
    assert pool.keep([(3, b"a")], 1) == []
    pool.step_ended(1)
    assert pool.keep([(4, b"c")], 2) == [(4, 1)]  # in the place of b, which was used before
    pool.audit()


def test_a_block_that_is_dropped_is_free_after_the_last_step_that_uses_it() -> None:
    pool = HostPool(1)
    pool.keep([(7, b"a")], 0)
    pool.step_ended(0)
    pool.use(b"a", 1)
    pool.use(b"a", 2)
    pool.drop(b"a")
    pool.drop(b"a")
    pool.step_ended(1)
    assert (pool.num_free_blocks, pool.num_kept_blocks) == (0, 0)
    pool.audit()
    pool.step_ended(2)
    assert pool.num_free_blocks == 1
    pool.audit()


def test_what_a_failed_step_was_to_write_is_not_kept() -> None:
    pool = HostPool(2)
    pool.keep([(7, b"a")], 0)
    pool.step_ended(0)
    pool.keep([(7, b"a"), (8, b"b")], 1)
    pool.step_failed(1)
    pool.step_ended(1)
    assert (pool.find(b"a"), pool.find(b"b")) == (0, None)
    assert pool.num_free_blocks == 2
    pool.audit()


def test_what_is_evicted_twice_at_once_is_kept_once() -> None:
    pool = HostPool(3)
    assert pool.keep([(7, b"a"), (8, b"b"), (9, b"a")], 0) == [(9, 0), (8, 1)]
    pool.audit()
    pool.step_ended(0)
    assert (pool.find(b"a"), pool.find(b"b"), pool.num_free_blocks) == (0, 1, 3)
    pool.audit()


def test_the_last_of_what_is_evicted_is_kept() -> None:
    pool = HostPool(2)
    pool.keep([(7, b"a"), (8, b"b")], 0)
    pool.step_ended(0)
    assert pool.keep([(3, b"c"), (7, b"a"), (4, b"d")], 1) == [(4, 1)]
    assert pool.num_kept_blocks == 2  # a, and d in the place of b
    pool.audit()
