"""A batch on the device: what kernels read of a step, brought up by one copy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from cupaged.engine.batch import Batch
from cupaged.runtime.protocol import Array
from cupaged.runtime.staging import StagingBuffer

__all__ = ["CudaGroup", "CudaStep", "upload_step"]


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
    """A batch on the device; its arrays are good until the next step but one begins.

    token_ids, positions: int32 [num_tokens]. query_start: int32 [num_seqs + 1].
    context_len: int32 [num_seqs]. max_position: the largest position, -1 if there is none.
    """

    batch: Batch
    num_tokens: int
    token_ids: Array
    positions: Array
    query_start: Array
    context_len: Array
    groups: tuple[CudaGroup, ...]
    max_position: int


def upload_step(batch: Batch, staging: StagingBuffer) -> CudaStep:
    """Bring up everything that kernels read of the batch."""
    arrays: list[NDArray[Any]] = [
        batch.token_ids, batch.positions, batch.query_start, batch.context_len
    ]  # fmt: skip
    for group in batch.groups:
        arrays += group.block_table, group.slot_mapping
    token_ids, positions, query_start, context_len, *tables = staging.upload(arrays)
    groups = tuple(
        CudaGroup(block_table, slot_mapping, _largest(group.slot_mapping))
        for group, block_table, slot_mapping in zip(
            batch.groups, tables[::2], tables[1::2], strict=True
        )
    )
    return CudaStep(
        batch=batch,
        num_tokens=batch.num_tokens,
        token_ids=token_ids,
        positions=positions,
        query_start=query_start,
        context_len=context_len,
        groups=groups,
        max_position=_largest(batch.positions),
    )


def _largest(array: NDArray[Any]) -> int:
    return int(array.max(initial=-1))
