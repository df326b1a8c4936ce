"""The batch page: a step's plan, and the same as flat arrays. Every shape a kernel meets is here.

Nothing in the batch says prefill or decode. Sequence s has the new tokens
`query_start[s] : query_start[s + 1]` of the flat arrays, and after the step `context_len[s]` of its
tokens have their KV in blocks. The arrays are copies: the plan's sequences may change while a step
is in flight.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupaged.engine.sampling_batch import SamplingBatch, build_sampling
from cupaged.engine.sequence_table import MAX_COUNT, RECORD, Records
from cupaged.request import Sequence

Ids = NDArray[np.int32]


def _no_ids() -> Ids:
    return np.zeros(0, np.int32)


class ScheduledSequence(NamedTuple):
    """Tokens [start, start + num_tokens) of a sequence, and how many are drawn after them."""

    sequence: Sequence
    start: int
    num_tokens: int
    num_samples: int


@dataclass(slots=True)
class StepPlan:
    """What one step does, a column a fact and an entry a sequence.

    sequences: those that the step moves on.
    rows: int32 [num_seqs], their rows in the tables.
    num_new: int32 [num_seqs], tokens that the step computes of each.
    records: `RECORD` [num_seqs], what the sequences' table said when the plan was made.
    num_samples: int32 [num_seqs], tokens that are drawn after them: 0 for a chunk that does not
        reach the sequence's last token, the request's `n` when its prompt is done, and 1 otherwise.
    swap_out, swap_in, copies: (source block, destination block), made in this order before anything
        of the step is written: from the device to the host, from the host to the device, on the
        device.
    swapped_out, swapped_in: the sequences whose blocks these are; the former are preempted, too.
    block_tables: per KV group int32 [num_seqs, max_blocks], the rows of the sequences as they were
        when the plan was made.
    """

    step_id: int
    sequences: list[Sequence] = field(default_factory=list)
    rows: Ids = field(default_factory=_no_ids)
    num_new: Ids = field(default_factory=_no_ids)
    records: Records = field(default_factory=lambda: np.zeros(0, RECORD))
    num_samples: Ids = field(default_factory=_no_ids)
    copies: list[tuple[int, int]] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    swapped_out: list[Sequence] = field(default_factory=list)
    swapped_in: list[Sequence] = field(default_factory=list)
    block_tables: tuple[Ids, ...] = ()

    def add(self, sequences: list[Sequence], rows: Ids, num_new: Ids) -> None:
        """More sequences, each with its number of new tokens."""
        self.sequences += sequences
        self.rows = np.concatenate([self.rows, rows]) if len(self.rows) else rows
        self.num_new = np.concatenate([self.num_new, num_new]) if len(self.num_new) else num_new

    def freeze(self, records: Records) -> None:
        """No more will be added; `records` are those of the sequences."""
        self.records = records
        is_last = self.start + self.num_new == records["num_tokens"]
        self.num_samples = np.where(is_last, records["num_pending_samples"], 0)

    @property
    def start(self) -> Ids:
        """int32 [num_seqs], tokens of each sequence that were computed before."""
        start: Ids = self.records["num_computed_tokens"]
        return start

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return int(self.num_new.sum())

    @property
    def scheduled(self) -> list[ScheduledSequence]:
        """The same, an object a sequence: for those who look at few of them, or have time."""
        columns = (self.start.tolist(), self.num_new.tolist(), self.num_samples.tolist())
        return list(map(ScheduledSequence, self.sequences, *columns))


@dataclass(frozen=True, slots=True)
class GroupTables:
    """Where the KV of one group of layers lies.

    block_table: int32 [num_seqs, max_blocks]; entries past a sequence's blocks are -1.
    slot_mapping: int64 [num_tokens]; block * block_size + offset of each new token, -1 for padding.
    """

    block_table: NDArray[np.int32]
    slot_mapping: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PromptLogprobsBatch:
    """Log probabilities of prompt tokens that the step can tell.

    tokens: int32 [n], the flat tokens whose logits are needed. targets: int32 [n], the prompt token
    that follows each. counts: int32 [num_seqs], how many of them belong to each sequence.
    num_logprobs: int32 [n], likeliest tokens to report beside the target, at most the vocabulary.
    """

    tokens: NDArray[np.int32]
    targets: NDArray[np.int32]
    counts: NDArray[np.int32]
    num_logprobs: NDArray[np.int32]


def _pairs(pairs: list[tuple[int, int]]) -> NDArray[np.int32]:
    return np.array(pairs, np.int32).reshape(-1, 2)


def _no_pairs() -> NDArray[np.int32]:
    return _pairs([])


@dataclass(frozen=True, slots=True)
class Batch:
    """One step.

    token_ids, positions: int32 [num_tokens].
    query_start: int32 [num_seqs + 1]. context_len: int32 [num_seqs].
    groups: the tables of each KV group.
    swap_out, swap_in, copies: int32 [n, 2] each, (source block, destination block); made first, in
        this order. Swaps go from the device to the host, and from the host to the device.
    logits_tokens: int32 [num_logits], the flat tokens whose logits are needed.
    sampling: the draws.
    prompt_logprobs: None when nobody asked for any.
    """

    token_ids: NDArray[np.int32]
    positions: NDArray[np.int32]
    query_start: NDArray[np.int32]
    context_len: NDArray[np.int32]
    groups: tuple[GroupTables, ...]
    copies: NDArray[np.int32]
    logits_tokens: NDArray[np.int32]
    sampling: SamplingBatch
    prompt_logprobs: PromptLogprobsBatch | None
    swap_out: NDArray[np.int32] = field(default_factory=_no_pairs)
    swap_in: NDArray[np.int32] = field(default_factory=_no_pairs)

    @property
    def num_tokens(self) -> int:
        """New tokens in the step."""
        return len(self.token_ids)

    @property
    def num_seqs(self) -> int:
        """Sequences in the step."""
        return len(self.context_len)


def build_batch(plan: StepPlan, block_size: int) -> Batch:
    """Lay out a plan that is not empty.

    No Python call here depends on the number of sequences, but for those that compute more than
    their last token, and those that have rules, forced tokens or wishes about their prompt.
    """
    start, num_new, records = plan.start, plan.num_new, plan.records
    num_seqs = len(num_new)
    query_start = np.zeros(num_seqs + 1, np.int32)
    np.cumsum(num_new, out=query_start[1:])
    num_tokens = int(query_start[-1])
    sequence = np.repeat(np.arange(num_seqs), num_new)
    positions = np.arange(num_tokens, dtype=np.int32) + (start - query_start[:-1])[sequence]
    groups = tuple(
        GroupTables(table, _slots(table, sequence, positions, block_size))
        for table in plan.block_tables
    )
    drawn = np.flatnonzero(plan.num_samples)
    return Batch(
        token_ids=_token_ids(plan, query_start),
        positions=positions,
        query_start=query_start,
        context_len=start + num_new,
        groups=groups,
        copies=_pairs(plan.copies),
        logits_tokens=query_start[1:][drawn] - 1,
        sampling=build_sampling(
            [plan.sequences[i] for i in drawn.tolist()],
            records.take(drawn),
            plan.num_samples[drawn],
        ),
        prompt_logprobs=_build_prompt_logprobs(plan, query_start),
        swap_out=_pairs(plan.swap_out),
        swap_in=_pairs(plan.swap_in),
    )


def _token_ids(plan: StepPlan, query_start: Ids) -> Ids:
    """int32 [num_tokens]."""
    token_ids = np.empty(int(query_start[-1]), np.int32)
    start, sequences = plan.start, plan.sequences
    is_last = start == plan.records["num_tokens"] - 1
    token_ids[query_start[:-1][is_last]] = plan.records["last_token"][is_last]
    others = np.flatnonzero(~is_last)
    columns = (others, start[others], query_start[:-1][others], query_start[1:][others])
    for i, position, first, stop in zip(*(column.tolist() for column in columns), strict=True):
        token_ids[first:stop] = sequences[i].token_ids[position : position + stop - first]
    return token_ids


def _slots(
    table: NDArray[np.int32],
    sequence: NDArray[np.int64],
    positions: NDArray[np.int32],
    block_size: int,
) -> NDArray[np.int64]:
    blocks = table[sequence, positions // block_size].astype(np.int64)
    return blocks * block_size + positions % block_size


def _build_prompt_logprobs(plan: StepPlan, query_start: Ids) -> PromptLogprobsBatch | None:
    """None when no scheduled request asks for prompt logprobs that are not known yet."""
    asking = [
        (i, request)
        for i in np.flatnonzero(plan.records["tells_prompt"]).tolist()
        if len((request := plan.sequences[i].request).prompt_logprobs)
        < request.num_prompt_tokens - 1
    ]
    if not asking:
        return None
    counts = np.zeros(len(plan.num_new), np.int32)
    tokens: list[int] = []
    targets: list[int] = []
    asked: list[int] = []
    for i, request in asking:
        start, num_new = int(plan.start[i]), int(plan.num_new[i])
        first = len(request.prompt_logprobs)
        stop = min(start + num_new, request.num_prompt_tokens - 1)
        counts[i] = max(0, stop - first)
        tokens += range(query_start[i] + first - start, query_start[i] + max(first, stop) - start)
        targets += request.core.prompt_token_ids[first + 1 : stop + 1]
        count = request.core.params.prompt_logprobs
        asked += [MAX_COUNT if count == -1 else count or 0] * int(counts[i])
    return PromptLogprobsBatch(
        np.array(tokens, np.int32), np.array(targets, np.int32), counts, np.array(asked, np.int32)
    )
