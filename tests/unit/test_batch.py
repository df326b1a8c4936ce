"""The flat arrays of a step, worked out by hand."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from cupaged.engine.batch import Batch, ScheduledSequence, StepPlan, build_batch
from cupaged.engine.sequence_table import MAX_COUNT, MAX_TEMPERATURE, RECORD, record_of
from cupaged.outputs import TokenLogprobs
from cupaged.request import CoreRequest, Request, Sequence
from cupaged.sampling_params import SamplingParams

BLOCK_SIZE = 4


def sequence_of(
    prompt: tuple[int, ...],
    output: tuple[int, ...] = (),
    *,
    index: int = 0,
    seed: int = 0,
    eos: tuple[int, ...] = (),
    **params: Any,
) -> Sequence:
    core = CoreRequest("a", prompt, SamplingParams(**params), eos, seed)
    sequence = Request(core, arrival=0, max_tokens=99).sequences[0]
    sequence.index = index
    sequence.token_ids += output
    return sequence


def plan_of(*entries: tuple[Sequence, int, int, int], table: list[list[int]]) -> StepPlan:
    sequences = [sequence for sequence, *_ in entries]
    for sequence, start, *_ in entries:
        sequence.num_computed_tokens = start
    plan = StepPlan(7, block_tables=(np.array(table, np.int32),))
    num_new = np.array([num for _, _, num, _ in entries], np.int32)
    plan.add(sequences, np.arange(len(entries), dtype=np.int32), num_new)
    plan.freeze(np.array([record_of(sequence) for sequence in sequences], RECORD))
    assert plan.scheduled == [ScheduledSequence(*entry) for entry in entries]
    return plan


def mixed() -> Batch:
    """A decode at position 4, a chunk [2, 5) of 6 tokens, a whole prompt of 2 with 3 samples."""
    decode = sequence_of(
        (10, 11, 12), (13, 14), index=2, seed=2**64 - 1, temperature=0.5, logprobs=2
    )
    chunk = sequence_of((20, 21, 22, 23, 24, 25), seed=1, logprobs=5)
    prompt = sequence_of(
        (30, 31), n=3, seed=2, top_k=3, top_p=0.25, min_p=0.125, trace_decode_token_ids=[8, 9]
    )
    plan = plan_of(
        (decode, 4, 1, 1), (chunk, 2, 3, 0), (prompt, 0, 2, 3), table=[[5, 2], [0, 9], [7, -1]]
    )
    plan.copies = [(3, 2), (4, 6)]
    return build_batch(plan, BLOCK_SIZE)


def test_tokens_positions_and_slots() -> None:
    batch = mixed()
    assert (batch.num_tokens, batch.num_seqs) == (6, 3)
    assert batch.token_ids.tolist() == [14, 22, 23, 24, 30, 31]
    assert batch.positions.tolist() == [4, 2, 3, 4, 0, 1]
    assert batch.query_start.tolist() == [0, 1, 4, 6]
    assert batch.context_len.tolist() == [5, 5, 2]
    (group,) = batch.groups
    assert group.block_table.tolist() == [[5, 2], [0, 9], [7, -1]]
    assert group.slot_mapping.tolist() == [8, 2, 3, 36, 28, 29]
    assert batch.copies.tolist() == [[3, 2], [4, 6]]


def test_draws() -> None:
    batch = mixed()
    sampling = batch.sampling
    assert batch.logits_tokens.tolist() == [0, 5]  # the chunk in the middle needs no logits
    assert sampling.logits_row.tolist() == [0, 1, 1, 1]
    assert sampling.seed.tolist() == [2**64 - 1, 2, 2, 2]
    assert sampling.sample_index.tolist() == [2, 0, 1, 2]
    assert sampling.output_position.tolist() == [2, 0, 0, 0]
    assert sampling.temperature.tolist() == [0.5, 1.0, 1.0, 1.0]
    assert sampling.top_k.tolist() == [0, 3, 3, 3]
    assert sampling.top_p.tolist() == [1.0, 0.25, 0.25, 0.25]
    assert sampling.min_p.tolist() == [0.0, 0.125, 0.125, 0.125]
    assert sampling.forced.tolist() == [-1, 8, 8, 8]
    assert sampling.num_logprobs.tolist() == [2, -1, -1, -1]
    assert sampling.edits is None
    assert batch.prompt_logprobs is None


def test_dtypes_are_those_of_the_kernels() -> None:
    batch = mixed()
    (group,) = batch.groups
    held = sequence_of((1, 2), min_tokens=1, stop_token_ids=[9], prompt_logprobs=1)
    second = build_batch(plan_of((held, 0, 2, 1), table=[[3]]), BLOCK_SIZE)
    edits, prompts = second.sampling.edits, second.prompt_logprobs
    assert edits is not None and prompts is not None
    int32 = [
        batch.token_ids,
        batch.positions,
        batch.query_start,
        batch.context_len,
        batch.copies,
        batch.logits_tokens,
        group.block_table,
        batch.sampling.logits_row,
        batch.sampling.top_k,
        batch.sampling.sample_index,
        batch.sampling.output_position,
        batch.sampling.forced,
        batch.sampling.num_logprobs,
        edits.bias,
        edits.repetition,
        edits.subtracted,
        edits.allowed_rows,
        edits.allowed,
        edits.banned,
        prompts.tokens,
        prompts.targets,
        prompts.counts,
        prompts.num_logprobs,
    ]
    assert {a.dtype for a in int32} == {np.dtype(np.int32)}
    assert group.slot_mapping.dtype == np.int64
    assert batch.sampling.seed.dtype == np.uint64
    float32 = [
        batch.sampling.temperature,
        batch.sampling.top_p,
        batch.sampling.min_p,
        edits.bias_values,
        edits.repetition_values,
        edits.subtracted_values,
    ]
    assert {a.dtype for a in float32} == {np.dtype(np.float32)}


def test_a_step_without_draws_has_empty_arrays() -> None:
    chunk = sequence_of((1, 2, 3, 4, 5))
    batch = build_batch(plan_of((chunk, 0, 4, 0), table=[[3]]), BLOCK_SIZE)
    assert batch.groups[0].slot_mapping.tolist() == [12, 13, 14, 15]
    assert batch.logits_tokens.tolist() == []
    names = {field.name for field in fields(batch.sampling)} - {"edits"}
    assert {getattr(batch.sampling, name).shape for name in names} == {(0,)}
    assert batch.sampling.edits is None
    assert batch.copies.shape == (0, 2)


@pytest.mark.parametrize("block_size", [1, 2, 4, 8])
def test_slots_at_the_edges_of_blocks(block_size: int) -> None:
    """Blocks in falling order, so that a slot tells which block and which offset it is."""
    sequence = sequence_of(tuple(range(9)))
    blocks = list(range(20, 20 - -(-9 // block_size), -1))
    batch = build_batch(plan_of((sequence, 3, 6, 1), table=[blocks]), block_size)
    assert batch.positions.tolist() == [3, 4, 5, 6, 7, 8]
    assert (
        batch.groups[0].slot_mapping.tolist()
        == {
            1: [17, 16, 15, 14, 13, 12],
            2: [39, 36, 37, 34, 35, 32],
            4: [83, 76, 77, 78, 79, 72],
            8: [163, 164, 165, 166, 167, 152],
        }[block_size]
    )


def test_the_arrays_do_not_follow_what_happens_later() -> None:
    sequence = sequence_of((1, 2, 3), min_tokens=1, stop_token_ids=[9])
    batch = build_batch(plan_of((sequence, 0, 3, 1), table=[[3]]), BLOCK_SIZE)
    sequence.token_ids += [4, 5]
    sequence.num_computed_tokens = 3
    assert batch.token_ids.tolist() == [1, 2, 3]
    assert batch.sampling.output_position.tolist() == [0]


def test_rows_of_a_batch_do_not_share_their_limits() -> None:
    greedy = sequence_of((1,), temperature=0.0)
    others = [sequence_of((1,), top_k=top_k) for top_k in (3, -1, 0, 9_999_999, 2**62)]
    entries = [(s, 0, 1, 1) for s in (greedy, *others)]
    batch = build_batch(plan_of(*entries, table=[[i] for i in range(6)]), BLOCK_SIZE)
    assert batch.sampling.top_k.tolist() == [0, 3, 0, 0, 9_999_999, MAX_COUNT]
    assert batch.sampling.temperature.tolist() == [0.0, 1.0, 1.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("temperature", "used"),
    [(0.0, 0.0), (9e-6, 0.0), (1.0, 1.0), (1e308, MAX_TEMPERATURE), (5e-324, 0.0)],
)
def test_temperatures_fit_float32(temperature: float, used: float) -> None:
    sequence = sequence_of((1,), temperature=temperature)
    batch = build_batch(plan_of((sequence, 0, 1, 1), table=[[0]]), BLOCK_SIZE)
    assert batch.sampling.temperature.tolist() == [used]


def test_ending_tokens_are_banned_until_min_tokens_are_there() -> None:
    def banned(num_output: int, **params: Any) -> list[list[int]]:
        chunk = sequence_of((1, 2))
        free = sequence_of((1, 2), stop_token_ids=[5])
        held = sequence_of((1, 2), (3,) * num_output, eos=(7, 9), min_tokens=2, **params)
        end = held.num_tokens
        entries = (chunk, 0, 1, 0), (free, 0, 2, 1), (held, 0, end, 1)
        batch = build_batch(plan_of(*entries, table=[[0, 1], [2, 3], [4, 5]]), BLOCK_SIZE)
        assert batch.sampling.edits is not None
        return sorted(batch.sampling.edits.banned.tolist())

    assert banned(0) == [[1, 7], [1, 9]]  # row 1 of the logits: the chunk has none
    assert banned(1, stop_token_ids=[9, 4]) == [[1, 4], [1, 7], [1, 9]]
    assert banned(1, stop_token_ids=[4], ignore_eos=True) == [[1, 4]]
    assert banned(2, stop_token_ids=[4]) == []


# ---- prompt logprobs -----------------------------------------------------------------------------


def prompts_of(*entries: tuple[Sequence, int, int, int]) -> tuple[list[int], ...] | None:
    """tokens, targets, counts and numbers of logprobs of the page."""
    batch = build_batch(plan_of(*entries, table=[[1, 2]] * len(entries)), BLOCK_SIZE)
    found = batch.prompt_logprobs
    if found is None:
        return None
    columns = (found.tokens, found.targets, found.counts, found.num_logprobs)
    return tuple(column.tolist() for column in columns)


def known(sequence: Sequence, num: int) -> Sequence:
    """The same, when the logprobs of so many prompt tokens have come."""
    sequence.request.prompt_logprobs = [TokenLogprobs([0], [0.0], [1])] * num
    return sequence


def test_prompt_logprobs_of_chunks() -> None:
    """A token tells of the next; the last of the prompt tells of nothing that is known."""
    silent = sequence_of((1, 2, 3, 4))
    whole = sequence_of((10, 11, 12), prompt_logprobs=2)
    middle = known(sequence_of((20, 21, 22, 23, 24, 25), prompt_logprobs=-1), 2)
    last = known(sequence_of((30, 31, 32, 33, 34), prompt_logprobs=0), 3)
    single = sequence_of((40,), prompt_logprobs=1)
    assert prompts_of((silent, 0, 4, 1), (single, 0, 1, 1)) is None
    assert prompts_of(
        (silent, 0, 4, 1), (whole, 0, 3, 1), (middle, 2, 2, 0), (last, 3, 2, 1), (single, 0, 1, 1)
    ) == (
        [4, 5, 7, 8, 9],
        [11, 12, 23, 24, 34],
        [0, 2, 2, 1, 0],
        [2, 2, MAX_COUNT, MAX_COUNT, 0],
    )


def test_prompt_logprobs_are_not_told_twice() -> None:
    """A prompt that is computed again, as far as it was known, and a step beyond."""
    sequence = known(sequence_of((20, 21, 22, 23, 24, 25), (7, 8), prompt_logprobs=1), 3)
    assert prompts_of((sequence, 0, 2, 0)) == ([], [], [0], [])
    assert prompts_of((sequence, 0, 3, 0)) == ([], [], [0], [])
    assert prompts_of((sequence, 0, 4, 0)) == ([3], [24], [1], [1])
    assert prompts_of((sequence, 2, 3, 0)) == ([1, 2], [24, 25], [2], [1, 1])
    assert prompts_of((sequence, 0, 8, 1)) == ([3, 4], [24, 25], [2], [1, 1])
    assert prompts_of((known(sequence, 5), 0, 8, 1)) is None
