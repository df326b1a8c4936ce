"""What the host must keep of the prefix cache, kept a second time: by content, without names."""

from __future__ import annotations

from cupaged.config import EngineConfig
from cupaged.engine.batch import StepPlan
from cupaged.engine.core import EngineCore

Content = tuple[str, tuple[int, ...]]


class HostModel:
    """Follows what is evicted from the device's cache to the host and back, from plan to plan.

    What is evicted is kept, the last of it if there is too little room, and what was used least
    recently makes room for more; what a step in flight uses stays.
    """

    def __init__(self, core: EngineCore, config: EngineConfig) -> None:
        self._pool = core.swapping.host_pool
        self._is_used = config.num_host_blocks > 0
        self._block: dict[Content, int] = {}
        self._last_step: dict[Content, int] = {}  # that used it
        self._unwritten: dict[Content, int] = {}  # step in flight that writes it
        self._evicted: dict[int, Content] = {}  # for the plan being made
        self._loaded: list[tuple[int, int]] = []  # by the plan being looked at
        self._in_flight: set[int] = set()
        swapping, self._take_back = core.swapping, core.swapping.take_back
        swapping.take_back = self.taken_back  # type: ignore[method-assign]

    def has(self, content: Content) -> bool:
        """Whether it can be loaded now."""
        return content in self._block and content not in self._unwritten

    def evicted(self, block: int, content: Content) -> None:
        """The device gives a block away."""
        if self._is_used:
            self._evicted[block] = content

    def loaded(self, content: Content, block: int, plan: StepPlan) -> None:
        """The plan must fill a block with it."""
        self._last_step[content] = plan.step_id
        self._loaded.append((self._block[content], block))

    def planned(self, plan: StepPlan) -> None:
        """A plan was made; what it loads was told."""
        self._in_flight.add(plan.step_id)
        loaded, self._loaded = self._loaded, []
        assert set(loaded) <= set(plan.swap_in), "what was found is not loaded, or to elsewhere"
        has_groups = bool(plan.swapped_in)
        assert has_groups or len(loaded) == len(plan.swap_in), "blocks are loaded for nobody"
        held = {b for s in plan.swapped_out for b in self._pool.blocks_of(s.order)}
        num_group_pairs = sum(host in held for _, host in plan.swap_out)
        for _, host in plan.swap_out[:num_group_pairs]:
            assert host in held, "a group is not saved first"
            self._give_way(host, plan)
        saved = dict(plan.swap_out[num_group_pairs:])
        evicted, self._evicted = self._evicted, {}
        assert saved.keys() <= evicted.keys(), "something else was saved than what was evicted"
        for content in evicted.values():
            if content in self._block:
                self._last_step[content] = plan.step_id
        new = [*{c: block for block, c in evicted.items() if c not in self._block}.values()]
        assert [*saved] == new[len(new) - len(saved) :], "others are saved than the last ones"
        full = not self._pool.num_free_blocks
        assert full or len(saved) == len(new), "there was room for what was evicted"
        for block, host in saved.items():
            self._give_way(host, plan)
            self._block[evicted[block]] = host
            self._unwritten[evicted[block]] = plan.step_id
            self._last_step[evicted[block]] = plan.step_id

    def taken_back(self, plan: StepPlan) -> None:
        """The plan is not submitted: what gave way to its swapped groups is lost all the same."""
        for _, host in plan.swap_out:
            self._give_way(host, plan)
        self._take_back(plan)

    def computed(self, plan: StepPlan) -> None:
        """The step has ended well."""
        self._in_flight.discard(plan.step_id)
        self._unwritten = {c: s for c, s in self._unwritten.items() if s != plan.step_id}

    def failed(self, plan: StepPlan) -> None:
        """What the step was to write is not there."""
        for content in [c for c, step in self._unwritten.items() if step == plan.step_id]:
            self.drop(content)
        self._in_flight.discard(plan.step_id)

    def drop(self, content: Content) -> None:
        """Nobody may find it any more."""
        self._block.pop(content, None)
        self._unwritten.pop(content, None)

    def reset(self) -> None:
        """Nobody may find anything any more."""
        self._block.clear()
        self._unwritten.clear()

    def check(self) -> None:
        """Between two calls of the core."""
        assert self._pool.num_kept_blocks == len(self._block), "too much or too little is kept"
        assert len(set(self._block.values())) == len(self._block), "two contents in one block"

    def _give_way(self, host: int, plan: StepPlan) -> None:
        """A block of the host is written: what was there must have been used least recently."""
        for content in [c for c, block in self._block.items() if block == host]:
            use = self._last_step[content]
            assert use not in self._in_flight, "what a step in flight uses was given away"
            others = [self._last_step[c] for c in self._block]
            assert use <= min(others), "what was used later was given away first"
            self.drop(content)
