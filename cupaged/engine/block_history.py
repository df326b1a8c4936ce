"""The last events of every KV block, in words, for errors about it.

Owns nothing but the words: who was given a block, who wrote which slots, what was copied. Writes of
the same sequence that follow each other are one event.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

__all__ = ["BlockHistory"]

_LENGTH = 16  # events of a block that are kept


@dataclass(slots=True)
class _Event:
    """Steps [first_step, last_step]; a writer's event has slots [first_slot, last_slot], too."""

    first_step: int
    last_step: int
    what: str
    first_slot: int = -1
    last_slot: int = -1

    def __str__(self) -> str:
        steps = f"step {self.first_step}"
        if self.last_step != self.first_step:
            steps = f"steps {self.first_step}-{self.last_step}"
        if self.first_slot < 0:
            return f"{steps}: {self.what}"
        slots = f"slot {self.first_slot}"
        if self.last_slot != self.first_slot:
            slots = f"slots {self.first_slot}-{self.last_slot}"
        return f"{steps}: {slots} written by {self.what}"


class BlockHistory:
    """Takes memory only for blocks that something has happened to."""

    def __init__(self) -> None:
        self._events: dict[int, deque[_Event]] = {}

    def note(self, block: int, step: int, what: str) -> None:
        """Something happened to a block when a step was submitted."""
        self._of(block).append(_Event(step, step, what))

    def wrote(self, block: int, step: int, who: str, first_slot: int, last_slot: int) -> None:
        """A step writes slots [first_slot, last_slot] of a block."""
        events = self._of(block)
        last = events[-1] if events else None
        if last is not None and last.what == who and last.last_slot == first_slot - 1 >= 0:
            last.last_step, last.last_slot = step, last_slot
        else:
            events.append(_Event(step, step, who, first_slot, last_slot))

    def tell(self, block: int) -> tuple[str, ...]:
        """The events of a block, the oldest first."""
        return tuple(map(str, self._events.get(block, ())))

    def _of(self, block: int) -> deque[_Event]:
        events = self._events.get(block)
        if events is None:
            events = self._events[block] = deque(maxlen=_LENGTH)
        return events
