"""A runner that computes nothing and lets simulated time pass: what a device would take for a step.

The scheduler and the block manager are the real ones; only the model is replaced, by a sum of a few
terms. It answers in seconds what a pool, a limit or a policy does to hours of load. It does not say
what is drawn: every token is the same one, so requests end by `max_tokens`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cupaged.engine.batch import StepPlan
from cupaged.engine.runner import StepOutput


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step as a sum of terms, each for what a device has to do.

    A sequence with one new token decodes, one with several prefills.

    Args:
        step_s: every step: the weights are read, kernels are launched.
        sequence_s: each sequence: what the host does for it.
        context_token_s: each token in the context of a decoding sequence: its KV is read.
        prefill_token_s: each new token of a prefilling sequence: products with the weights.
        prefill_pair_s: times the growth of the square of its length: attention inside it.
        swapped_block_s: each block that is copied to the host or back.
    """

    step_s: float
    sequence_s: float = 0.0
    context_token_s: float = 0.0
    prefill_token_s: float = 0.0
    prefill_pair_s: float = 0.0
    swapped_block_s: float = 0.0

    def seconds(
        self, start: NDArray[np.int64], num_new: NDArray[np.int64], num_swapped_blocks: int = 0
    ) -> float:
        """Time of a step in which sequences compute tokens [start, start + num_new); both [n]."""
        end = start + num_new
        prefills = num_new > 1
        return float(
            self.step_s
            + self.sequence_s * len(start)
            + self.context_token_s * end[~prefills].sum()
            + self.prefill_token_s * num_new[prefills].sum()
            + self.prefill_pair_s * (end[prefills] ** 2 - start[prefills] ** 2).sum()
            + self.swapped_block_s * num_swapped_blocks
        )


class SimulatedClock:
    """A clock that moves when it is told to: `EngineCore` takes it as its own. Seconds."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        """The time now."""
        return self.now_s

    def advance_to(self, time_s: float) -> None:
        """It is `time_s` now, or later already."""
        self.now_s = max(self.now_s, time_s)


class SimulatedRunner:
    """Steps take what `cost` says, one after another; every sample draws `token_id`.

    `collect` moves the clock to the end of the step, as a host that waits for its device.
    """

    def __init__(self, cost: StepCost, clock: SimulatedClock, *, token_id: int = 0) -> None:
        self._cost = cost
        self._clock = clock
        self._token_id = token_id
        self._busy_until_s = 0.0
        self._in_flight: dict[int, tuple[float, int]] = {}  # end, number of samples

    def submit(self, plan: StepPlan) -> int:
        """The step begins when those before it have ended."""
        start, num_new = plan.start.astype(np.int64), plan.num_new.astype(np.int64)
        begin_s = max(self._clock.now_s, self._busy_until_s)
        num_swapped = len(plan.swap_out) + len(plan.swap_in)
        self._busy_until_s = begin_s + self._cost.seconds(start, num_new, num_swapped)
        self._in_flight[plan.step_id] = (self._busy_until_s, int(plan.num_samples.sum()))
        return plan.step_id

    def collect(self, handle: int) -> StepOutput:
        """Wait for the step."""
        end_s, num_samples = self._in_flight.pop(handle)
        self._clock.advance_to(end_s)
        return StepOutput(handle, [[self._token_id]] * num_samples)
