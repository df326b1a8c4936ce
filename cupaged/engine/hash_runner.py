"""A runner whose "model" is an integer hash over exactly what the block table lets it read.

The KV of a token is a hash of the token, its position and the KV before it; a drawn token is a hash
of all KV up to its position. Every value is read through the block table, so that a wrong table, a
forgotten copy, a stale slot or a lost write changes the tokens, and it costs microseconds. It is
what the fuzzing of scheduler and block manager runs on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupaged.engine.batch import Batch, StepPlan, build_batch
from cupaged.engine.runner import StepOutput

_MASK = 2**64 - 1
_NO_PAIRS = np.zeros((0, 2), np.int32)
_POISON = np.uint64(0xDEADDEADDEADDEAD)


def mix(value: int) -> int:
    """A 64-bit finaliser (SplitMix64; Steele, Lea and Flood, OOPSLA 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def kv_of(token_id: int, position: int, before: int) -> int:
    """KV of a token: `before` is the KV of the token before it, 0 at position 0."""
    return mix(before ^ mix((position << 32) | token_id))


def token_of(
    kv: NDArray[np.uint64], vocab_size: int, seed: int, index: int, output_position: int
) -> int:
    """The token drawn after a context whose KV is `kv`, uint64 [context]."""
    odd = np.arange(1, 2 * len(kv), 2, dtype=np.uint64)
    digest = int(np.bitwise_xor.reduce(kv * odd)) ^ int(kv.sum(dtype=np.uint64))
    return mix(digest ^ mix(seed ^ mix((index << 32) | output_position))) % vocab_size


class HashRunner:
    """Runs plans on one pool of hashes, uint64 [num_blocks, block_size].

    It also refuses what a device with steps in flight could not stand: a step that writes a block
    which another step in flight reads or writes.
    """

    def __init__(self, *, num_blocks: int, block_size: int, vocab_size: int) -> None:
        self._pool: NDArray[np.uint64] = np.full((num_blocks, block_size), _POISON)
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._in_flight: dict[int, tuple[set[int], set[int], StepOutput]] = {}

    def submit(self, plan: StepPlan) -> int:
        """Compute the step at once; its blocks count as in use until it is collected."""
        batch = build_batch(plan, self._block_size)
        self._check_conflicts(plan, batch)
        copies = batch.copies
        self._pool[copies[:, 1]] = self._pool[copies[:, 0]]
        self._write(batch)
        tokens = self._draw(batch)
        uses = self._uses(batch)
        self._in_flight[plan.step_id] = (*uses, StepOutput(plan.step_id, [[t] for t in tokens]))
        return plan.step_id

    def collect(self, handle: int) -> StepOutput:
        """The tokens of a step."""
        return self._in_flight.pop(handle)[2]

    def _uses(self, batch: Batch) -> tuple[set[int], set[int]]:
        """Blocks that a step reads and blocks that it writes."""
        read = set(batch.groups[0].block_table.ravel().tolist()) - {-1}
        written = set((batch.groups[0].slot_mapping // self._block_size).tolist())
        return read | set(batch.copies[:, 0].tolist()), written | set(batch.copies[:, 1].tolist())

    def _check_conflicts(self, plan: StepPlan, batch: Batch) -> None:
        read, written = self._uses(batch)
        for step_id, (other_read, other_written, _) in self._in_flight.items():
            clash = (written & (other_read | other_written)) | (read & other_written)
            assert not clash, (
                f"steps {step_id} and {plan.step_id} in flight clash at blocks {clash}"
            )

    def _write(self, batch: Batch) -> None:
        """KV of the new tokens, in order, each from the KV before it."""
        slots, table = batch.groups[0].slot_mapping, batch.groups[0].block_table
        flat = self._pool.reshape(-1)
        for sequence in range(batch.num_seqs):
            first, stop = batch.query_start[sequence : sequence + 2].tolist()
            position = int(batch.positions[first])
            before = 0
            if position:
                block, offset = divmod(position - 1, self._block_size)
                before = int(self._pool[table[sequence, block], offset])
            for token in range(first, stop):
                before = kv_of(int(batch.token_ids[token]), int(batch.positions[token]), before)
                flat[slots[token]] = before

    def _draw(self, batch: Batch) -> list[int]:
        sampling, table = batch.sampling, batch.groups[0].block_table
        last_tokens = batch.query_start[1:].tolist()
        tokens = []
        for sample, row in enumerate(sampling.logits_row.tolist()):
            sequence = last_tokens.index(int(batch.logits_tokens[row]) + 1)
            positions = np.arange(batch.context_len[sequence])
            blocks = table[sequence, positions // self._block_size]
            kv = self._pool[blocks, positions % self._block_size]
            token = token_of(kv, self._vocab_size, *_key(sampling, sample))
            edits = sampling.edits
            pairs = edits.banned if edits is not None else _NO_PAIRS
            banned = set(pairs[pairs[:, 0] == row, 1].tolist())
            while token in banned:
                token = (token + 1) % self._vocab_size
            tokens.append(token)
        return tokens


def _key(sampling: Any, sample: int) -> tuple[int, int, int]:
    return (
        int(sampling.seed[sample]),
        int(sampling.sample_index[sample]),
        int(sampling.output_position[sample]),
    )
