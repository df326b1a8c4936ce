"""What sampling has to give, one row at a time in Python's numbers, and how tests ask for it.

It imports no sampling code of the package under test: only the dataclass that asks for draws.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupaged.engine.batch import SamplingBatch


def rows(
    *,
    num: int,
    logits_row: Any = None,
    temperature: Any = 1.0,
    top_k: Any = 0,
    top_p: Any = 1.0,
    seed: Any = 0,
    index: Any = 0,
    position: Any = 0,
    banned: Sequence[tuple[int, int]] = (),
) -> SamplingBatch:
    """`num` samples; a single value is that of all of them, and each has its own row of logits."""

    def column(value: Any, dtype: type[np.generic]) -> NDArray[Any]:
        return np.broadcast_to(np.asarray(value), num).astype(dtype)

    return SamplingBatch(
        logits_row=column(np.arange(num) if logits_row is None else logits_row, np.int32),
        temperature=column(temperature, np.float32),
        top_p=column(top_p, np.float32),
        top_k=column(top_k, np.int32),
        seed=column(np.array(seed, np.uint64), np.uint64),
        sample_index=column(index, np.int32),
        output_position=column(position, np.int32),
        banned=np.array(banned, np.int32).reshape(-1, 2),
    )


def oracle_philox(counter: Sequence[int], key: int) -> list[int]:
    """Philox4x32-10 as its paper defines it."""
    c, (k0, k1) = list(counter), (key & 0xFFFFFFFF, key >> 32)
    for _ in range(10):
        p0, p1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(p1 >> 32) ^ c[1] ^ k0, p1 & 0xFFFFFFFF, (p0 >> 32) ^ c[3] ^ k1, p0 & 0xFFFFFFFF]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c


def kept_tokens(logits: Sequence[float], temperature: float, k: int, p: float) -> list[int]:
    """Likeliest first: the top k, and of these the fewest whose mass reaches p."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[: k or None]
    mass = [math.exp((logits[i] - logits[order[0]]) / temperature) for i in order]
    kept, reached = 1, mass[0]
    while kept < len(order) and reached < p * math.fsum(mass):
        reached = math.fsum(mass[: kept + 1])
        kept += 1
    return [i for i in order[:kept] if logits[i] > -math.inf]


def oracle(logits: Sequence[float], s: SamplingBatch, i: int) -> int:
    """The arg max of logit / temperature + Gumbel noise over the kept tokens."""
    temperature = float(s.temperature[i])
    if temperature == 0:
        return min(range(len(logits)), key=lambda token: (-logits[token], token))

    def score(token: int) -> float:
        counter = [token // 4, int(s.output_position[i]), int(s.sample_index[i]), 0]
        word = oracle_philox(counter, int(s.seed[i]))[token % 4]
        noise = -math.log(-math.log((word + 0.5) / 2**32))
        return (logits[token] - max(logits)) / temperature + noise

    return max(kept_tokens(logits, temperature, int(s.top_k[i]), float(s.top_p[i])), key=score)


def as_list(row: NDArray[Any]) -> list[float]:
    return [float(value) for value in row]
