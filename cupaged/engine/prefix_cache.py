"""Which full blocks hold which tokens, so that a request can begin with blocks computed before.

Only full blocks whose step has completed are stored. Blocks that no sequence holds stay findable
until their memory is wanted, least recently used first. The strategies here never touch the blocks'
contents, their reference counts or the block tables: those are the block manager's.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Set
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cupaged.engine.block_names import NO_PARENT, hash_block, name_block
from cupaged.request import NEVER
from cupaged.request import Sequence as TokenSequence

Exchange = tuple[int, int]  # (index of a block of the sequence, block to hold in its place)


class PrefixStrategy(Protocol):
    """What the scheduler and the block manager ask of a cache of prefixes.

    num_query_tokens: tokens of new requests that were looked up; num_hit_tokens: those found.
    """

    num_query_tokens: int
    num_hit_tokens: int

    @property
    def num_evictable_blocks(self) -> int:
        """Blocks that can be found and that no sequence holds; `evict` gives them away."""

    def find(self, sequence: TokenSequence) -> list[int]:
        """Blocks of the longest stored prefix, in order, that leaves a token to compute."""

    def hold(self, blocks: list[int]) -> None:
        """A sequence holds these found blocks from now on, which follow one another."""

    def admitted(self, sequence: TokenSequence, num_cached_tokens: int) -> None:
        """The sequence begins with that many tokens, and its full blocks will be stored."""

    def store(
        self, sequence: TokenSequence, blocks: list[int], ref_counts: NDArray[np.int32]
    ) -> list[Exchange]:
        """Make the full blocks of a sequence's computed tokens findable.

        Args:
            blocks: what the sequence holds, in order.
            ref_counts: int32 [num_blocks], how many sequences hold each block.

        Returns:
            Which of its blocks are stored already, as another block that it is to hold instead.
        """

    def forget(self, blocks: list[int]) -> list[int]:
        """Make blocks that a sequence holds unfindable: nobody knows what is in them.

        Returns:
            Blocks that were evictable and cannot be found any more.
        """

    def retire(self, blocks: list[int]) -> list[int]:
        """No sequence holds these blocks any more, nor a step. They come from one sequence, tail
        first, or from `withdraw`. Returns those that are not kept."""

    def withdraw(self, blocks: Set[int]) -> list[int]:
        """A step uses these evictable blocks: they are not evictable until they retire again, in
        the order in which they are returned."""

    def evict(self, names: list[bytes] | None = None) -> list[int]:
        """At least one evictable block, least recently used; it cannot be found from now on.

        Args:
            names: `block_names` of what is given away are appended to it.
        """

    def reset(self) -> list[int]:
        """Forget everything; returns the blocks that were evictable."""

    def audit(self, ref_counts: NDArray[np.int32], unreferenced: set[int]) -> set[int]:
        """Check itself, given which blocks wait for a step in flight; returns what it keeps."""

    def audit_sequence(self, sequence: TokenSequence, blocks: list[int]) -> None:
        """Check that what can be found of a running sequence's blocks is full and its own."""


class NoPrefixCache:
    """Nothing is stored and nothing is found."""

    num_query_tokens = 0
    num_hit_tokens = 0
    num_evictable_blocks = 0

    def find(self, sequence: TokenSequence) -> list[int]:
        """No block."""
        return []

    def hold(self, blocks: list[int]) -> None:
        """Never called with a block: nothing is found."""

    def admitted(self, sequence: TokenSequence, num_cached_tokens: int) -> None:
        """Nothing to do."""

    def store(
        self, sequence: TokenSequence, blocks: list[int], ref_counts: NDArray[np.int32]
    ) -> list[Exchange]:
        """Never called: no sequence is told to be stored."""
        raise AssertionError("there is nothing to store in")

    def forget(self, blocks: list[int]) -> list[int]:
        """No block."""
        return []

    def retire(self, blocks: list[int]) -> list[int]:
        """All of them."""
        return blocks

    def withdraw(self, blocks: Set[int]) -> list[int]:
        """Never called with a block: nothing is evictable."""
        return []

    def evict(self, names: list[bytes] | None = None) -> list[int]:
        """Never called: nothing is evictable."""
        raise AssertionError("there is nothing to evict")

    def reset(self) -> list[int]:
        """No block."""
        return []

    def audit(self, ref_counts: NDArray[np.int32], unreferenced: set[int]) -> set[int]:
        """Nothing is kept."""
        return set()

    def audit_sequence(self, sequence: TokenSequence, blocks: list[int]) -> None:
        """Check that it is never stored."""
        assert sequence.store_at == NEVER, "a sequence waits to be stored in no cache"
        assert sequence.num_stored_blocks is None, "a sequence will be stored in no cache"


