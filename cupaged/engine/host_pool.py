"""Owner of the host's KV blocks: which swapped sequence holds which of them, and what is kept.

A sequence that was swapped out keeps its computed tokens in blocks of the host's memory, in the
order of their positions. Blocks that several sequences of a group shared on the device are kept
once and stay shared (Kwon et al., SOSP 2023, section 4.5). Blocks that no sequence needs keep what
the prefix cache of the device gave up, by name, until they are needed, least recently used first. A
block that a step in flight reads or writes is handed out again only when that step has ended.
Contents are the runner's.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Hashable, Mapping

BlockPair = tuple[int, int]  # (source block, destination block), one on the device, one on the host


class HostPool:
    """Blocks 0 .. num_blocks-1 of the host. Sequences are named by any hashable key."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free: deque[int] = deque(range(num_blocks))
        self._held: dict[Hashable, list[int]] = {}  # by sequence, in order of position
        self._num_holders: Counter[int] = Counter()
        self._being_written: dict[Hashable, int] = {}  # sequence: step that swaps it out
        self._until: dict[int, list[int]] = {}  # step in flight: blocks that are free after it
        self._kept: dict[bytes, int] = {}  # blocks of the device's cache, by name
        self._idle: OrderedDict[bytes, None] = OrderedDict()  # names that no step in flight uses
        self._last_step: dict[bytes, int] = {}  # of the other names: the last step that uses them
        self._used_by: dict[int, list[bytes]] = {}  # step in flight: names, perhaps dropped since
        self._unwritten: dict[bytes, int] = {}  # name: step in flight that writes its block

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be handed out now, those included whose content is kept till then."""
        return len(self._free) + len(self._idle)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that hold the KV of a sequence."""
        return len(self._num_holders)

    @property
    def num_kept_blocks(self) -> int:
        """Blocks that keep what the device's cache gave up."""
        return len(self._kept)

    # ---- swapped sequences ---------------------------------------------------------------------

    def holders(self) -> set[Hashable]:
        """The sequences that hold blocks."""
        return set(self._held)

    def blocks_of(self, key: Hashable) -> list[int]:
        """The sequence's blocks in order of position; empty if it holds none."""
        return self._held.get(key, [])

    def is_written(self, key: Hashable) -> bool:
        """False while the step that swaps the sequence out is in flight."""
        return key not in self._being_written

    def swap_out(
        self, device_blocks: Mapping[Hashable, list[int]], step_id: int
    ) -> list[BlockPair]:
        """Give a group blocks for its device blocks, which a step is going to copy.

        Args:
            device_blocks: of each sequence, in order of position; they fit into the free blocks.

        Returns:
            (device block, host block), each device block once.
        """
        host_block: dict[int, int] = {}
        for key, blocks in device_blocks.items():
            assert key not in self._held, f"sequence {key} is swapped out twice"
            for block in blocks:
                if block not in host_block:
                    host_block[block] = self._take()
            self._held[key] = held = [host_block[block] for block in blocks]
            self._num_holders.update(held)
            self._being_written[key] = step_id
        return list(host_block.items())

    def release(self, key: Hashable, step_id: int | None = None) -> None:
        """Take a sequence's blocks back. One that holds none is passed over.

        Args:
            step_id: a step that has yet to read them.
        """
        writing = self._being_written.pop(key, None)
        until = writing if step_id is None else step_id
        for block in self._held.pop(key, ()):
            self._num_holders[block] -= 1
            if not self._num_holders[block]:
                del self._num_holders[block]
                self._give_back(block, until)

    # ---- kept blocks ---------------------------------------------------------------------------

    def keep(self, evicted: list[tuple[int, bytes]], step_id: int) -> list[BlockPair]:
        """Keep blocks that the device's cache gives up; the last of them, if not all have room.

        Args:
            evicted: (device block, its name), least recently used first. A name comes twice where
                two sequences that computed the same gave way, one after the other.

        Returns:
            (device block, host block) of those that a step has to copy; the others are there.
        """
        new: dict[bytes, int] = {}
        for block, name in evicted:
            if name in self._kept:
                self.use(name, step_id)  # it gives way to none of the others
            else:
                new[name] = block
        pairs = []
        for name, block in list(new.items())[max(0, len(new) - self.num_free_blocks) :]:
            self._kept[name] = host_block = self._take()
            self._unwritten[name] = step_id
            self.use(name, step_id)
            pairs.append((block, host_block))
        return pairs

    def find(self, name: bytes) -> int | None:
        """The block that keeps the content of that name; None while a step writes it, or never."""
        return None if name in self._unwritten else self._kept.get(name)

    def use(self, name: bytes, step_id: int) -> None:
        """A step reads or writes a kept block, or would if it were not there already."""
        self._idle.pop(name, None)
        self._last_step[name] = step_id
        self._used_by.setdefault(step_id, []).append(name)

    def drop(self, name: bytes) -> None:
        """Nobody may find this content any more. A name that is not known is passed over."""
        block = self._kept.pop(name, None)
        if block is not None:
            self._unwritten.pop(name, None)
            self._idle.pop(name, None)
            self._give_back(block, self._last_step.pop(name, None))

    def drop_all(self) -> None:
        """Keep nothing of what is kept now."""
        for name in list(self._kept):
            self.drop(name)

    # ---- steps ---------------------------------------------------------------------------------

    def step_failed(self, step_id: int) -> None:
        """The step did not copy what was to be kept, or nobody knows. Then it ends."""
        for name in [n for n, step in self._unwritten.items() if step == step_id]:
            self.drop(name)

    def step_ended(self, step_id: int) -> None:
        """The step is over, well or not: it reads and writes no block any more."""
        for key in [k for k, step in self._being_written.items() if step == step_id]:
            del self._being_written[key]
        for name in self._used_by.pop(step_id, ()):
            if self._last_step.get(name) == step_id:
                del self._last_step[name]
                self._idle[name] = None
            if self._unwritten.get(name) == step_id:
                del self._unwritten[name]
        self._free.extend(self._until.pop(step_id, ()))

    def audit(self) -> None:
        """Check that every block is free, kept, waits for a step, or has the holders it is counted
        for.

        AssertionError says which one is not.
        """
        idle = [*self._free, *(block for blocks in self._until.values() for block in blocks)]
        idle += self._kept.values()
        assert len(idle) == len(set(idle)), "a host block is free twice, or free and kept"
        counts = Counter(block for blocks in self._held.values() for block in blocks)
        assert counts == self._num_holders, "holders of host blocks are miscounted"
        assert not counts.keys() & set(idle), "a free host block is held"
        assert {*idle, *counts} == set(range(self.num_blocks)), "a host block is lost"
        for key, blocks in self._held.items():
            assert len(blocks) == len(set(blocks)), f"sequence {key} holds a host block twice"
        assert self._being_written.keys() <= self._held.keys(), "nobody's blocks are written"
        assert not self._idle.keys() & self._last_step.keys(), "a name is idle and used"
        assert self._idle.keys() | self._last_step.keys() == self._kept.keys(), "a name is lost"
        assert self._unwritten.keys() <= self._last_step.keys(), "what nobody writes is unwritten"

    def _take(self) -> int:
        """A free block; one with a kept content only when there are no others."""
        if not self._free:
            name, _ = self._idle.popitem(last=False)
            self._free.append(self._kept.pop(name))
        return self._free.popleft()

    def _give_back(self, block: int, last_step: int | None) -> None:
        """The block is free when the last step that uses it has ended."""
        if last_step is None:
            self._free.append(block)
        else:
            self._until.setdefault(last_step, []).append(block)
