"""What sampling has to give, one row at a time in Python's numbers, and how tests ask for it.

It imports no sampling code of the package under test: only the dataclasses that ask for draws.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupaged.engine.sampling_batch import LogitsEdits, SamplingBatch

Pairs = Sequence[tuple[int, int]]
Changes = Mapping[tuple[int, int], float]  # (row, token id) -> value


def rows(
    *,
    num: int,
    logits_row: Any = None,
    temperature: Any = 1.0,
    top_k: Any = 0,
    top_p: Any = 1.0,
    min_p: Any = 0.0,
    seed: Any = 0,
    index: Any = 0,
    position: Any = 0,
    banned: Pairs = (),
    edits: LogitsEdits | None = None,
) -> SamplingBatch:
    """`num` samples; a single value is that of all of them, and each has its own row of logits."""

    def column(value: Any, dtype: type[np.generic]) -> NDArray[Any]:
        return np.broadcast_to(np.asarray(value), num).astype(dtype)

    if banned:
        edits = edits_of(banned=banned)

    return SamplingBatch(
        logits_row=column(np.arange(num) if logits_row is None else logits_row, np.int32),
        temperature=column(temperature, np.float32),
        top_p=column(top_p, np.float32),
        min_p=column(min_p, np.float32),
        top_k=column(top_k, np.int32),
        seed=column(np.array(seed, np.uint64), np.uint64),
        sample_index=column(index, np.int32),
        output_position=column(position, np.int32),
        forced=column(-1, np.int32),
        num_logprobs=column(-1, np.int32),
        edits=edits,
    )


def edits_of(
    *,
    bias: Changes = MappingProxyType({}),
    repetition: Changes = MappingProxyType({}),
    subtracted: Changes = MappingProxyType({}),
    allowed: Pairs = (),
    banned: Pairs = (),
) -> LogitsEdits:
    """Edits from pairs; the rows that an allowed pair stands in are limited to those."""

    def pairs(of: Iterable[tuple[int, int]]) -> NDArray[np.int32]:
        return np.array([*of], np.int32).reshape(-1, 2)

    def values(of: Changes) -> NDArray[np.float32]:
        return np.array([*of.values()], np.float32)

    return LogitsEdits(
        bias=pairs(bias),
        bias_values=values(bias),
        repetition=pairs(repetition),
        repetition_values=values(repetition),
        subtracted=pairs(subtracted),
        subtracted_values=values(subtracted),
        allowed_rows=np.unique(pairs(allowed)[:, 0]),
        allowed=pairs(allowed),
        banned=pairs(banned),
    )


def edited(logits: Sequence[Sequence[float]], edits: LogitsEdits | None) -> list[list[float]]:
    """The logits after the edits, one pair at a time, as `LogitsEdits` tells."""
    result = [[*row] for row in logits]
    if edits is None:
        return result
    for (row, token), value in zip(edits.bias.tolist(), edits.bias_values, strict=True):
        result[row][token] += float(value)
    for (row, token), value in zip(edits.repetition.tolist(), edits.repetition_values, strict=True):
        logit = result[row][token]
        result[row][token] = logit / float(value) if logit > 0 else logit * float(value)
    for (row, token), value in zip(edits.subtracted.tolist(), edits.subtracted_values, strict=True):
        result[row][token] -= float(value)
    kept = {(row, token) for row, token in edits.allowed.tolist()}
    for row in edits.allowed_rows.tolist():
        for token in range(len(result[row])):
            if (row, token) not in kept:
                result[row][token] = -math.inf
    for row, token in edits.banned.tolist():
        result[row][token] = -math.inf
    return result


def oracle_philox(counter: Sequence[int], key: int) -> list[int]:
    """Philox4x32-10 as its paper defines it."""
    c, (k0, k1) = list(counter), (key & 0xFFFFFFFF, key >> 32)
    for _ in range(10):
        p0, p1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(p1 >> 32) ^ c[1] ^ k0, p1 & 0xFFFFFFFF, (p0 >> 32) ^ c[3] ^ k1, p0 & 0xFFFFFFFF]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c


def kept_tokens(
    logits: Sequence[float], temperature: float, k: int, p: float, min_p: float = 0.0
) -> list[int]:
    """Likeliest first: those of at least min_p times the most, of these the top k, and of these
    the fewest whose mass reaches p.
    """
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    mass = [math.exp((logits[i] - logits[order[0]]) / temperature) for i in order]
    mass = [m for m in mass if m >= min_p][: k or None]
    order = order[: len(mass)]
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

    limits = int(s.top_k[i]), float(s.top_p[i]), float(s.min_p[i])
    return max(kept_tokens(logits, temperature, *limits), key=score)


def as_list(row: NDArray[Any]) -> list[float]:
    return [float(value) for value in row]
