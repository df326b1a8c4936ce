"""Memory and descriptors of a server's processes when it has nothing to do: they have a level."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any

from tests.faults.server import FaultyServer, num_descriptors, peak_mb, resident_mb

MARGIN_MB = 24.0  # allocators keep what was once needed
MARGIN_DESCRIPTORS = 6  # connections of the witness, and a worker's wake-up pipe


@dataclass(frozen=True, slots=True)
class Level:
    """Of one process at one moment. peak_mb: the most resident memory that it has had."""

    pid: int
    resident_mb: float
    descriptors: int
    peak_mb: float = 0.0


def levels(server: FaultyServer) -> dict[str, list[Level]]:
    """Of all processes now, by role."""
    return {
        role: [
            Level(pid, round(resident_mb(pid), 1), num_descriptors(pid), round(peak_mb(pid), 1))
            for pid in pids
        ]
        for role, pids in server.pids().items()
    }


class LevelHistory:
    """Levels between the rounds of a campaign, whichever process had a role then."""

    def __init__(self) -> None:
        self._found: dict[str, list[Level]] = defaultdict(list)

    def add(self, found: dict[str, list[Level]]) -> None:
        """After a round."""
        for role, each in found.items():
            self._found[role] += each

    def too_many_descriptors(self, found: dict[str, list[Level]]) -> list[str]:
        """Roles with more descriptors than in any process of theirs after the first rounds."""
        return [
            f"{role} {level.pid} has {level.descriptors} descriptors, earlier {least}"
            for role, each in found.items()
            if self._found[role]
            for level in each
            if level.descriptors > (least := self._least(role)) + MARGIN_DESCRIPTORS
        ]

    def growth_mb(self, role: str) -> float:
        """The largest growth of one process, from its second level to its last ones."""
        by_pid: dict[int, list[float]] = defaultdict(list)
        for level in self._found[role]:
            by_pid[level.pid].append(level.resident_mb)
        return max((min(own[-2:]) - own[1] for own in by_pid.values() if len(own) > 3), default=0.0)

    def summary(self) -> dict[str, Any]:
        """Of each role: the first and the last level, the most there was, the growth."""
        return {
            role: {
                "first": asdict(each[0]),
                "last": asdict(each[-1]),
                "most_resident_mb": max(level.resident_mb for level in each),
                "peak_mb": max(level.peak_mb for level in each),
                "most_descriptors": max(level.descriptors for level in each),
                "growth_mb": round(self.growth_mb(role), 1),
            }
            for role, each in self._found.items()
        }

    def _least(self, role: str) -> int:
        return min(level.descriptors for level in self._found[role])
