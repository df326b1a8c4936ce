"""Who comes first: the order of waiting and running sequences, chosen when the engine is built.

A policy holds the waiting sequences and orders the running ones by its key. The scheduler serves in
that order, and preempts from its end when blocks run out. Within one key, preempted sequences come
before new ones, since they are older.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from cupaged.engine.prefix_cache import PrefixStrategy
from cupaged.errors import ConfigError
from cupaged.request import Sequence, SequenceStatus

Key = tuple[int, ...]
NUM_LOOKED_UP = 8


class SchedulingPolicy(Protocol):
    """Order of sequences, and the queue of those that wait.

    has_priorities: whether the priorities of requests count.
    """

    has_priorities: bool

    def use(self, prefix_cache: PrefixStrategy) -> None:
        """Called once, before all others: where the cached prefixes of sequences are found."""

    def key(self, sequence: Sequence) -> Key:
        """Position among the running sequences, lowest first; unique, fixed while it runs."""

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that has never run."""

    def add_preempted(self, sequence: Sequence) -> None:
        """Queue a sequence again that was preempted."""

    def remove(self, sequence: Sequence) -> None:
        """Take out a waiting sequence that has ended."""

    def admit(self, sequence: Sequence) -> None:
        """Take out the sequence that `peek` gave: it runs now."""

    def peek(self) -> Sequence | None:
        """The sequence to admit next, None if none waits."""

    def __len__(self) -> int: ...


class FirstComeFirstServed:
    """Strict order of arrival: preempted sequences stand before new ones, nobody skips ahead.

    The head of the queue waits until it fits, and everybody behind it waits too; since running
    sequences end, that wait is finite.
    """

    has_priorities = False

    def __init__(self) -> None:
        self._queue: OrderedDict[Key, Sequence] = OrderedDict()

    def use(self, prefix_cache: PrefixStrategy) -> None:
        """Nothing to do."""

    def key(self, sequence: Sequence) -> Key:
        """Order of arrival."""
        return sequence.order

    def add(self, sequence: Sequence) -> None:
        """Queue at the end."""
        self._queue[sequence.order] = sequence

    def add_preempted(self, sequence: Sequence) -> None:
        """Queue at the front. Victims come latest first, so they stand in order of arrival."""
        self._queue[sequence.order] = sequence
        self._queue.move_to_end(sequence.order, last=False)

    def remove(self, sequence: Sequence) -> None:
        """Take a waiting sequence out."""
        del self._queue[sequence.order]

    admit = remove

    def peek(self) -> Sequence | None:
        """The head of the queue."""
        return next(iter(self._queue.values()), None)

    def __len__(self) -> int:
        return len(self._queue)


