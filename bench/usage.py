"""What a simulated engine does with its KV pool, step by step, and means over a window of time."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class StepUsage(NamedTuple):
    """One step, counted in slots of one token each.

    time_s: when it began. num_sequences: how many it computed.
    token: slots that hold a token after it. reserved: free for tokens that are still to come.
    unused: set aside for a sequence that will never fill them (internal fragmentation).
    logical_blocks: blocks of all sequences, shared ones counted for each. physical_blocks: in use.
    """

    time_s: float
    num_sequences: int
    token: int
    reserved: int
    unused: int
    logical_blocks: int = 0
    physical_blocks: int = 0


class MeanUsage(NamedTuple):
    """Means over steps; memory in percent of the pool.

    other is what no sequence has: it is free, or lost to rounding (external fragmentation).
    sharing_saving is the percentage of blocks that sharing saves.
    """

    token: float
    reserved: float
    unused: float
    other: float
    num_sequences: float
    max_sequences: int
    sharing_saving: float


def mean_usage(steps: list[StepUsage], num_slots: int, begin_s: float, end_s: float) -> MeanUsage:
    """Over the steps that began in [begin_s, end_s]."""
    chosen = np.array([step for step in steps if begin_s <= step.time_s <= end_s], float)
    means = chosen.mean(axis=0).tolist()
    token, reserved, unused = (100 * slots / num_slots for slots in means[2:5])
    logical, physical = chosen[:, 5], chosen[:, 6]
    saving = 100 * (1 - 1 / float((logical / physical).mean())) if physical.all() else 0.0
    return MeanUsage(
        token=token,
        reserved=reserved,
        unused=unused,
        other=100 - token - reserved - unused,
        num_sequences=means[1],
        max_sequences=int(chosen[:, 1].max()),
        sharing_saving=saving,
    )
