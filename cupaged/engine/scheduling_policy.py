"""Who comes first: the order of waiting and running sequences, chosen when the engine is built.

A policy holds the waiting sequences and orders the running ones by its key. The scheduler serves in
that order, and preempts from its end when blocks run out. Within one key, preempted sequences come
before new ones, since they are older.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from cupaged.errors import ConfigError
from cupaged.request import Sequence

Key = tuple[int, ...]


class SchedulingPolicy(Protocol):
    """Order of sequences, and the queue of those that wait.

    has_priorities: whether the priorities of requests count.
    """

    has_priorities: bool

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


class PriorityWithBoundedWait:
    """Lower `priority` first, arrival within one priority; and nobody waits for ever.

    When `max_overtakes` sequences have been admitted past one while it was the oldest that waited,
    that one is promoted: it is next, whatever its priority, and it keeps that rank, also against
    preemption, until it ends. With k older sequences unfinished, a sequence is admitted after at
    most (k + 1) * (max_overtakes + 1) admissions.
    """

    has_priorities = True

    def __init__(self, max_overtakes: int = 64) -> None:
        self._max_overtakes = max_overtakes
        self._by_arrival: list[Key] = []
        self._by_key: list[Key] = []
        self._waiting: dict[Key, Sequence] = {}

    def key(self, sequence: Sequence) -> Key:
        """(not promoted, priority, arrival, sample)."""
        if sequence.is_promoted:
            return (0, 0, *sequence.order)
        return (1, sequence.request.core.priority, *sequence.order)

    def add(self, sequence: Sequence) -> None:
        """Queue by priority."""
        insort(self._by_arrival, sequence.order)
        insort(self._by_key, self.key(sequence))
        self._waiting[sequence.order] = sequence

    add_preempted = add

    def remove(self, sequence: Sequence) -> None:
        """Take a waiting sequence out."""
        self._by_arrival.remove(sequence.order)
        self._by_key.remove(self.key(sequence))
        del self._waiting[sequence.order]

    def admit(self, sequence: Sequence) -> None:
        """Take it out, and count whom it overtakes."""
        self.remove(sequence)
        if self._by_arrival and self._by_arrival[0] < sequence.order:
            overtaken = self._waiting[self._by_arrival[0]]
            overtaken.num_overtakes += 1
            if overtaken.num_overtakes == self._max_overtakes:
                self._promote(overtaken)

    def peek(self) -> Sequence | None:
        """The lowest key."""
        return self._waiting[self._by_key[0][2:]] if self._by_key else None

    def _promote(self, sequence: Sequence) -> None:
        self._by_key.remove(self.key(sequence))
        sequence.is_promoted = True
        insort(self._by_key, self.key(sequence))

    def __len__(self) -> int:
        return len(self._waiting)


POLICIES: dict[str, Callable[[], SchedulingPolicy]] = {
    "fcfs": FirstComeFirstServed,
    "priority": PriorityWithBoundedWait,
}


def make_policy(name: str) -> SchedulingPolicy:
    """The policy of that name: "fcfs" or "priority"."""
    if name not in POLICIES:
        raise ConfigError("scheduling_policy", name, f"one of {', '.join(map(repr, POLICIES))}")
    return POLICIES[name]()
