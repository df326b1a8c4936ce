"""Request-level batches: FasterTransformer behind a queue, as the PagedAttention paper has it.

A batch is taken from the head of the queue. All its prompts are padded to the longest, all its
sequences go on until the longest output is done, and no request joins or leaves meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from bench.traces import TimedRequest
from bench.usage import StepUsage
from cupaged.engine.simulated_runner import StepCost

MAX_PADDED_LENGTH = 2040


def simulate_request_level(
    load: Iterable[TimedRequest], batch_size: int, cost: StepCost, *, until_s: float
) -> list[StepUsage]:
    """Every step that begins before `until_s`."""
    waiting = deque(load)
    steps: list[StepUsage] = []
    now_s = 0.0
    while now_s < until_s and waiting:
        now_s = max(now_s, waiting[0].arrival_s)
        inputs, outputs = _take_batch(waiting, now_s, batch_size)
        num_sequences, padded = len(inputs), int(inputs.max())
        last_lengths = int((inputs + outputs).sum())
        all_slots = num_sequences * (padded + int(outputs.max()))
        start = np.zeros(num_sequences, np.int64)
        end = np.full(num_sequences, padded)
        for step in range(int(outputs.max())):
            token = int((inputs + np.minimum(step, outputs)).sum())
            steps.append(
                StepUsage(
                    now_s, num_sequences, token, last_lengths - token, all_slots - last_lengths
                )
            )
            now_s += cost.seconds(start, end - start)
            start, end = end, end + 1
    return [step for step in steps if step.time_s < until_s]


def _take_batch(
    waiting: deque[TimedRequest], now_s: float, batch_size: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Tokens of the prompts and of the outputs, int64 [batch] each."""
    batch: list[TimedRequest] = []
    while waiting and waiting[0].arrival_s <= now_s and len(batch) < batch_size:
        longest_input = max(r.input_tokens for r in (*batch, waiting[0]))
        longest_output = max(r.output_tokens for r in (*batch, waiting[0]))
        if batch and longest_input + longest_output > MAX_PADDED_LENGTH:
            break
        batch.append(waiting.popleft())
    return (
        np.array([r.input_tokens for r in batch], np.int64),
        np.array([r.output_tokens for r in batch], np.int64),
    )
