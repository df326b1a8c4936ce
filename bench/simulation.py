"""Loads on the real engine core, in simulated time: what its scheduler and block manager do.

Nothing is replaced but the model (`SimulatedRunner`). Prompts have a first token of their own, so
that no request shares a block with another one; samples of a request do.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterable

from bench.traces import TimedRequest
from bench.usage import StepUsage
from cupaged.config import EngineConfig
from cupaged.engine.batch import StepPlan
from cupaged.engine.core import EngineCore
from cupaged.engine.simulated_runner import SimulatedClock, SimulatedRunner, StepCost
from cupaged.request import CoreRequest
from cupaged.sampling_params import SamplingParams

VOCAB_SIZE = 2**31 - 1  # a token for every request


class WatchedRunner(SimulatedRunner):
    """Notes what each step does with the pool. `core` is set when there is one."""

    core: EngineCore

    def __init__(self, cost: StepCost, clock: SimulatedClock) -> None:
        super().__init__(cost, clock)
        self.steps: list[StepUsage] = []

    def submit(self, plan: StepPlan) -> int:
        """Look at the blocks, which the step's tokens have by now.

        A sequence that will be n samples after this step counts as n in logical blocks.
        """
        manager = self.core.block_manager
        end = plan.start + plan.num_new
        token = int(end.sum())
        siblings = (plan.num_samples - 1).clip(0)
        logical = int(manager.ref_counts.sum() + (siblings * -(-end // manager.block_size)).sum())
        physical = manager.num_used_blocks
        unfilled = logical * manager.block_size - token
        self.steps.append(StepUsage(self._clock(), len(end), token, 0, unfilled, logical, physical))
        return super().submit(plan)


def simulate(
    load: Iterable[TimedRequest],
    config: EngineConfig,
    cost: StepCost,
    *,
    until_s: float,
    num_samples: int = 1,
) -> list[StepUsage]:
    """Every step that begins before `until_s`.

    Each request draws `num_samples` samples. Slots are those of one sample each: `token` and
    `unused` mean something where nothing is shared.
    """
    clock = SimulatedClock()
    runner = WatchedRunner(cost, clock)
    runner.core = core = EngineCore(config, runner, clock=clock)
    coming = deque(enumerate(load))
    gc.freeze()  # what is here stays: the collector need not look at it again and again
    while clock() < until_s and (coming or core.has_unfinished_requests):
        if not core.has_unfinished_requests:
            clock.advance_to(coming[0][1].arrival_s)
        while coming and coming[0][1].arrival_s <= clock():
            i, request = coming.popleft()
            params = SamplingParams(
                n=num_samples, max_tokens=request.output_tokens, ignore_eos=True, detokenize=False
            )
            core.add_request(CoreRequest(str(i), (i + 1,) * request.input_tokens, params))
        core.step()
    gc.unfreeze()
    return runner.steps
