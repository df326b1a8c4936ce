"""Attention in float64, one row after another: no pages, no tiles, no batch.

Written to be obviously right. It imports nothing from the package under test.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

F64 = NDArray[np.float64]


def attention(
    queries: ArrayLike,
    keys: ArrayLike,
    values: ArrayLike,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: ArrayLike | None = None,
) -> tuple[F64, F64]:
    """The last tokens of one sequence over all of it.

    queries: [n, Hq, D], at the last n positions; keys, values: [length, Hkv, D]; sinks: [Hq].

    Returns:
        [n, Hq, D], and the same with the absolute values of `values`, for bounds of errors.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (queries, keys, values))
    n, num_heads, _ = q.shape
    length, num_kv_heads, _ = k.shape
    out, bound = np.zeros(q.shape), np.zeros(q.shape)
    for t in range(n):
        position = length - n + t
        first = max(0, position - window + 1) if window else 0
        for h in range(num_heads):
            g = h // (num_heads // num_kv_heads)
            scores = [scale * float(q[t, h] @ k[j, g]) for j in range(first, position + 1)]
            if softcap:
                scores = [softcap * math.tanh(s / softcap) for s in scores]
            sink = None if sinks is None else float(np.asarray(sinks, np.float64)[h])
            largest = max(scores if sink is None else [*scores, sink])
            weights = np.exp(np.array(scores) - largest)
            total = weights.sum() + (0.0 if sink is None else math.exp(sink - largest))
            out[t, h] = weights / total @ v[first : position + 1, g]
            bound[t, h] = weights / total @ np.abs(v[first : position + 1, g])
    return out, bound