class StoringCache:
    """What caches of prefixes have in common: when a sequence is stored, and what is counted.

    A prompt is stored as its steps complete, what was generated when the sequence leaves: one
    insertion a chunk and one at the end, none in a step that only decodes.
    """

    def __init__(self, block_size: int) -> None:
        self.num_query_tokens = 0
        self.num_hit_tokens = 0
        self._block_size = block_size

    def admitted(self, sequence: TokenSequence, num_cached_tokens: int) -> None:
        """Count a new request's tokens; recomputation after preemption is not counted."""
        request = sequence.request
        if not request.uses_prefix_cache:
            return
        sequence.num_stored_blocks = num_cached_tokens // self._block_size
        due = num_cached_tokens + self._block_size
        sequence.store_at = due if due <= sequence.num_tokens else NEVER
        if request.first_scheduled_time is None:
            self.num_query_tokens += sequence.num_tokens
            self.num_hit_tokens += num_cached_tokens
            request.num_cached_tokens = num_cached_tokens

    def store(
        self, sequence: TokenSequence, blocks: list[int], ref_counts: NDArray[np.int32]
    ) -> list[Exchange]:
        """Blocks from `sequence.num_stored_blocks` on; those before are stored already."""
        first, size = sequence.num_stored_blocks, self._block_size
        assert first is not None, "a sequence that leaves nothing is stored"
        stop = sequence.num_computed_tokens // size
        if stop == first:
            return []
        sequence.num_stored_blocks = stop
        due = (stop + 1) * size  # of what is there already; what is generated waits for the end
        sequence.store_at = due if due <= sequence.num_tokens else NEVER
        return self._insert(sequence, blocks, first, stop, ref_counts)

    def _insert(
        self,
        sequence: TokenSequence,
        blocks: list[int],
        first: int,
        stop: int,
        ref_counts: NDArray[np.int32],
    ) -> list[Exchange]:
        """Store blocks [first, stop) of a sequence; see `store`."""
        raise NotImplementedError


class PrefixCache(StoringCache):
    """A flat table from names to blocks, and the evictable blocks in the order of their last use.

    A sequence gives its blocks back tail first, so that the tail of a prefix is evicted before what
    it stands on. It holds what is stored: of equal blocks the first one, not its own. Only when
    blocks are forgotten after a failure, others that stand on them stay without being found, until
    somebody computes those before them or they are evicted.
    """

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self._block_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def num_evictable_blocks(self) -> int:
        """Blocks that can be found and that no sequence holds."""
        return len(self._evictable)

    def find(self, sequence: TokenSequence) -> list[int]:
        """Names are computed as far as they are found, once for each sequence."""
        if not sequence.request.uses_prefix_cache:
            return []
        blocks: list[int] = []
        for i in range(sequence.num_skippable_tokens // self._block_size):
            block = self._block_of.get(name_block(sequence, i, self._block_size))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def hold(self, blocks: list[int]) -> None:
        """They are not evictable any more."""
        for block in blocks:
            self._evictable.pop(block, None)

    def _insert(
        self,
        sequence: TokenSequence,
        blocks: list[int],
        first: int,
        stop: int,
        ref_counts: NDArray[np.int32],
    ) -> list[Exchange]:
        exchanges = []
        for i in range(first, stop):
            name = name_block(sequence, i, self._block_size)
            block = self._block_of.setdefault(name, blocks[i])
            if block == blocks[i]:
                self._name_of[block] = name
            else:
                exchanges.append((i, block))
        return exchanges

    def forget(self, blocks: list[int]) -> list[int]:
        """Blocks without a name are passed over. None of them was evictable."""
        for block in blocks:
            name = self._name_of.pop(block, None)
            if name is not None:
                del self._block_of[name]
        return []

    def retire(self, blocks: list[int]) -> list[int]:
        """Keep those with a name, as the most recently used."""
        names, evictable, others = self._name_of, self._evictable, []
        for block in blocks:
            if block in names:
                evictable[block] = None
            else:
                others.append(block)
        return others

    def withdraw(self, blocks: Set[int]) -> list[int]:
        """Least recently used first."""
        withdrawn = [block for block in self._evictable if block in blocks]
        self.hold(withdrawn)
        return withdrawn

    def evict(self, names: list[bytes] | None = None) -> list[int]:
        """The least recently used block."""
        block, _ = self._evictable.popitem(last=False)
        name = self._name_of.pop(block)
        del self._block_of[name]
        if names is not None:
            names.append(name)
        return [block]

    def reset(self) -> list[int]:
        """The counts of tokens go on."""
        blocks = list(self._evictable)
        self._evictable.clear()
        self._block_of.clear()
        self._name_of.clear()
        return blocks

    def audit(self, ref_counts: NDArray[np.int32], unreferenced: set[int]) -> set[int]:
        """Names and blocks are one to one; evictable is what has a name and no holder."""
        assert self._block_of == {name: block for block, name in self._name_of.items()}, (
            "the table of names and the names of blocks differ"
        )
        idle = {block for block in self._name_of if not ref_counts[block]} - unreferenced
        assert idle == self._evictable.keys(), (
            f"blocks {sorted(idle ^ self._evictable.keys())} are held and evictable, or neither"
        )
        return set(self._evictable)

    def audit_sequence(self, sequence: TokenSequence, blocks: list[int]) -> None:
        """A sequence that is not stored has no block that can be found, unless it found it."""
        size = self._block_size
        if not sequence.request.uses_prefix_cache:
            assert not self._name_of.keys() & blocks, "a block of a request without cache is shared"
        parent = NO_PARENT
        for i, block in enumerate(blocks):
            tokens = array("i", sequence.token_ids[i * size : (i + 1) * size]).tobytes()
            extras = () if i else sequence.request.cache_extras
            parent = hash_block(parent, tokens, extras)
            if block in self._name_of:
                assert (i + 1) * size <= sequence.num_computed_tokens, (
                    "a block is findable too soon"
                )
                assert self._name_of[block] == parent, "a block has another's name"
