"""A second scheduling policy, so that the scheduler is not tested on one policy alone."""

from __future__ import annotations

from cupaged.request import Sequence


class ByPriority:
    """Priority is `seed % 3` of the request, 0 first; within it preempted first, then arrival.

    The victim has the lowest priority and is the latest arrival of that priority. It may be any of
    the running sequences, the one that asks for room included.
    """

    def __init__(self) -> None:
        self._fresh: list[Sequence] = []
        self._preempted: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that has never run."""
        self._fresh.append(sequence)

    def add_preempted(self, sequence: Sequence) -> None:
        """Queue a sequence again."""
        self._preempted.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a waiting sequence out."""
        (self._preempted if sequence in self._preempted else self._fresh).remove(sequence)

    def peek(self) -> Sequence | None:
        """The most urgent sequence."""
        waiting = [*self._preempted, *self._fresh]
        return min(
            waiting, key=lambda s: (priority(s), s not in self._preempted, s.order), default=None
        )

    def victim(self, candidates: list[Sequence]) -> Sequence:
        """The least urgent sequence."""
        return max(candidates, key=lambda s: (priority(s), s.order))

    def __len__(self) -> int:
        return len(self._fresh) + len(self._preempted)


def priority(sequence: Sequence) -> int:
    """0 is the most urgent."""
    return sequence.request.core.seed % 3
