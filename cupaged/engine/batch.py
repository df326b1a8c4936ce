"""The batch page: a step's plan, and the same as flat arrays. Every shape a kernel meets is here.

Nothing in the batch says prefill or decode. Sequence s has the new tokens
`query_start[s] : query_start[s + 1]` of the flat arrays, and after the step `context_len[s]` of its
tokens have their KV in blocks. The arrays are copies: the plan's sequences may change while a step
is in flight.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain, repeat

import numpy as np
from numpy.typing import NDArray

from cupaged.request import Sequence
from cupaged.sampling_params import GREEDY_TEMPERATURE

MAX_TEMPERATURE = 1e6  # beyond it the draw is uniform anyway, and float32 holds it
MAX_TOP_K = 2**31 - 1  # what int32 holds; more than any vocabulary


@dataclass(slots=True)
class ScheduledSequence:
    """Tokens [start, start + num_tokens) of a sequence; `num_samples` tokens are drawn after them.

    `num_samples` is 0 for a chunk that does not reach the sequence's last token, the request's `n`
    when its prompt is done, and 1 otherwise.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    num_samples: int


@dataclass(slots=True)
class StepPlan:
    """What one step does. The copies, (source block, destination block), are made before anything
    of the step is written.

    `block_tables` holds, per KV group, int32 [num_seqs, max_blocks]: the rows of the scheduled
    sequences as they were when the plan was made.
    """

    step_id: int
    scheduled: list[ScheduledSequence] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    block_tables: tuple[NDArray[np.int32], ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(s.num_tokens for s in self.scheduled)


@dataclass(frozen=True, slots=True)
class GroupTables:
    """Where the KV of one group of layers lies.

    block_table: int32 [num_seqs, max_blocks]; entries past a sequence's blocks are -1.
    slot_mapping: int64 [num_tokens]; block * block_size + offset of each new token, -1 for padding.
    """

    block_table: NDArray[np.int32]
    slot_mapping: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """How each token to draw is drawn. One row a sample; several may share a row of logits.

    logits_row: int32 [num_samples], index into the step's logits.
    temperature, top_p: float32 [num_samples]; temperature 0 is greedy.
    top_k: int32 [num_samples]; 0 means all.
    seed: uint64 [num_samples]; sample_index, output_position: int32 [num_samples]. Together they
        key the random numbers of the draw.
    banned: int32 [num_banned, 2], pairs (row of logits, token id) that must not be drawn.
    """

    logits_row: NDArray[np.int32]
    temperature: NDArray[np.float32]
    top_p: NDArray[np.float32]
    top_k: NDArray[np.int32]
    seed: NDArray[np.uint64]
    sample_index: NDArray[np.int32]
    output_position: NDArray[np.int32]
    banned: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Batch:
    """One step.

    token_ids, positions: int32 [num_tokens].
    query_start: int32 [num_seqs + 1]. context_len: int32 [num_seqs].
    groups: the tables of each KV group.
    copies: int32 [num_copies, 2], (source block, destination block), made first.
    logits_tokens: int32 [num_logits], the flat tokens whose logits are needed.
    sampling: the draws.
    """

    token_ids: NDArray[np.int32]
    positions: NDArray[np.int32]
    query_start: NDArray[np.int32]
    context_len: NDArray[np.int32]
    groups: tuple[GroupTables, ...]
    copies: NDArray[np.int32]
    logits_tokens: NDArray[np.int32]
    sampling: SamplingBatch

    @property
    def num_tokens(self) -> int:
        """New tokens in the step."""
        return len(self.token_ids)

    @property
    def num_seqs(self) -> int:
        """Sequences in the step."""
        return len(self.context_len)


def build_batch(plan: StepPlan, block_size: int) -> Batch:
    """Lay out a plan that is not empty. No Python call here depends on the number of sequences."""
    entries = plan.scheduled
    start = np.array([e.start for e in entries], np.int32)
    num_new = np.array([e.num_tokens for e in entries], np.int32)
    query_start = np.zeros(len(entries) + 1, np.int32)
    np.cumsum(num_new, out=query_start[1:])
    num_tokens = int(query_start[-1])
    token_ids = np.fromiter(
        chain.from_iterable(
            [e.sequence.token_ids[e.start : e.start + e.num_tokens] for e in entries]
        ),
        np.int32,
        num_tokens,
    )
    sequence = np.repeat(np.arange(len(entries)), num_new)
    positions = np.arange(num_tokens, dtype=np.int32) + (start - query_start[:-1])[sequence]
    groups = tuple(
        GroupTables(table, _slots(table, sequence, positions, block_size))
        for table in plan.block_tables
    )
    num_samples = np.array([e.num_samples for e in entries], np.int32)
    return Batch(
        token_ids=token_ids,
        positions=positions,
        query_start=query_start,
        context_len=start + num_new,
        groups=groups,
        copies=np.array(plan.copies, np.int32).reshape(-1, 2),
        logits_tokens=query_start[1:][num_samples > 0] - 1,
        sampling=_build_sampling(plan, num_samples),
    )


def _slots(
    table: NDArray[np.int32],
    sequence: NDArray[np.int64],
    positions: NDArray[np.int32],
    block_size: int,
) -> NDArray[np.int64]:
    blocks = table[sequence, positions // block_size].astype(np.int64)
    return blocks * block_size + positions % block_size


def _build_sampling(plan: StepPlan, num_samples: NDArray[np.int32]) -> SamplingBatch:
    drawn = [e.sequence for e in plan.scheduled if e.num_samples]
    repeats = num_samples[num_samples > 0]
    logits_row = np.repeat(np.arange(len(drawn), dtype=np.int32), repeats)
    first = np.array([s.index for s in drawn], np.int32)
    since_first = np.arange(len(logits_row)) - np.repeat(np.cumsum(repeats) - repeats, repeats)
    params = [s.request.core.params for s in drawn]
    asked = np.array([p.temperature for p in params], np.float64)
    temperature = np.where(asked < GREEDY_TEMPERATURE, 0.0, np.minimum(asked, MAX_TEMPERATURE))
    top_k = np.fromiter(map(min, [p.top_k for p in params], repeat(MAX_TOP_K)), np.int32)
    num_tokens = np.fromiter(map(len, [s.token_ids for s in drawn]), np.int32)
    output_position = num_tokens - np.array([s.request.num_prompt_tokens for s in drawn], np.int32)
    banned = [
        (row, token)
        for row, (s, position) in enumerate(zip(drawn, output_position.tolist(), strict=True))
        if position < s.request.core.params.min_tokens
        for token in s.request.banned_token_ids
    ]
    return SamplingBatch(
        logits_row=logits_row,
        temperature=temperature.astype(np.float32)[logits_row],
        top_p=np.array([p.top_p for p in params], np.float32)[logits_row],
        top_k=top_k[logits_row],
        seed=np.array([s.request.core.seed for s in drawn], np.uint64)[logits_row],
        sample_index=first[logits_row] + since_first.astype(np.int32),
        output_position=output_position[logits_row],
        banned=np.array(banned, np.int32).reshape(-1, 2),
    )
