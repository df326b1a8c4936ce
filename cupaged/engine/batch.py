"""The batch page: a step's plan, and the same as flat arrays. Every shape a kernel meets is here.

Nothing in the batch says prefill or decode. Sequence s has the new tokens
`query_start[s] : query_start[s + 1]` of the flat arrays, and after the step `context_len[s]` of its
tokens have their KV in blocks. The arrays are copies: the plan's sequences may change while a step
is in flight.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from cupaged.engine.sampling_batch import MAX_COUNT, SamplingBatch, build_sampling
from cupaged.request import Sequence


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
    admitted: list[Sequence] = field(default_factory=list)
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


@dataclass(frozen=True, slots=True)
class Batch:
    """One step.

    token_ids, positions: int32 [num_tokens].
    query_start: int32 [num_seqs + 1]. context_len: int32 [num_seqs].
    groups: the tables of each KV group.
    copies: int32 [num_copies, 2], (source block, destination block), made first.
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

    No Python call here depends on the number of sequences, but for those that have bad words.
    """
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
        sampling=build_sampling(
            [e.sequence for e in entries if e.num_samples], num_samples[num_samples > 0]
        ),
        prompt_logprobs=_build_prompt_logprobs(entries, query_start),
    )


def _slots(
    table: NDArray[np.int32],
    sequence: NDArray[np.int64],
    positions: NDArray[np.int32],
    block_size: int,
) -> NDArray[np.int64]:
    blocks = table[sequence, positions // block_size].astype(np.int64)
    return blocks * block_size + positions % block_size


def _build_prompt_logprobs(
    entries: list[ScheduledSequence], query_start: NDArray[np.int32]
) -> PromptLogprobsBatch | None:
    """None when no scheduled request asks for prompt logprobs that are not known yet."""
    asking = [
        (i, e, e.sequence.request)
        for i, e in enumerate(entries)
        if e.sequence.request.core.params.prompt_logprobs is not None
        and len(e.sequence.request.prompt_logprobs) < e.sequence.request.num_prompt_tokens - 1
    ]
    if not asking:
        return None
    counts = np.zeros(len(entries), np.int32)
    tokens: list[int] = []
    targets: list[int] = []
    asked: list[int] = []
    for i, entry, request in asking:
        first = len(request.prompt_logprobs)
        stop = min(entry.start + entry.num_tokens, request.num_prompt_tokens - 1)
        counts[i] = max(0, stop - first)
        tokens += range(
            query_start[i] + first - entry.start, query_start[i] + max(first, stop) - entry.start
        )
        targets += request.core.prompt_token_ids[first + 1 : stop + 1]
        count = request.core.params.prompt_logprobs
        asked += [MAX_COUNT if count == -1 else count or 0] * int(counts[i])
    return PromptLogprobsBatch(
        np.array(tokens, np.int32), np.array(targets, np.int32), counts, np.array(asked, np.int32)
    )
