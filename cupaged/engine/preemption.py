"""What becomes of a group of sequences that gives way: swapped to the host, or computed again.

A strategy answers for one group at a time and is chosen when the engine is built. It moves nothing:
the scheduler does. It also says whether a prefix that the host keeps is copied or computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cupaged.config import EngineConfig
from cupaged.errors import ConfigError
from cupaged.request import Sequence as TokenSequence

PREEMPTION_MODES = ("auto", "swap", "recompute")


@dataclass(frozen=True, slots=True)
class PreemptionCosts:
    """Seconds that giving way costs, as measured on the device.

    per_swap, per_block: copying a number of blocks out and in again. per_token: computing a token
    of a prompt.
    """

    per_swap: float
    per_block: float
    per_token: float

    def swap(self, num_blocks: int) -> float:
        """Seconds for blocks that leave and come back."""
        return self.per_swap + self.per_block * num_blocks

    def recompute(self, num_tokens: int) -> float:
        """Seconds for tokens that are computed again."""
        return self.per_token * num_tokens


class PreemptionStrategy(Protocol):
    """Whether a group that gives way is swapped out, given that the host has room for it."""

    def swaps(self, group: Sequence[TokenSequence], num_blocks: int) -> bool:
        """False: it gives its tokens up instead.

        Args:
            group: the running sequences of a request.
            num_blocks: blocks that hold their computed tokens, shared ones counted once.
        """

    def loads(self, num_blocks: int, num_tokens: int) -> bool:
        """Whether blocks of a prefix come back from the host, rather than be computed."""


class Recompute:
    """Never swap."""

    def swaps(self, group: Sequence[TokenSequence], num_blocks: int) -> bool:
        """No."""
        return False

    def loads(self, num_blocks: int, num_tokens: int) -> bool:
        """No."""
        return False


class Swap:
    """Swap whatever the host has room for."""

    def swaps(self, group: Sequence[TokenSequence], num_blocks: int) -> bool:
        """Yes."""
        return True

    def loads(self, num_blocks: int, num_tokens: int) -> bool:
        """Yes."""
        return True


class Cheaper:
    """Swap where that takes less time than computing every sequence of the group again."""

    def __init__(self, costs: PreemptionCosts) -> None:
        self.costs = costs

    def swaps(self, group: Sequence[TokenSequence], num_blocks: int) -> bool:
        """Shared blocks are copied once, but their tokens are computed once a sequence."""
        num_tokens = sum(sequence.num_computed_tokens for sequence in group)
        return self.costs.swap(num_blocks) < self.costs.recompute(num_tokens)

    def loads(self, num_blocks: int, num_tokens: int) -> bool:
        """The way out is paid already, but the costs are those of both ways."""
        return self.costs.swap(num_blocks) < 2 * self.costs.recompute(num_tokens)


def make_strategy(config: EngineConfig, costs: PreemptionCosts | None) -> PreemptionStrategy:
    """Swap where the host has blocks: by the costs, or always if they are None."""
    if not config.num_host_blocks:
        return Recompute()
    return Swap() if costs is None else Cheaper(costs)


def check_preemption_mode(mode: object, *, has_swap_space: bool) -> None:
    """Raises ConfigError for an unknown mode, and for "swap" with nothing to swap to."""
    if mode not in PREEMPTION_MODES:
        allowed = f"one of {', '.join(map(repr, PREEMPTION_MODES))}"
        raise ConfigError("preemption_mode", mode, allowed)
    if mode == "swap" and not has_swap_space:
        raise ConfigError("preemption_mode", mode, "'auto' or 'recompute' where swap_space is 0")
