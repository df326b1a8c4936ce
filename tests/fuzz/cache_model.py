"""What the prefix cache must know, kept a second time: by content, without hashes, trees and lists.

A block's content is the salt and all tokens up to the block's last one. The model says how many
tokens of an admitted sequence must be found, no more and no fewer, that what is evicted was used no
later than anything that stays, and that of equal blocks all hold the first. Both strategies differ
in one thing: what is forgotten after a failure takes along all that stands on it in a radix tree.
"""

from __future__ import annotations

from cupaged.config import EngineConfig
from cupaged.engine.batch import StepPlan
from cupaged.engine.core import EngineCore
from cupaged.request import Request, Sequence, SequenceStatus
from tests.fuzz.host_model import Content, HostModel


class CacheModel:
    """Follows an engine core from plan to plan. A test calls it at every one of these moments."""

    def __init__(self, core: EngineCore, config: EngineConfig) -> None:
        self._core = core
        self._manager = core.block_manager
        self._config = config
        self._is_tree = config.prefix_cache == "radix"
        self._content: dict[int, Content] = {}  # of blocks that must be found
        self._block: dict[Content, int] = {}
        self._last_use: dict[int, int] = {}  # when a block was last seen with a holder
        self._clock = 0
        self._outdated: set[Sequence] = set()  # began before a reset: nothing of them is kept
        self._broken: set[Sequence] = set()  # hold blocks that were forgotten after a failure
        self._num_stored: dict[Sequence, int] = {}  # blocks
        self._length: dict[Sequence, int] = {}  # tokens when it was admitted
        self._loading: set[Sequence] = set()  # begin in flight with blocks of the host
        scheduler, self._leave = core.scheduler, core.scheduler._leave
        scheduler._leave = self.leave  # type: ignore[method-assign]
        cache, self._evict = core.block_manager.prefix_cache, core.block_manager.prefix_cache.evict
        cache.evict = self.evict  # type: ignore[method-assign]
        if not config.num_host_blocks:
            core.block_manager._evict = self.evict
        self.host = HostModel(core, config)
        self.first_found: dict[Request, int] = {}
        self.num_queried = 0
        self.num_found = 0

    def num_cached_tokens(self, sequence: Sequence) -> int:
        """Tokens that a sequence must find when it is admitted now."""
        size = self._config.block_size
        found = 0
        if self._is_kept(sequence):
            most = _num_skippable(sequence)
            while found + size <= most and _content(sequence, found + size) in self._block:
                found += size
        return found

    def num_loaded_tokens(self, sequence: Sequence, num_found: int) -> int:
        """Tokens behind those that the host must have kept, if they are worth it."""
        most = _num_skippable(sequence) if self._is_kept(sequence) else 0
        size, end = self._config.block_size, num_found
        while end + size <= most and self.host.has(_content(sequence, end + size)):
            end += size
        num_tokens = end - num_found
        is_worth_it = self._core.swapping.strategy.loads(num_tokens // size, num_tokens)
        return num_tokens if is_worth_it else 0

    def planned(self, plan: StepPlan) -> None:
        """A plan was made and is not submitted yet."""
        for entry in plan.scheduled:
            sequence = entry.sequence
            if sequence in plan.admitted:
                self._admitted(plan, sequence, entry.start)
            blocks = self._manager.blocks_of(sequence.order)
            written = blocks[entry.start // self._config.block_size :]
            assert self._content.keys().isdisjoint(written), "a block is written that can be found"
        self.host.planned(plan)
        self._outdated.update(plan.swapped_out)  # what they compute when they are back is not kept
        self._observe()

    def evict(self, names: list[bytes] | None = None) -> list[int]:
        """Blocks are given away: after those that nobody can find, in the order of their use."""
        assert not self._manager._free, "evicted though others were free"
        evicted = self._evict(names)
        assert evicted, "nothing was evicted"
        for block in evicted:
            use = self._last_use[block]
            self.host.evicted(block, self._content[block])
            assert self._drop(block), "a block was evicted that was not there"
            assert all(use <= self._last_use[kept] for kept in self._evictable()), (
                "a block was evicted before one that was used earlier"
            )
        return evicted

    def computed(self, plan: StepPlan) -> None:
        """A step has completed; its sequences have not moved on yet.

        What was there when a sequence was admitted is stored, what was generated since is not.
        """
        self.host.computed(plan)
        self._loading.difference_update(plan.admitted)
        for entry in plan.scheduled:
            sequence, end = entry.sequence, entry.start + entry.num_tokens
            if sequence.status is SequenceStatus.RUNNING:
                self._store(sequence, min(end, self._length[sequence]))
        self._observe()

    def leave(self, sequence: Sequence) -> None:
        """A sequence ends or is preempted."""
        used = self._store(sequence, sequence.num_computed_tokens)
        self._leave(sequence)
        self._clock += 1
        self._last_use.update(dict.fromkeys(used, self._clock))

    def failed(self, plan: StepPlan) -> None:
        """A step has failed. Of one request: its blocks cannot be trusted; of several: see core."""
        self.host.failed(plan)
        requests = {entry.sequence.request for entry in plan.scheduled}
        if len(requests) == 1:
            for sequence in requests.pop().unfinished():
                self._outdated.add(sequence)
                if self._is_kept(sequence):
                    self._outdated.update(self._loading)  # perhaps the same blocks
                    size = self._config.block_size
                    for end in range(size, sequence.num_tokens + 1, size):
                        self.host.drop(_content(sequence, end))
                self._forget(self._manager.blocks_of(sequence.order))

    def _forget(self, blocks: list[int]) -> None:
        """The blocks, and in a tree all that stands on the first of them."""
        known = [block for block in blocks if block in self._content]
        if known and self._is_tree:
            salt, first = self._content[blocks[0]]
            known = [
                block
                for block, content in self._content.items()
                if content[0] == salt and content[1][: len(first)] == first
            ]
        for other in self._core.scheduler.running:
            if not set(known).isdisjoint(self._manager.blocks_of(other.order)):
                self._broken.add(other)
        for block in known:
            self._drop(block)

    def _store(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """Its full blocks up to that token are found from now on; returns these blocks."""
        if not self._is_kept(sequence) or sequence in self._outdated:
            return []
        if sequence in self._broken and self._is_tree:
            return []
        size = self._config.block_size
        stored = self._num_stored[sequence]
        if sequence in self._loading:
            num_tokens = stored * size
        own = self._manager.blocks_of(sequence.order)
        holds_another = False
        for i in range(stored, num_tokens // size):
            content = _content(sequence, (i + 1) * size)
            if content in self._block:
                holds_another |= self._block[content] != own[i]
            elif holds_another and self._manager.ref_counts[own[i]] > 1 and self._is_tree:
                self._broken.add(sequence)  # a sibling holds it, but not what it would stand on
                break
            else:
                self._block[content] = own[i]
                self._content[own[i]] = content
        self._num_stored[sequence] = max(stored, num_tokens // size)
        contents = [_content(sequence, (i + 1) * size) for i in range(num_tokens // size)]
        return [self._block[content] for content in contents if content in self._block]

    def reset(self) -> None:
        """The cache was reset."""
        self._content.clear()
        self._block.clear()
        self.host.reset()
        self._outdated.update(self._core.scheduler.running)
        self._outdated.update(self._core.swapping.swapped)

    def forked(self, parent: Sequence, child: Sequence) -> None:
        """A sequence shares all blocks of another one from now on."""
        for group in (self._outdated, self._broken):
            if parent in group:
                group.add(child)
        self._num_stored[child] = self._num_stored[parent]
        self._length[child] = self._length[parent]

    def look(self) -> None:
        """Between two calls of the core: the cache keeps exactly what it must."""
        for sequence in self._core.scheduler.running:
            self._check_sharing(sequence)
        self._observe()
        evictable = self._manager.prefix_cache.num_evictable_blocks
        assert evictable == len(self._evictable()), "too many blocks or too few are kept"
        self.host.check()

    def _check_sharing(self, sequence: Sequence) -> None:
        if not self._is_kept(sequence) or sequence in self._outdated | self._broken:
            return
        size, held = self._config.block_size, self._manager.blocks_of(sequence.order)
        for i in range(self._num_stored[sequence]):
            assert held[i] == self._block[_content(sequence, (i + 1) * size)], "held twice"

    def _admitted(self, plan: StepPlan, sequence: Sequence, start: int) -> None:
        found = self.num_cached_tokens(sequence)
        loaded = self.num_loaded_tokens(sequence, found)
        self._num_stored[sequence] = found // self._config.block_size
        if loaded:
            self._loading.add(sequence)
            for end in range(found, found + loaded, self._config.block_size):
                end += self._config.block_size
                block = self._manager.blocks_of(sequence.order)[end // self._config.block_size - 1]
                self.host.loaded(_content(sequence, end), block, plan)
        found += loaded
        assert start == found, f"{start} tokens were found in the cache instead of {found}"
        self._outdated.discard(sequence)
        self._broken.discard(sequence)
        self._length[sequence] = sequence.num_tokens
        if sequence.request not in self.first_found:
            self.first_found[sequence.request] = found
            if self._is_kept(sequence):
                self.num_queried += sequence.num_tokens
                self.num_found += found

    def _is_kept(self, sequence: Sequence) -> bool:
        wanted = sequence.request.core.prefix_caching
        return self._config.enable_prefix_caching and wanted is not False

    def _drop(self, block: int) -> bool:
        content = self._content.pop(block, None)
        if content is not None:
            del self._block[content]
        return content is not None

    def _evictable(self) -> list[int]:
        return [block for block in self._content if not self._is_in_use(block)]

    def _is_in_use(self, block: int) -> bool:
        return self._manager.ref_counts[block] > 0 or block in self._manager._freed

    def _observe(self) -> None:
        self._clock += 1
        self._last_use.update((b, self._clock) for b in self._content if self._is_in_use(b))


def _num_skippable(sequence: Sequence) -> int:
    """All tokens but the last; of a prompt whose tokens are to be scored, those that were."""
    request = sequence.request
    scored = len(request.prompt_logprobs)
    if request.core.params.prompt_logprobs is None or scored == request.num_prompt_tokens - 1:
        return sequence.num_tokens - 1
    return scored


def _content(sequence: Sequence, num_tokens: int) -> Content:
    return sequence.request.core.cache_salt or "", tuple(sequence.token_ids[:num_tokens])
