"""A batch on the device: everything that kernels read of a step, brought up by one copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupaged.engine.batch import Batch
from cupaged.ops.cuda_draws import CudaDraws, column_arrays, edit_arrays
from cupaged.runtime.protocol import Array
from cupaged.runtime.staging import StagingBuffer

__all__ = ["CudaGroup", "CudaStep", "upload_step"]

_NOTHING = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class CudaGroup:
    """A KV group of a step, on the device.

    block_table: int32 [num_seqs, max_blocks]. slot_mapping: int64 [num_tokens].
    max_slot: the largest slot, -1 if there is none.
    """

    block_table: Array
    slot_mapping: Array
    max_slot: int


@dataclass(frozen=True, slots=True)
class CudaStep:
    """A batch on the device, as `StepContext` says; its arrays are good until the next one begins.

    token_ids, positions: int32 [num_tokens]. query_start: int32 [num_seqs + 1].
    context_len: int32 [num_seqs]. max_position: the largest position, -1 if there is none.
    copies: int32 [num_copies, 2].
    attention: the arrays of work lists by what they are for; see `CudaAttention`.
    """

    batch: Batch
    num_tokens: int
    token_ids: Array
    positions: Array
    query_start: Array
    context_len: Array
    groups: tuple[CudaGroup, ...]
    max_position: int
    copies: Array
    logits_tokens: Array
    sampling: CudaDraws
    told_samples: Array
    told_rows: Array
    prompt_tokens: Array
    prompt_targets: Array
    attention: dict[Any, Sequence[Array]]


def upload_step(
    batch: Batch,
    staging: StagingBuffer,
    attention: Mapping[Any, Sequence[NDArray[Any]]] | None = None,
    many_edits: StagingBuffer | None = None,
) -> CudaStep:
    """Bring up everything that kernels read of the batch.

    Args:
        attention: work lists to bring up with it.
        many_edits: takes edits of logits that make the step larger than `staging`.

    Raises:
        OperandError: an array of the draws is not as `SamplingBatch` says.
    """
    draws, prompts = batch.sampling, batch.prompt_logprobs
    told = np.flatnonzero(draws.num_logprobs >= 0).astype(np.int32)
    columns, edits = column_arrays(draws), edit_arrays(draws.edits)
    arrays: list[NDArray[Any]] = [
        batch.token_ids, batch.positions, batch.query_start, batch.context_len, batch.copies,
        batch.logits_tokens, told, draws.logits_row[told],
        _NOTHING if prompts is None else prompts.tokens,
        _NOTHING if prompts is None else prompts.targets,
    ]  # fmt: skip
    for group in batch.groups:
        arrays += group.block_table, group.slot_mapping
    arrays += columns
    lists = attention or {}
    for work in lists.values():
        arrays += work
    apart = bool(edits) and many_edits is not None and not staging.holds([*arrays, *edits])
    on_device = iter(staging.upload(arrays if apart else [*arrays, *edits]))

    def take(count: int) -> list[Array]:
        return [next(on_device) for _ in range(count)]

    token_ids, positions, query_start, context_len, copies, *rows = take(10)
    tables = [take(2) for _ in batch.groups]
    columns_there = take(len(columns))
    attention_there: dict[Any, Sequence[Array]] = {
        key: take(len(work)) for key, work in lists.items()
    }
    if apart:
        assert many_edits is not None
        edits_there = many_edits.upload(edits)
    else:
        edits_there = take(len(edits))
    logits_tokens, told_samples, told_rows, prompt_tokens, prompt_targets = rows
    return CudaStep(
        batch=batch,
        num_tokens=batch.num_tokens,
        token_ids=token_ids,
        positions=positions,
        query_start=query_start,
        context_len=context_len,
        groups=tuple(
            CudaGroup(table, slots, _largest(group.slot_mapping))
            for group, (table, slots) in zip(batch.groups, tables, strict=True)
        ),
        max_position=_largest(batch.positions),
        copies=copies,
        logits_tokens=logits_tokens,
        sampling=CudaDraws.of(draws, columns_there, edits_there),
        told_samples=told_samples,
        told_rows=told_rows,
        prompt_tokens=prompt_tokens,
        prompt_targets=prompt_targets,
        attention=attention_there,
    )


def _largest(array: NDArray[Any]) -> int:
    return int(array.max(initial=-1))
