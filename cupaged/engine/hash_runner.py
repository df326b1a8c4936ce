"""A runner whose "model" is an integer hash over exactly what the block table lets it read.

The KV of a token is a hash of the token, its position and the KV before it; a drawn token is a hash
of all KV up to its position, and so are the log probabilities that are told. Every value is read
through the block table, so that a wrong table, a forgotten copy, a stale slot or a lost write
changes the tokens, and it costs microseconds. It is what the fuzzing of scheduler and block manager
runs on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupaged.engine.batch import Batch, StepPlan, build_batch
from cupaged.engine.runner import StepOutput
from cupaged.outputs import TokenLogprobs

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
    return mix(digest_of(kv) ^ mix(seed ^ mix((index << 32) | output_position))) % vocab_size


def digest_of(kv: NDArray[np.uint64]) -> int:
    """A hash of the KV of a context, uint64 [context]."""
    odd = np.arange(1, 2 * len(kv), 2, dtype=np.uint64)
    return int(np.bitwise_xor.reduce(kv * odd)) ^ int(kv.sum(dtype=np.uint64))


def logprobs_of(kv: NDArray[np.uint64], vocab_size: int) -> NDArray[np.float64]:
    """ "Log probabilities" of all tokens after a context, [vocab_size].

    They are sixteenths in (-65, 0], so that sums are exact and many are equal; they do not sum up
    to a probability of 1.
    """
    steps = np.arange(1, vocab_size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    value = steps + np.uint64(mix(digest_of(kv)))
    value = (value ^ (value >> np.uint64(31))) * np.uint64(0xBF58476D1CE4E5B9)
    return ((value >> np.uint64(40)) % np.uint64(1039)).astype(np.float64) / -16.0


class HashMemory:
    """The pool of hashes, one layer, for the KV sanitizer."""

    num_layers = 1
    kernel_checks = None

    def __init__(self, pool: NDArray[np.uint64]) -> None:
        self._pool = pool

    def poison(self, blocks: NDArray[np.int64]) -> None:
        """As at the start."""
        self._pool[blocks] = _POISON

    def poisoned_share(self, layer: int, blocks: NDArray[np.int64]) -> NDArray[np.float64]:
        """1 where a slot was not written, else 0."""
        return np.where(self._pool[blocks] == _POISON, 1.0, 0.0)


class HashRunner:
    """Runs plans on a pool of hashes, uint64 [num_blocks, block_size], and one of the host like it.

    It also refuses what a device with steps in flight could not stand: a step that writes a block
    which another step in flight reads or writes.
    """

    def __init__(
        self, *, num_blocks: int, block_size: int, vocab_size: int, num_host_blocks: int = 0
    ) -> None:
        self._pool: NDArray[np.uint64] = np.full((num_blocks, block_size), _POISON)
        self.kv_memory = HashMemory(self._pool)
        self._host: NDArray[np.uint64] = np.full((num_host_blocks, block_size), _POISON)
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._in_flight: dict[int, tuple[set[int], set[int], StepOutput]] = {}

    def submit(self, plan: StepPlan) -> int:
        """Compute the step at once; its blocks count as in use until it is collected."""
        batch = build_batch(plan, self._block_size)
        self._check_conflicts(plan, batch)
        for pairs, source, destination in (
            (batch.swap_out, self._pool, self._host),
            (batch.swap_in, self._host, self._pool),
            (batch.copies, self._pool, self._pool),
        ):
            destination[pairs[:, 1]] = source[pairs[:, 0]]
        self._write(batch)
        tokens, told = self._draw(batch)
        output = StepOutput(plan.step_id, [[t] for t in tokens], told if any(told) else [])
        self._in_flight[plan.step_id] = (*self._uses(batch), output)
        return plan.step_id

    def collect(self, handle: int) -> StepOutput:
        """The tokens of a step."""
        return self._in_flight.pop(handle)[2]

    def _uses(self, batch: Batch) -> tuple[set[int], set[int]]:
        """Blocks that a step reads and blocks that it writes; those of the host are -2, -3, ..."""
        read = set(batch.groups[0].block_table.ravel().tolist()) - {-1}
        written = set((batch.groups[0].slot_mapping // self._block_size).tolist())
        out = batch.swap_out * (1, -1) - (0, 2)
        back = batch.swap_in * (-1, 1) - (2, 0)
        for pairs in (out, back, batch.copies):
            read.update(pairs[:, 0].tolist())
            written.update(pairs[:, 1].tolist())
        return read, written

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

    def _draw(self, batch: Batch) -> tuple[list[int], list[list[TokenLogprobs] | None]]:
        """A token a sample, and what is told about it."""
        sampling, table = batch.sampling, batch.groups[0].block_table
        last_tokens = batch.query_start[1:].tolist()
        tokens, told = [], []
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
            count = int(sampling.num_logprobs[sample])
            told.append(None if count < 0 else [_report(kv, self._vocab_size, token, count)])
        return tokens, told


def _report(kv: NDArray[np.uint64], vocab_size: int, token: int, count: int) -> TokenLogprobs:
    """As `Ops.logprobs`: the token, then the likeliest, equal ones by token id."""
    logprobs = logprobs_of(kv, vocab_size)
    ids = [token, *np.argsort(-logprobs, kind="stable")[:count].tolist()]
    ranks = [int(np.count_nonzero(logprobs >= logprobs[i])) for i in ids]
    return TokenLogprobs(ids, logprobs[ids].tolist(), ranks)


def _key(sampling: Any, sample: int) -> tuple[int, int, int]:
    return (
        int(sampling.seed[sample]),
        int(sampling.sample_index[sample]),
        int(sampling.output_position[sample]),
    )
