"""Iteration-level scheduling on contiguous memory: Orca, as the PagedAttention paper rebuilt it.

A chunk that holds a sequence's prompt and an estimate of its output is taken from a buddy allocator
when the sequence is admitted, and kept until it ends. Sequences come first come first served; the
head of the queue waits until it has a chunk. Nothing is preempted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from bench.baselines.buddy import BuddyAllocator
from bench.traces import MAX_MODEL_LEN, TimedRequest
from bench.usage import StepUsage
from cupaged.engine.simulated_runner import StepCost

MAX_NUM_SEQS = 256
MAX_NUM_BATCHED_TOKENS = 2560

# How much output to reserve for, given what it will be.
OUTPUT_ESTIMATES: dict[str, Callable[[int], int]] = {
    "oracle": lambda output_tokens: output_tokens,
    "pow2": lambda output_tokens: 1 << (output_tokens - 1).bit_length(),
    "max": lambda output_tokens: MAX_MODEL_LEN,
}


def reserved_tokens(estimate: str, input_tokens: int, output_tokens: int) -> int:
    """Slots that are set aside for a sequence."""
    return min(input_tokens + OUTPUT_ESTIMATES[estimate](output_tokens), MAX_MODEL_LEN)


@dataclass(slots=True)
class _Running:
    """A sequence: its tokens with those of the step, its last length, its slots, its chunk."""

    num_tokens: int
    last_length: int
    num_slots: int
    chunk: tuple[int, int]
    num_computed_tokens: int = 0


def simulate_contiguous(
    load: Iterable[TimedRequest],
    estimate: str,
    cost: StepCost,
    *,
    num_blocks: int,
    block_size: int = 16,
    until_s: float,
) -> list[StepUsage]:
    """Every step that begins before `until_s`; `estimate` is a name in `OUTPUT_ESTIMATES`."""
    allocator = BuddyAllocator(num_blocks, MAX_MODEL_LEN // block_size)
    waiting = deque(load)
    running: list[_Running] = []
    steps: list[StepUsage] = []
    now_s = 0.0
    while now_s < until_s and (waiting or running):
        if not running:
            now_s = max(now_s, waiting[0].arrival_s)
        budget = MAX_NUM_BATCHED_TOKENS - len(running)
        while waiting and waiting[0].arrival_s <= now_s and len(running) < MAX_NUM_SEQS:
            _, input_tokens, output_tokens = waiting[0]
            slots = reserved_tokens(estimate, input_tokens, output_tokens)
            if input_tokens > budget:
                break
            chunk = allocator.allocate(-(-slots // block_size))
            if chunk is None:
                break
            running.append(_Running(input_tokens, input_tokens + output_tokens, slots, chunk))
            budget -= input_tokens
            waiting.popleft()
        token = sum(r.num_tokens for r in running)
        last_lengths = sum(r.last_length for r in running)
        all_slots = sum(r.num_slots for r in running)
        steps.append(
            StepUsage(now_s, len(running), token, last_lengths - token, all_slots - last_lengths)
        )
        computed = np.array([r.num_computed_tokens for r in running], np.int64)
        now_s += cost.seconds(computed, np.array([r.num_tokens for r in running]) - computed)
        for sequence in running:
            sequence.num_computed_tokens = sequence.num_tokens
            sequence.num_tokens += 1
            if sequence.num_tokens >= sequence.last_length:
                allocator.free(*sequence.chunk)
        running = [r for r in running if r.num_tokens < r.last_length]
    return steps
