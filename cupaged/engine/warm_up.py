"""Steps that nobody asked for, so that no later one loads a kernel or meets an error first.

A warm-up step does on the device all that a step can ask of it: copies of blocks, edits of every
kind, draws, reports. It writes to the KV pool, which holds nothing yet. Only the batches are made
here.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cupaged.config import EngineConfig
from cupaged.engine.batch import Batch, GroupTables, PromptLogprobsBatch
from cupaged.engine.sampling_batch import LogitsEdits, SamplingBatch

__all__ = ["largest_step", "warm_up_batch"]


def largest_step(config: EngineConfig) -> int:
    """Most tokens that a step can have: by the budget, and by what sequences can hold."""
    return min(config.max_num_batched_tokens, config.max_num_seqs * _longest(config))


def warm_up_batch(num_tokens: int, config: EngineConfig, num_groups: int = 1) -> Batch:
    """A step of so many tokens, at most `largest_step`, of as many prompts as there may be.

    The prompts share their blocks; only the last one writes to them.
    """
    longest = _longest(config)
    num_seqs = min(num_tokens, config.max_num_seqs)
    behind = np.arange(num_seqs)[::-1]  # the last prompts are the longest
    extra = num_tokens - num_seqs - behind * (longest - 1)
    num_new = (1 + extra.clip(0, longest - 1)).astype(np.int32)
    query_start = np.concatenate([[0], np.cumsum(num_new)]).astype(np.int32)
    sequence = np.repeat(np.arange(num_seqs), num_new)
    positions = np.arange(num_tokens) - query_start[sequence]
    width = -(-int(num_new.max()) // config.block_size)
    table = np.broadcast_to(np.arange(width, dtype=np.int32), (num_seqs, width)).copy()
    slots = np.where(sequence == num_seqs - 1, positions, -1).astype(np.int64)
    return Batch(
        token_ids=np.zeros(num_tokens, np.int32),
        positions=positions.astype(np.int32),
        query_start=query_start,
        context_len=num_new,
        groups=(GroupTables(table, slots),) * num_groups,
        copies=_pairs([(0, 1)] if config.num_blocks > 1 else []),
        logits_tokens=query_start[1:] - 1,
        sampling=_draws(num_seqs, config.vocab_size, config.max_logprobs),
        prompt_logprobs=PromptLogprobsBatch(
            tokens=np.zeros(1, np.int32),
            targets=np.zeros(1, np.int32),
            counts=np.eye(1, num_seqs, dtype=np.int32)[0],
            num_logprobs=np.full(1, min(1, config.max_logprobs), np.int32),
        ),
        swap_out=_pairs([(0, 0)] if config.num_host_blocks else []),
        swap_in=_pairs([(0, 0)] if config.num_host_blocks else []),
    )


def _longest(config: EngineConfig) -> int:
    return min(config.max_model_len, config.max_blocks_per_seq * config.block_size)


def _draws(num: int, vocab_size: int, max_logprobs: int) -> SamplingBatch:
    """With every kind of edit on the first row."""
    last = vocab_size - 1
    one = np.ones(1, np.float32)
    rows = np.arange(num, dtype=np.int32)
    zeros = np.zeros(num, np.int32)
    return SamplingBatch(
        logits_row=rows,
        temperature=(rows % 2).astype(np.float32),
        top_p=np.full(num, 0.9, np.float32),
        min_p=np.zeros(num, np.float32),
        top_k=zeros,
        seed=rows.astype(np.uint64),
        sample_index=zeros,
        output_position=zeros,
        forced=np.full(num, -1, np.int32),
        num_logprobs=np.full(num, min(1, max_logprobs), np.int32),
        edits=LogitsEdits(
            bias=_pairs([(0, 0)]),
            bias_values=one,
            repetition=_pairs([(0, 0)]),
            repetition_values=one,
            subtracted=_pairs([(0, 0)]),
            subtracted_values=one,
            allowed_rows=np.zeros(1, np.int32),
            allowed=_pairs([(0, 0), (0, last)]),
            banned=_pairs([(0, last)]),
        ),
    )


def _pairs(pairs: list[tuple[int, int]]) -> NDArray[np.int32]:
    return np.array(pairs, np.int32).reshape(-1, 2)
