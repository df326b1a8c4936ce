"""Owner of the KV blocks: which sequence holds which block, and which blocks are free.

It works like the page allocator of an operating system: fixed-size blocks, one row of a NumPy block
table per running sequence, allocation on demand, sharing with reference counts, and a private copy
on the first write to a shared block (after PagedAttention, Kwon et al., SOSP 2023, section 4).
It never touches the blocks' contents: copies are returned as (source, destination) pairs for the
runner. A block that a step in flight may still read or write is kept in quarantine when it is freed
and becomes free when that step completes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable

import numpy as np
from numpy.typing import NDArray

BlockCopy = tuple[int, int]  # (source block, destination block)
UNUSED = -1  # a block-table entry past the sequence's blocks


class BlockManager:
    """Blocks 0 .. num_blocks-1 and the block table of every sequence that holds some.

    `block_table` is int32 [max_num_seqs, max_blocks_per_seq], `UNUSED` past a row's blocks;
    `ref_counts` is int32 [num_blocks]. Sequences are named by any hashable key.
    """

    def __init__(
        self, *, num_blocks: int, block_size: int, max_num_seqs: int, max_blocks_per_seq: int
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.block_table: NDArray[np.int32] = np.full(
            (max_num_seqs, max_blocks_per_seq), UNUSED, np.int32
        )
        self.ref_counts: NDArray[np.int32] = np.zeros(num_blocks, np.int32)
        self._free: deque[int] = deque(range(num_blocks))  # least recently freed first
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._rows: dict[Hashable, int] = {}
        self._num_held = [0] * max_num_seqs  # blocks, by row
        self._quarantine: deque[tuple[int, list[int]]] = deque()  # (last step, blocks)
        self._in_flight: dict[int, set[int]] = {}  # step: the blocks it copies from

    # ---- what is there -------------------------------------------------------------------------

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be handed out now."""
        return len(self._free)

    @property
    def num_quarantined_blocks(self) -> int:
        """Freed blocks that wait for a step in flight."""
        return sum(len(blocks) for _, blocks in self._quarantine)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that some sequence holds."""
        return self.num_blocks - self.num_free_blocks - self.num_quarantined_blocks

    @property
    def num_shared_blocks(self) -> int:
        """Blocks that more than one sequence holds."""
        return int(np.count_nonzero(self.ref_counts > 1))

    @property
    def num_free_rows(self) -> int:
        """Rows of the block table that no sequence has."""
        return len(self._free_rows)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens fill, the last one perhaps partly."""
        return -(-num_tokens // self.block_size)

    def row(self, key: Hashable) -> int:
        """Row of `block_table` that belongs to the sequence; KeyError if it holds no blocks."""
        return self._rows[key]

    def holds_blocks(self, key: Hashable) -> bool:
        """True when the sequence has a row."""
        return key in self._rows

    def blocks_of(self, key: Hashable) -> list[int]:
        """The sequence's blocks in order of position; empty if it holds none."""
        if key not in self._rows:
            return []
        row = self._rows[key]
        blocks: list[int] = self.block_table[row, : self._num_held[row]].tolist()
        return blocks

    # ---- giving and taking ---------------------------------------------------------------------

    def allocate(
        self,
        key: Hashable,
        num_computed_tokens: int,
        num_new_tokens: int,
        *,
        num_lookahead_tokens: int = 0,
        reserve: int = 0,
    ) -> list[BlockCopy] | None:
        """Make positions [computed, computed + new + lookahead) of a sequence writable.

        New blocks are appended to its row; a block in that range that is shared is replaced by a
        private one and a copy is asked for. Lookahead tokens are drafts that may be thrown away.

        Args:
            reserve: blocks that must stay free after this call.

        Returns:
            The copies to make before anything is written, or None if too few blocks are free or
            a step in flight copies from a block to be written; then nothing has changed.
        """
        row = self._rows.get(key)
        held = 0 if row is None else self._num_held[row]
        end = num_computed_tokens + num_new_tokens + num_lookahead_tokens
        num_appended = max(0, self.blocks_for(end) - held)
        first = num_computed_tokens // self.block_size
        if (
            row is not None
            and not num_appended
            and not self._in_flight
            and first == held - 1
            and self.ref_counts.item(self.block_table.item(row, first)) == 1
            and reserve <= len(self._free)
        ):
            return []  # a decode step inside its own last block: nearly every call
        shared: list[int] = []
        if row is not None:
            written = self.block_table[row, first : min(held, self.blocks_for(end))]
            is_shared = self.ref_counts[written] > 1
            shared = [first + int(i) for i in np.flatnonzero(is_shared)]
            private = written[~is_shared].tolist()
            if not all(copied.isdisjoint(private) for copied in self._in_flight.values()):
                return None
        if num_appended + len(shared) > len(self._free) - reserve:
            return None
        if row is None:
            row = self._take_row(key)
        copies: list[BlockCopy] = []
        for i in shared:
            source, private = int(self.block_table[row, i]), self._take()
            self.ref_counts[source] -= 1
            self.block_table[row, i] = private
            copies.append((source, private))
        for i in range(held, held + num_appended):
            self.block_table[row, i] = self._take()
        self._num_held[row] = held + num_appended
        return copies

    def fork(self, parent: Hashable, child: Hashable) -> None:
        """Give `child` the blocks of `parent`; both hold every one of them."""
        source = self._rows[parent]
        row = self._take_row(child)
        held = self._num_held[source]
        self.block_table[row, :held] = self.block_table[source, :held]
        self._num_held[row] = held
        self.ref_counts[self.block_table[row, :held]] += 1

    def trim(self, key: Hashable, num_tokens: int) -> None:
        """Give back the blocks past the first `num_tokens` tokens (drafts that were refused)."""
        row = self._rows[key]
        keep = self.blocks_for(num_tokens)
        dropped = self.block_table[row, keep : self._num_held[row]].tolist()
        self.block_table[row, keep:] = UNUSED
        self._num_held[row] = min(keep, self._num_held[row])
        self._release(dropped)

    def free(self, key: Hashable) -> None:
        """Give back every block of a sequence. Freeing a sequence that holds none does nothing."""
        row = self._rows.pop(key, None)
        if row is None:
            return
        held = self._num_held[row]
        blocks = self.block_table[row, :held].tolist()
        self.block_table[row, :held] = UNUSED
        self._num_held[row] = 0
        self._free_rows.append(row)
        self._release(blocks[::-1])  # the tail is the least useful part, so it is reused first

    def step_submitted(self, step_id: int, copies: Iterable[BlockCopy] = ()) -> None:
        """A step that uses the present block tables and makes `copies` is in flight from now on.

        Step ids grow.
        """
        self._in_flight[step_id] = sources = {source for source, _ in copies}
        freed = [block for block in sources if self.ref_counts[block] == 0]
        for block in freed:
            self._free.remove(block)
        if freed:
            self._quarantine.append((step_id, freed))

    def step_completed(self, step_id: int) -> None:
        """The step is over: what only it and earlier, completed steps used becomes free."""
        del self._in_flight[step_id]
        oldest = min(self._in_flight, default=None)
        while self._quarantine and (oldest is None or self._quarantine[0][0] < oldest):
            self._free.extend(self._quarantine.popleft()[1])

    def _take(self) -> int:
        block = self._free.popleft()
        assert self.ref_counts[block] == 0, f"free block {block} is referenced"
        self.ref_counts[block] = 1
        return block

    def _take_row(self, key: Hashable) -> int:
        assert key not in self._rows, f"sequence {key} holds blocks already"
        row = self._free_rows.pop()
        self._rows[key] = row
        return row

    def _release(self, blocks: list[int]) -> None:
        unreferenced = []
        for block in blocks:
            assert self.ref_counts[block] > 0, f"block {block} is freed twice"
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                unreferenced.append(block)
        if not unreferenced:
            return
        if self._in_flight:
            self._quarantine.append((max(self._in_flight), unreferenced))
        else:
            self._free.extend(unreferenced)

    # ---- proof ---------------------------------------------------------------------------------

    def kv_utilisation(self, num_computed_tokens: dict[Hashable, int]) -> float:
        """Share of the slots in used blocks that hold a token; 1.0 when no block is used."""
        used = self.num_used_blocks
        if used == 0:
            return 1.0
        filled = np.zeros(self.num_blocks, np.int64)
        for key, row in self._rows.items():
            blocks = self.block_table[row, : self._num_held[row]]
            starts = np.arange(len(blocks)) * self.block_size
            tokens = np.clip(num_computed_tokens[key] - starts, 0, self.block_size)
            filled[blocks] = np.maximum(filled[blocks], tokens)
        return float(filled.sum()) / (used * self.block_size)

    def audit(self) -> None:
        """Check every invariant; AssertionError says which one broke.

        Free, quarantined and used blocks are disjoint and are all blocks; no id stands twice in a
        list or a row; reference counts are the table's references; rows are whole.
        """
        free, held = list(self._free), [b for _, blocks in self._quarantine for b in blocks]
        idle = free + held
        assert len(idle) == len(set(idle)), "a block is free or quarantined twice"
        assert all(0 <= b < self.num_blocks for b in idle), "a free block id is out of range"
        counts = np.zeros(self.num_blocks, np.int32)
        for key, row in self._rows.items():
            n = self._num_held[row]
            blocks = self.block_table[row, :n]
            assert n == 0 or 0 <= blocks.min() <= blocks.max() < self.num_blocks, (
                f"sequence {key} holds a block id out of range"
            )
            assert len(np.unique(blocks)) == n, f"sequence {key} holds a block twice"
            assert (self.block_table[row, n:] == UNUSED).all(), f"row of {key} has a stale tail"
            np.add.at(counts, blocks, 1)
        assert (counts == self.ref_counts).all(), (
            f"reference counts differ at blocks {np.flatnonzero(counts != self.ref_counts)}"
        )
        assert not counts[np.array(idle, int)].any(), "a free block is in a block table"
        used = int(np.count_nonzero(counts))
        assert len(idle) + used == self.num_blocks, (
            f"{len(free)} free + {len(held)} quarantined + {used} used != {self.num_blocks} blocks"
        )
        rows = [*self._rows.values(), *self._free_rows]
        assert sorted(rows) == list(range(len(self.block_table))), "a row is lost or used twice"
        assert not any(self._num_held[row] for row in self._free_rows), "a free row holds blocks"
        assert (self.block_table[self._free_rows] == UNUSED).all(), "a free row has a stale block"
