"""The allocators and batches that paging is compared with, by hand."""

from __future__ import annotations

import pytest

from bench.baselines.buddy import BuddyAllocator
from bench.baselines.contiguous import reserved_tokens, simulate_contiguous
from bench.baselines.request_level import simulate_request_level
from bench.traces import TimedRequest
from bench.usage import StepUsage
from cupaged.engine.simulated_runner import StepCost

ONE_SECOND = StepCost(1.0)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


def free_chunks(allocator: BuddyAllocator) -> dict[int, list[int]]:
    return {size: chunks for size in SIZES if (chunks := allocator.free_chunks(size))}


def test_the_pool_is_carved_from_its_start() -> None:
    assert free_chunks(BuddyAllocator(983, 128)) == {
        128: [0, 128, 256, 384, 512, 640, 768], 64: [896], 16: [960], 4: [976], 2: [980], 1: [982],
    }  # fmt: skip


def test_the_smallest_chunk_that_suffices_is_split() -> None:
    allocator = BuddyAllocator(983, 128)
    assert allocator.allocate(100) == (768, 128)  # of equal ones the last
    assert allocator.allocate(3) == (976, 4)
    assert allocator.allocate(5) == (960, 8)  # of 16 the low half
    assert allocator.allocate(1) == (982, 1)
    assert allocator.allocate(1) == (980, 1)
    assert free_chunks(allocator) == {
        128: [0, 128, 256, 384, 512, 640], 64: [896], 8: [968], 1: [981],
    }  # fmt: skip


def test_halves_unite_when_both_are_free() -> None:
    allocator = BuddyAllocator(983, 128)
    before = free_chunks(allocator)
    chunks = [allocator.allocate(n) for n in (5, 5, 100, 3, 33, 33)]
    assert free_chunks(allocator) != before
    for chunk in chunks[::2] + chunks[1::2]:
        assert chunk is not None
        allocator.free(*chunk)
    assert free_chunks(allocator) == before


def test_a_chunk_is_not_made_of_parts() -> None:
    allocator = BuddyAllocator(12, 8)  # 8 and 4
    assert allocator.allocate(4) == (8, 4)
    assert allocator.allocate(8) == (0, 8)
    assert allocator.allocate(1) is None


@pytest.mark.parametrize(
    ("estimate", "tokens", "reserved"),
    [
        ("oracle", (10, 25), 35),
        ("pow2", (10, 25), 42),
        ("pow2", (10, 32), 42),
        ("pow2", (10, 33), 74),
        ("max", (7, 3), 2048),  # 2,038 slots are never filled
        ("pow2", (1030, 1010), 2048),
    ],
)
def test_what_is_reserved(estimate: str, tokens: tuple[int, int], reserved: int) -> None:
    assert reserved_tokens(estimate, *tokens) == reserved


def test_the_head_of_the_queue_waits_for_a_chunk() -> None:
    load = [TimedRequest(0.0, 4, 2), TimedRequest(0.0, 3, 1), TimedRequest(9.5, 3, 1)]
    steps = simulate_contiguous(load, "max", ONE_SECOND, num_blocks=128, until_s=99.0)
    assert steps == [
        StepUsage(0.0, 1, 4, 2, 2042),
        StepUsage(1.0, 1, 5, 1, 2042),
        StepUsage(2.0, 1, 3, 1, 2044),
        StepUsage(9.5, 1, 3, 1, 2044),
    ]


def test_sequences_join_while_others_run() -> None:
    load = [TimedRequest(0.0, 16, 3), TimedRequest(0.5, 16, 1)]
    steps = simulate_contiguous(load, "oracle", ONE_SECOND, num_blocks=4, until_s=2.0)
    assert steps == [StepUsage(0.0, 1, 16, 3, 0), StepUsage(1.0, 2, 33, 3, 0)]


def test_a_batch_is_padded_and_leaves_as_one() -> None:
    load = [TimedRequest(0.0, 3, 3), TimedRequest(0.0, 5, 1), TimedRequest(0.0, 1, 1)]
    cost = StepCost(1.0, prefill_token_s=0.25)
    assert simulate_request_level(load, 2, cost, until_s=99.0) == [
        StepUsage(0.0, 2, 8, 4, 4),
        StepUsage(3.5, 2, 10, 2, 4),  # the prompts cost 10 padded tokens
        StepUsage(4.5, 2, 11, 1, 4),
        StepUsage(5.5, 1, 1, 1, 0),
    ]


def test_a_batch_fits_the_context() -> None:
    load = [TimedRequest(0.0, 1000, 1), TimedRequest(0.0, 1, 1041)]
    steps = simulate_request_level(load, 2, ONE_SECOND, until_s=3.0)
    assert [step.num_sequences for step in steps] == [1, 1, 1]
