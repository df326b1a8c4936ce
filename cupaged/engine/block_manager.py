"""Owner of the KV blocks: which sequence holds which block, and which blocks are free.

It works like the page allocator of an operating system: fixed-size blocks, one row of a NumPy block
table per running sequence, allocation on demand, sharing with reference counts, and a private copy
on the first write to a shared block (after PagedAttention, Kwon et al., SOSP 2023, section 4).
It never touches the blocks' contents: copies are returned as (source, destination) pairs for the
runner. A block that a step in flight may still read or write is kept in quarantine when it is freed
and becomes free when that step completes. A freed block whose content a prefix cache knows stays
findable; it counts as free, and is handed out after those that nobody knows.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from cupaged.engine.pool_usage import utilisation
from cupaged.engine.prefix_cache import NoPrefixCache, PrefixStrategy
from cupaged.request import Sequence

BlockCopy = tuple[int, int]  # (source block, destination block)
_Freed = tuple[int, list[int]]  # (last step that may use them, blocks)
UNUSED = -1  # a block-table entry past the sequence's blocks


class BlockManager:
    """Blocks 0 .. num_blocks-1 and the block table of every sequence that holds some.

    `block_table` is int32 [max_num_seqs, max_blocks_per_seq], `UNUSED` past a row's blocks;
    `ref_counts` is int32 [num_blocks], and so is `generations`, how often each block was handed
    out. Sequences are named by any hashable key. `prefix_cache` says which blocks are worth keeping
    when nobody holds them; nothing is kept by default. `evict` is its own one, or looks at what is
    given away.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_blocks_per_seq: int,
        prefix_cache: PrefixStrategy | None = None,
        evict: Callable[[], list[int]] | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.block_table: NDArray[np.int32] = np.full(
            (max_num_seqs, max_blocks_per_seq), UNUSED, np.int32
        )
        self.ref_counts: NDArray[np.int32] = np.zeros(num_blocks, np.int32)
        self.generations: NDArray[np.int32] = np.zeros(num_blocks, np.int32)
        self.prefix_cache = NoPrefixCache() if prefix_cache is None else prefix_cache
        self._evict = self.prefix_cache.evict if evict is None else evict
        self._free: deque[int] = deque(range(num_blocks))  # least recently freed first
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._rows: dict[Hashable, int] = {}
        self._num_held: NDArray[np.int32] = np.zeros(max_num_seqs, np.int32)  # blocks, by row
        self._quarantine: deque[_Freed] = deque()  # (last step, blocks), as they were freed
        self._freed: dict[int, _Freed] = {}  # of each block in quarantine, where it stands last
        self._in_flight: dict[int, set[int]] = {}  # step: the blocks it copies from

    # ---- what is there -------------------------------------------------------------------------

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be handed out now."""
        return len(self._free) + self.prefix_cache.num_evictable_blocks

    @property
    def num_quarantined_blocks(self) -> int:
        """Freed blocks that wait for a step in flight."""
        return len(self._freed)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that some sequence holds."""
        return self.num_blocks - self.num_free_blocks - self.num_quarantined_blocks

    @property
    def num_shared_blocks(self) -> int:
        """Blocks that more than one sequence holds."""
        return int(np.count_nonzero(self.ref_counts > 1))

    @property
    def num_columns(self) -> int:
        """Columns of the block table that are in use: blocks of the sequence that holds most."""
        return int(self._num_held.max())

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

    @property
    def held_rows(self) -> dict[Hashable, int]:
        """The row of every sequence that holds blocks. Not to be changed."""
        return self._rows

    def forgotten_blocks(self) -> NDArray[np.int64]:
        """Free blocks whose content nobody can find, and no step in flight uses."""
        return np.fromiter(self._free, np.int64, len(self._free))

    def are_writable(
        self, rows: NDArray[np.int32], start: NDArray[np.int32], stop: NDArray[np.int32]
    ) -> NDArray[np.bool_]:
        """Where `allocate` of positions [start, stop) of the sequence in a row would do nothing.

        So it is in nearly every step. Of blocks that are there for positions to be written, only
        the first can be shared: it may hold earlier ones. All arrays are [n].
        """
        index = np.minimum(start // self.block_size, self.block_table.shape[1] - 1)
        blocks = self.block_table[rows, index]
        writable: NDArray[np.bool_] = self.ref_counts[blocks] == 1
        writable &= stop <= self._num_held[rows] * self.block_size
        for copied in self._in_flight.values():
            if copied:
                writable &= ~np.isin(blocks, list(copied))
        return writable

    def are_at_edge(self, rows: NDArray[np.int32], start: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Where a position of the sequence in a row is the first behind its blocks; all [n]."""
        at_edge: NDArray[np.bool_] = start == self._num_held[rows] * self.block_size
        return at_edge

    # ---- giving and taking ---------------------------------------------------------------------

    def append_blocks(self, rows: NDArray[np.int32]) -> None:
        """One more block for the sequence in each row; so many must be free."""
        self.block_table[rows, self._num_held[rows]] = self._take(len(rows))
        self._num_held[rows] += 1

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
        held = 0 if row is None else self._num_held.item(row)
        end = num_computed_tokens + num_new_tokens + num_lookahead_tokens
        num_appended = max(0, self.blocks_for(end) - held)
        first = num_computed_tokens // self.block_size
        shared: list[int] = []
        if row is not None:
            written = self.block_table[row, first : min(held, self.blocks_for(end))]
            is_shared = self.ref_counts[written] > 1
            shared = [first + int(i) for i in np.flatnonzero(is_shared)]
            private = written[~is_shared].tolist()
            if not all(copied.isdisjoint(private) for copied in self._in_flight.values()):
                return None
        if num_appended + len(shared) > self.num_free_blocks - reserve:
            return None
        if row is None:
            row = self._take_row(key)
        copies: list[BlockCopy] = []
        for i in shared:
            source, (private,) = int(self.block_table[row, i]), self._take(1)
            self.ref_counts[source] -= 1
            self.block_table[row, i] = private
            copies.append((source, private))
        if num_appended:
            self.block_table[row, held : held + num_appended] = self._take(num_appended)
            self._num_held[row] = held + num_appended
        return copies

    def admit(self, key: Hashable, cached: list[int], num_tokens: int, *, reserve: int = 0) -> bool:
        """Begin a sequence of `num_tokens` tokens whose first blocks are there already.

        Args:
            cached: what the prefix cache found; the sequence holds them, too, from now on.
            reserve: blocks that must stay free after this call.

        Returns:
            False if too few blocks are free; then nothing has changed.
        """
        num_free = self.num_free_blocks - reserve
        num_new = self.blocks_for(num_tokens) - len(cached)
        are_idle = (not self.ref_counts.item(b) and b not in self._freed for b in cached)
        if num_new > num_free or num_new + sum(are_idle) > num_free:  # mostly seen at a glance
            return False
        row = self._take_row(key)
        self._hold(cached)
        self.block_table[row, : len(cached)] = cached
        self._num_held[row] = len(cached)
        start = len(cached) * self.block_size
        copies = self.allocate(key, start, num_tokens - start)
        assert copies == [], "a cached block is written"
        return True

    def restore(
        self,
        held: Mapping[Hashable, list[int]],
        num_tokens: Mapping[Hashable, tuple[int, int]],
        *,
        reserve: int = 0,
    ) -> list[BlockCopy] | None:
        """Begin sequences whose computed tokens lie in blocks elsewhere.

        Args:
            held: of each sequence, its blocks there; what they share there they will share here.
            num_tokens: of each sequence, how many are computed and how many there are.
            reserve: blocks that must stay free after this call, and when copies are made of all
                shared blocks that the sequences are going to write.

        Returns:
            (block there, block here) to be copied before anything is written; None if too few are
            free, and then nothing has changed.
        """
        num_free = self.num_free_blocks - reserve
        if any(self.blocks_for(num_all) > num_free for _, num_all in num_tokens.values()):
            return None  # seen at a glance: a group may wait for many steps
        holders = Counter(block for blocks in held.values() for block in blocks)
        writers: Counter[int] = Counter()
        num_blocks = len(holders)
        for key, (num_computed, num_all) in num_tokens.items():
            writers.update(held[key][num_computed // self.block_size :])
            num_blocks += self.blocks_for(num_all) - len(held[key])
        # Of those who write to a block, one may keep it if all holders do.
        copies = sum(n - (n == holders[block]) for block, n in writers.items())
        if num_blocks + copies > num_free:
            return None
        here = dict(zip(holders, self._take(len(holders)), strict=True))
        for key, blocks in held.items():
            row = self._take_row(key)
            mine = [here[block] for block in blocks]
            self.ref_counts[mine] += 1
            added = self.blocks_for(num_tokens[key][1]) - len(mine)
            mine += self._take(added)
            self.block_table[row, : len(mine)] = mine
            self._num_held[row] = len(mine)
        self.ref_counts[list(here.values())] -= 1  # that of taking them
        return list(here.items())

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

    def store(self, key: Hashable, sequence: Sequence) -> list[int]:
        """Make what a sequence has computed findable; of equal blocks it holds those found.

        Returns what it holds now.
        """
        blocks = self.blocks_of(key)
        exchanges = self.prefix_cache.store(sequence, blocks, self.ref_counts)
        if exchanges:
            indices, found = map(list, zip(*exchanges, strict=True))
            own = [blocks[i] for i in indices]
            self._hold(found)
            self.block_table[self._rows[key], indices] = found
            self._release(own[::-1])
            blocks = self.blocks_of(key)
        return blocks

    def free(self, key: Hashable, stored: Sequence | None = None) -> None:
        """Give back every block of a sequence. Freeing a sequence that holds none does nothing.

        Args:
            stored: the sequence, if others may find what it has computed.
        """
        if key not in self._rows:
            return
        blocks = self.blocks_of(key) if stored is None else self.store(key, stored)
        row = self._rows.pop(key)
        self.block_table[row, : len(blocks)] = UNUSED
        self._num_held[row] = 0
        self._free_rows.append(row)
        self._release(blocks[::-1])  # the tail is the least useful part, so it is reused first

    def step_submitted(self, step_id: int, copies: Iterable[BlockCopy] = ()) -> None:
        """A step that uses the present block tables and makes `copies` is in flight from now on.

        Step ids grow. Copies to the host count, too: what was freed and is a source of them may be
        used by that step alone.
        """
        self._in_flight[step_id] = sources = {source for source, _ in copies}
        freed = dict.fromkeys(block for block in sources if self.ref_counts[block] == 0)
        if freed:
            unknown = [block for block in self._free if block in freed]
            self._free = deque(block for block in self._free if block not in freed)
            known = freed.keys() - unknown
            cached = self.prefix_cache.withdraw(known) if known else []
            self._hold_back(unknown + cached, step_id)

    def step_completed(self, step_id: int) -> None:
        """The step is over: what only it and earlier, completed steps used becomes free."""
        del self._in_flight[step_id]
        oldest = min(self._in_flight, default=None)
        while self._quarantine and (oldest is None or self._quarantine[0][0] < oldest):
            freed = self._quarantine.popleft()
            over = [block for block in freed[1] if self._freed.get(block) is freed]
            for block in over:  # the others were found meanwhile, and perhaps freed again
                del self._freed[block]
            self._free.extend(self.prefix_cache.retire(over))

    def reset_prefix_cache(self) -> int:
        """Make no block findable; returns how many became free of their content by that."""
        blocks = self.prefix_cache.reset()
        self._free.extend(blocks)
        return len(blocks)

    def forget(self, key: Hashable) -> None:
        """Make what a sequence holds unfindable for others."""
        self._free.extend(self.prefix_cache.forget(self.blocks_of(key)))

    def _take(self, count: int) -> list[int]:
        """Free blocks, for one sequence to hold; what can be found only when there are no others"""
        taken: list[int] = []
        while len(taken) < count:
            if not self._free:
                self._free.extend(self._evict())
            num_left = min(count - len(taken), len(self._free))
            taken += [self._free.popleft() for _ in range(num_left)]
        assert not self.ref_counts[taken].any(), f"a free block of {taken} is referenced"
        self.ref_counts[taken] = 1
        self.generations[taken] += 1
        return taken

    def _take_row(self, key: Hashable) -> int:
        assert key not in self._rows, f"sequence {key} holds blocks already"
        row = self._free_rows.pop()
        self._rows[key] = row
        return row

    def _hold(self, blocks: list[int]) -> None:
        """One more sequence holds these found blocks, whether others do or a step or nobody."""
        for block in blocks:
            self._freed.pop(block, None)
        self.prefix_cache.hold(blocks)
        self.ref_counts[blocks] += 1

    def _release(self, blocks: list[int]) -> None:
        counts = self.ref_counts[blocks] - 1
        is_held = len(set(blocks)) == len(blocks) and counts.min(initial=0) >= 0
        assert is_held, f"a block of {blocks} is freed twice"
        self.ref_counts[blocks] = counts
        unreferenced = [b for b, count in zip(blocks, counts.tolist(), strict=True) if not count]
        if unreferenced and self._in_flight:
            self._hold_back(unreferenced, max(self._in_flight))
        else:
            self._free.extend(self.prefix_cache.retire(unreferenced))

    def _hold_back(self, blocks: list[int], last_step: int) -> None:
        freed = (last_step, blocks)
        self._quarantine.append(freed)
        self._freed.update(dict.fromkeys(blocks, freed))

    # ---- proof ---------------------------------------------------------------------------------

    def kv_utilisation(self, num_computed_tokens: NDArray[np.int32]) -> float:
        """Share of the slots in used blocks that hold a token; 1.0 when no block is used.

        Args:
            num_computed_tokens: int32 [max_num_seqs], of the sequence in each row.
        """
        return utilisation(
            self.block_table, self._num_held, num_computed_tokens, self.block_size, self.num_blocks
        )

    def audit(self) -> None:
        """Check every invariant; AssertionError says which one broke.

        Free, evictable, quarantined and used blocks are disjoint and are all blocks; no id stands
        twice in a list or a row; reference counts are the table's references; rows are whole.
        """
        held = list(self._freed)
        waiting = {id(freed) for freed in self._quarantine}
        for block, freed in self._freed.items():
            assert id(freed) in waiting and block in freed[1], "a block would stay in quarantine"
        evictable = self.prefix_cache.audit(self.ref_counts, set(held))
        free = [*self._free, *evictable]
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
