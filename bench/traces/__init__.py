"""Recorded lengths of requests, and loads made of them.

`make.py` made the files, SOURCES.md says of what.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

HERE = Path(__file__).parent
PREFIX_BLOCK_TOKENS = 512  # what an id in `prefix_blocks` stands for
MAX_MODEL_LEN = 2048  # of OPT
_QUANTUM_S = 0.01  # arrivals are drawn for each


class TimedRequest(NamedTuple):
    """A request of a load: when it comes, and its tokens."""

    arrival_s: float
    input_tokens: int
    output_tokens: int


class BlockedRequest(NamedTuple):
    """A request whose prompt is named by blocks of 512 tokens, the last one perhaps partly filled.

    Equal ids have equal tokens and equal ids before them.
    """

    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...]


def lengths(name: str) -> NDArray[np.uint16]:
    """[n, 2]: tokens of prompt and answer of `sharegpt` or `alpaca`, in the order of the file."""
    with np.load(HERE / f"{name}.npz") as file:
        array: NDArray[np.uint16] = file["lengths"]
    return array


def prefix_blocks(name: str = "mooncake") -> list[BlockedRequest]:
    """All requests of a trace with block ids, in order of arrival."""
    with np.load(HERE / f"{name}.npz") as file:
        pairs, ids = file["lengths"], np.cumsum(file["id_steps"])
    ends = np.cumsum(-(-pairs[:, 0] // PREFIX_BLOCK_TOKENS))
    return [
        BlockedRequest(num_input, num_output, tuple(part.tolist()))
        for (num_input, num_output), part in zip(
            pairs.tolist(), np.split(ids, ends[:-1]), strict=True
        )
    ]


def poisson_load(
    pairs: NDArray[np.uint16], *, rate: float, duration_s: float, seed: int = 0
) -> list[TimedRequest]:
    """The load of the PagedAttention paper's experiments, number for number (SOSP 2023, section 6).

    Arrivals are a Poisson process of `rate` requests a second in quanta of 10 ms. Pairs that fit
    the context are taken from the head of the file, from its start again if there are too few,
    and shuffled.
    """
    counts = np.random.RandomState(seed).poisson(rate * _QUANTUM_S, int(duration_s / _QUANTUM_S))
    fitting = [pair for pair in pairs.tolist() if sum(pair) < MAX_MODEL_LEN]
    total = int(counts.sum())
    chosen = (fitting * -(-total // len(fitting)))[:total]
    Random(seed).shuffle(chosen)
    arrivals = np.repeat(np.arange(len(counts)) * _QUANTUM_S, counts).tolist()
    return [TimedRequest(t, *pair) for t, pair in zip(arrivals, chosen, strict=True)]