class BoundedWait:
    """Waiting sequences by a rank, lowest first; and nobody waits for ever.

    When `max_overtakes` sequences have been admitted past one while it was the oldest that waited,
    that one is promoted: it is next, whatever its rank, and it stays promoted until it ends. With k
    older sequences unfinished, a sequence is admitted after at most (k + 1) * (max_overtakes + 1)
    admissions.
    """

    has_priorities = False

    def __init__(self, max_overtakes: int = 64) -> None:
        self._max_overtakes = max_overtakes
        self._by_arrival: list[Key] = []
        self._by_rank: list[Key] = []  # a rank ends with the order of its sequence
        self._rank_of: dict[Key, Key] = {}
        self._waiting: dict[Key, Sequence] = {}

    def use(self, prefix_cache: PrefixStrategy) -> None:
        """Nothing to do."""

    def key(self, sequence: Sequence) -> Key:
        """Order of arrival."""
        return sequence.order

    def rank(self, sequence: Sequence) -> Key:
        """Position in the queue, lowest first, as it is now."""
        raise NotImplementedError

    def add(self, sequence: Sequence) -> None:
        """Queue by its rank."""
        insort(self._by_arrival, sequence.order)
        self._rank_of[sequence.order] = rank = self.rank(sequence)
        insort(self._by_rank, rank)
        self._waiting[sequence.order] = sequence

    def add_preempted(self, sequence: Sequence) -> None:
        """Queue by its rank."""
        self.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a waiting sequence out."""
        _take_out(self._by_arrival, sequence.order)
        _take_out(self._by_rank, self._rank_of.pop(sequence.order))
        del self._waiting[sequence.order]

    def admit(self, sequence: Sequence) -> None:
        """Take it out, and count whom it overtakes."""
        self.remove(sequence)
        if self._by_arrival and self._by_arrival[0] < sequence.order:
            overtaken = self._waiting[self._by_arrival[0]]
            overtaken.num_overtakes += 1
            if overtaken.num_overtakes == self._max_overtakes:
                overtaken.is_promoted = True
                self._rank_again(overtaken)

    def peek(self) -> Sequence | None:
        """The lowest rank."""
        return self._waiting[self._by_rank[0][-2:]] if self._by_rank else None

    def _rank_again(self, sequence: Sequence) -> bool:
        """Move a waiting sequence to where it belongs now; False if it stands there already."""
        before, rank = self._rank_of[sequence.order], self.rank(sequence)
        if rank == before:
            return False
        _take_out(self._by_rank, before)
        insort(self._by_rank, rank)
        self._rank_of[sequence.order] = rank
        return True

    def __len__(self) -> int:
        return len(self._waiting)


class PriorityWithBoundedWait(BoundedWait):
    """Lower `priority` first, arrival within one priority; a promoted sequence is next.

    It keeps that rank, also against preemption, until it ends.
    """

    has_priorities = True

    def key(self, sequence: Sequence) -> Key:
        """(not promoted, priority, arrival, sample)."""
        if sequence.is_promoted:
            return (0, 0, *sequence.order)
        return (1, sequence.request.core.priority, *sequence.order)

    rank = key


class LongestPrefixFirst(BoundedWait):
    """Whoever finds most of its prompt in the cache comes first, arrival among equals.

    That is the cache-aware order of SGLang (arXiv 2312.07104, section 3): what is in the cache is
    used before it is evicted; what the host keeps does not count. Promoted and preempted sequences
    come before all others. Running sequences stand in order of arrival.

    What a sequence would find is looked up when it comes, and again now and then, since the cache
    changes: whenever somebody may be admitted, that of the first of the queue, until the first is
    up to date, and of `NUM_LOOKED_UP` others in turn. So a call costs a bounded number of looks
    into the cache, however long the queue, and a rank is out of date for at most
    len(queue) / NUM_LOOKED_UP calls.
    """

    def __init__(self, max_overtakes: int = 64) -> None:
        super().__init__(max_overtakes)
        self._find: Callable[[Sequence], list[int]] = lambda sequence: []
        self._next_look = 0

    def use(self, prefix_cache: PrefixStrategy) -> None:
        """Look into that cache."""
        self._find = prefix_cache.find

    def rank(self, sequence: Sequence) -> Key:
        """(not promoted, has never run, -blocks found, arrival, sample)."""
        if sequence.is_promoted:
            return (0, 0, 0, *sequence.order)
        if sequence.status is not SequenceStatus.WAITING:
            return (1, 0, 0, *sequence.order)
        return (1, 1, -len(self._find(sequence)), *sequence.order)

    def peek(self) -> Sequence | None:
        """The lowest rank, after some of the ranks were brought up to date."""
        for _ in range(min(NUM_LOOKED_UP, len(self._by_arrival))):
            self._next_look = (self._next_look + 1) % len(self._by_arrival)
            self._rank_again(self._waiting[self._by_arrival[self._next_look]])
        first = super().peek()
        for _ in range(NUM_LOOKED_UP):
            if first is None or not self._rank_again(first):
                break
            first = super().peek()
        return first


def _take_out(keys: list[Key], key: Key) -> None:
    """Of sorted keys: without a look at each, since a whole queue may be aborted one by one."""
    place = bisect_left(keys, key)
    assert keys[place] == key, f"{key} is not in its place"
    del keys[place]


POLICIES: dict[str, Callable[[], SchedulingPolicy]] = {
    "fcfs": FirstComeFirstServed,
    "priority": PriorityWithBoundedWait,
    "longest-prefix": LongestPrefixFirst,
}


def make_policy(name: str) -> SchedulingPolicy:
    """The policy of that name: "fcfs", "priority" or "longest-prefix"."""
    if not isinstance(name, str) or name not in POLICIES:
        raise ConfigError("scheduling_policy", name, f"one of {', '.join(map(repr, POLICIES))}")
    return POLICIES[name]()
