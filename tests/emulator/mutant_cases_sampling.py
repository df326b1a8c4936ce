"""Reference cases for draws, edits and log probabilities, to tell mutants from the original.

Kept tokens are those of a sort of the row, tokens those of the NumPy device or of a hand
calculation, log probabilities those of float64. Searches sort 64 tokens at a time here, not 4096,
so that short rows take every path.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupaged.emulator.module import EmulatedModule
from cupaged.ops.cuda_draws import likely_distance
from cupaged.ops.numpy_ops import NumpyOps
from tests.emulator.mutant_cases import F32, I32, MANY_STEPS, Variant
from tests.ops.reference_sampling import kept_by_sorting, tokens_up_to
from tests.ops.sampling_oracle import oracle_philox, rows

Array = NDArray[Any]
later = functools.partial(Variant, max_steps=MANY_STEPS, global_races=True)
INF = math.inf
MASSLESS = np.array(0x41E35A2F, np.uint32).view(F32)  # the nearest distance whose mass is 0
Limits = tuple[float, int, float, float]  # temperature, top_k, top_p, min_p


@functools.cache
def _rows(size: int) -> list[Array]:
    """Spread out, with many equal, all equal, few allowed, far below the highest."""
    rng = np.random.default_rng(size)
    normal = rng.standard_normal(size).astype(F32)
    few, far = np.full(size, -np.inf, F32), (-28.4 + normal / 100).astype(F32)
    few[rng.integers(0, size, 5)] = [0, 1, 1, 0, 2]
    far[size // 2] = 0
    far[1] = -MASSLESS
    near = (1 + 1e-6 * normal).astype(F32)
    return [3 * normal - 2, np.rint(2 * normal), np.full(size, -7.5, F32), few, far, near]


LIMITS: list[Limits] = [
    (1.0, 1, 1.0, 0.0), (1.0, 0, 1e-9, 0.0), (1.0, 0, 0.9, 0.0), (1.0, 0, 1.0, 0.1),
    (0.7, 40, 0.9, 0.0), (2.0, 100, 0.8, 1e-3), (1.0, 0, 0.999, 0.0), (1e-5, 3, 0.5, 0.0),
    (1.3, 90, 1.0, 0.0), (0.0, 5, 0.5, 0.0), (1.0, 0, 1.0, 0.0), (4.0, 0, 1.0, 0.0),
    (1.0, 299, 0.99, 0.0), (1.0, 299, 1.0, 0.0),
]  # fmt: skip


def _sample(
    module: EmulatedModule, logits: Array, which: Array, columns: list[Array], threads: int
) -> tuple[Array, Array]:
    """Tokens and the ends of what is kept; `columns` from temperature on."""
    out, end = np.full(len(which), -9, I32), np.full(len(which), 9, np.uint64)
    args = [out, end, logits, which.astype(I32), *columns, I32(logits.shape[1])]
    module.get_function("sample")((len(which),), (threads,), args)
    return out, end


@functools.cache
def _draws(size: int) -> tuple[Array, Array, list[Array], Array, list[list[int]]]:
    """Logits, their rows, columns; and expected: tokens, kept tokens. -1: not greedy."""
    logits = np.stack(_rows(size))
    n = len(logits) * len(LIMITS)
    which = np.repeat(np.arange(len(logits), dtype=I32), len(LIMITS))
    limits = [np.tile(np.array(column), len(logits)) for column in zip(*LIMITS, strict=True)]
    temperature, top_k, top_p, min_p = limits
    seed = np.random.default_rng(3).integers(0, 2**64, n, np.uint64)
    index, position = np.arange(n, dtype=I32) % 7, np.arange(n, dtype=I32) * 1000
    s = rows(
        num=n, logits_row=which, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
        seed=seed, index=index, position=position,
    )  # fmt: skip
    forced: Array = np.where(np.arange(n) % 17 == 5, 3, -1).astype(I32)
    columns: list[Array] = [
        s.temperature, s.top_p, likely_distance(s.min_p), s.top_k, s.seed, s.sample_index,
        s.output_position, forced,
    ]  # fmt: skip
    tokens = np.where(forced >= 0, forced, NumpyOps().sample(logits.copy(), s))
    kept = [
        kept_by_sorting(logits[row], *LIMITS[i % len(LIMITS)]) if temperature[i] > 0 else []
        for i, row in enumerate(which)
    ]
    return logits, which, columns, tokens, kept


def check_draws(module: EmulatedModule) -> None:
    """Every kind of limit over every kind of row; some tokens are forced."""
    for size, threads in ((37, 32), (300, 96), (301, 64)):
        logits, which, columns, tokens, kept = _draws(size)
        got, ends = _sample(module, logits, which, columns, threads)
        np.testing.assert_array_equal(got, tokens)
        for row, end, temperature, expected in zip(which, ends, columns[0], kept, strict=True):
            if temperature > 0:
                assert tokens_up_to(int(end), logits[row], float(temperature)) == expected


def check_large_mass(module: EmulatedModule) -> None:
    """So many equal tokens that their mass is too long for a double."""
    logits = np.full((1, 9001), -7.5, F32)
    limits: list[Limits] = [(1.0, 0, 0.9, 0.0), (1.0, 8999, 1.0, 0.0), (1.0, 0, 0.9999999, 0.0)]
    n = len(limits)
    temperature, top_k, top_p, min_p = zip(*limits, strict=True)
    s = rows(num=n, logits_row=0, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    columns: list[NDArray[Any]] = [
        s.temperature, s.top_p, likely_distance(s.min_p), s.top_k, s.seed, s.sample_index,
        s.output_position, np.full(n, -1, I32),
    ]  # fmt: skip
    _, ends = _sample(module, logits, np.zeros(n), columns, 384)
    for end, limit in zip(ends, limits, strict=True):
        assert tokens_up_to(int(end), logits[0], 1.0) == kept_by_sorting(logits[0], *limit)


def check_hard_draws(module: EmulatedModule) -> None:
    """Rows that hold no number, equal highest logits, scores that float cannot tell apart."""
    size, num, ids = 300, 60, (3, 240)
    bad = np.zeros((7, size), F32)
    bad[0, 77], bad[1, 200], bad[2], bad[3, 299] = np.nan, np.inf, -np.inf, np.nan
    bad[4, [20, 150, 270]], bad[5, [299, 160]], bad[6] = 9, 9, np.arange(size)
    close = np.full((num, size), -np.inf, F32)
    for seed in range(num):
        words = (oracle_philox([token // 4, 0, 0, 0], seed)[token % 4] for token in ids)
        first, second = (-math.log(-math.log((word + 0.5) / 2**32)) for word in words)
        close[seed, ids] = max(0, second - first), max(0, first - second)
    logits = np.concatenate([bad, close])
    n = len(logits)
    for top_k in (0, 2):
        s = rows(num=n, seed=np.maximum(0, np.arange(n) - len(bad)), top_k=top_k,
                 temperature=np.where(np.arange(n) < len(bad), 0.0, 1.0))  # fmt: skip
        columns: list[Array] = [s.temperature, s.top_p, likely_distance(s.min_p), s.top_k, s.seed,
                   s.sample_index, s.output_position, np.full(n, -1, I32)]  # fmt: skip
        got, _ = _sample(module, logits, np.arange(n), columns, 96)
        expected = NumpyOps().sample(logits.copy(), s)
        assert expected[:7].tolist() == [-1, -1, -1, -1, 20, 160, 299]
        np.testing.assert_array_equal(got, expected)


def check_logprobs(module: EmulatedModule) -> None:
    """None, some, and more likeliest tokens than are sorted at a time; rows that hold NaN."""
    for size, count, threads in (
        (37, 5, 32), (300, 0, 96), (300, 150, 96), (301, 301, 64), (300, 150, 32),
    ):  # fmt: skip
        logits = np.stack(_rows(size))
        logits[3] = np.where(np.isinf(logits[3]), F32(-1e30), logits[3])
        n = len(logits)
        given, which = np.array([size + 5, 3, -2, size - 1], I32), np.arange(n, dtype=I32) % 4
        shape = (n + 1, 1 + count)
        with_nan = np.concatenate([logits, logits[:1]])
        with_nan[n, 9] = np.nan
        which = np.append(which, I32(1))
        ids, ranks = np.full(shape, -9, I32), np.full(shape, -9, I32)
        values = np.full(shape, 7, F32)
        args = [ids, values, ranks, with_nan, given, which, I32(count), I32(size)]
        module.get_function("logprobs")((n + 1,), (threads,), args)

        own = given.clip(0, size - 1)[which][:, None]
        best = np.argsort(-logits, 1, "stable")[:, :count]
        best = np.concatenate([best, np.arange(count)[None]])
        np.testing.assert_array_equal(ids, np.concatenate([own, best], 1))
        expected_rank = (logits >= np.take_along_axis(logits, own[:n], 1)).sum(1)
        np.testing.assert_array_equal(ranks[:, 0], np.append(expected_rank, size))
        np.testing.assert_array_equal(ranks[:, 1:], np.tile(np.arange(1, count + 1), (n + 1, 1)))
        wide = logits.astype(np.float64)
        top = wide.max(1, keepdims=True)
        norm = top + np.log(np.exp(wide - top).sum(1, keepdims=True))
        exact = np.take_along_axis(wide, ids[:n], 1) - norm
        np.testing.assert_allclose(values[:n], exact, rtol=3e-7, atol=1e-6)
        assert np.isnan(values[n]).all()


def check_infinite_logprobs(module: EmulatedModule) -> None:
    """A given token that is not allowed; rows whose highest logit is no finite number."""
    size, count = 37, 2
    logits = np.random.default_rng(8).standard_normal((3, size)).astype(F32)
    logits[0, 7], logits[1, 9], logits[2] = -INF, INF, -INF
    given, which = np.array([7], I32), np.zeros(3, I32)
    ids, ranks = (np.full((3, 1 + count), -9, I32) for _ in range(2))
    values = np.full((3, 1 + count), 7, F32)
    args = [ids, values, ranks, logits, given, which, I32(count), I32(size)]
    module.get_function("logprobs")((3,), (32,), args)
    best = np.argsort(-logits[0])[:count]
    np.testing.assert_array_equal(ids, [[7, *best], [7, 0, 1], [7, 0, 1]])
    np.testing.assert_array_equal(ranks, [[size, 1, 2]] * 3)
    wide = logits[0].astype(np.float64)
    expected = wide[[7, *best]] - np.log(np.exp(wide).sum())
    np.testing.assert_allclose(values[0], expected, rtol=3e-7, atol=1e-6)
    assert np.isnan(values[1:]).all()


def check_edits(module: EmulatedModule) -> None:
    """Each edit, by two blocks and some threads that have nothing to do."""
    for size in (3, 9, 132, 135):
        rng = np.random.default_rng(size)
        given = rng.standard_normal((5, size)).astype(F32)
        places = rng.permutation(5 * size)[:40]
        count = len(places)
        pairs = np.stack([places // size, places % size], 1).astype(I32)
        values = rng.uniform(0.5, 2, count).astype(F32)
        row, token = pairs.T
        old = given[row, token]
        edits = {
            "add_bias": old + values,
            "penalize": np.where(old > 0, old / values, old * values),
            "subtract": old - values,
            "restore_allowed": values,
            "ban": np.full(count, -INF, F32),
        }
        numbers = [I32(count), I32(size)]
        for name, new in edits.items():
            logits, expected = given.copy(), given.copy()
            expected[row, token] = new
            arrays = [logits, pairs] if name == "ban" else [logits, pairs, values]
            module.get_function(name)((3,), (32,), [*arrays, *numbers])
            np.testing.assert_array_equal(logits, expected)
        saved = np.full(count, np.nan, F32)
        module.get_function("save_allowed")((3,), (32,), [saved, given.copy(), pairs, *numbers])
        np.testing.assert_array_equal(saved, old)
        logits, expected = given.copy(), given.copy()
        expected[[4, 1]] = -INF
        module.get_function("forbid_rows")((2, 2), (8,), [logits, np.array([4, 1], I32), I32(size)])
        np.testing.assert_array_equal(logits, expected)


def check_numbers(module: EmulatedModule) -> None:
    """Words against Philox in Python's integers, noise against float64, mass against longdouble."""
    rng = np.random.default_rng(3)
    n = 24
    seed = rng.integers(0, 2**64, n, np.uint64)
    position, index = rng.integers(0, 2**32, (2, n)).astype(np.uint32)
    token = rng.integers(0, 2**31, n).astype(I32)
    token[:5] = range(5)
    words = np.zeros(n, np.uint32)
    args = [words, seed, position, index, token, I32(n)]
    module.get_function("words")((1,), (32,), args)
    for i in range(n):
        counter = [int(token[i]) // 4, int(position[i]), int(index[i]), 0]
        assert words[i] == oracle_philox(counter, int(seed[i]))[token[i] % 4]

    special = [0, 1, 2, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 2, 2**32 - 1]
    words = np.append(rng.integers(0, 2**32, 300), special).astype(np.uint32)
    single, twice = np.full(len(words), np.nan, F32), np.full(len(words), np.nan)
    module.get_function("noises")((1,), (32,), [single, twice, words, I32(len(words))])
    exact = [-math.log(-math.log((int(word) + 0.5) / 2**32)) for word in words]
    np.testing.assert_allclose(twice, exact, rtol=1e-13, atol=1e-13)
    np.testing.assert_allclose(single, exact, rtol=0, atol=2.0**-18)

    edge = np.array([0x41E35A2E], np.uint32).view(F32)
    some = [0, 1e-45, 2.0**-36, 2.0**-35, math.log(2) / 64, math.log(2), 1.0, 28.0]
    distance = np.concatenate([rng.uniform(0, 28.4, 700), some, edge]).astype(F32)
    mass = np.zeros(len(distance), np.uint64)
    module.get_function("masses")((1,), (32,), [mass, distance, I32(len(distance))])
    close = np.abs(mass.astype(np.longdouble) - np.exp(-distance.astype(np.longdouble)) * 2**40)
    assert close.max() < 0.5 + 2**-3  # nearly always the rounded one


SMALL = {"sampling_search.cuh": ("CAPACITY = 4096", "CAPACITY = 64")}
NUMBERS = later("random_numbers.cu", check_numbers, {})


def check_all_draws(module: EmulatedModule) -> None:
    """All of them with one compilation."""
    check_hard_draws(module)
    check_draws(module)
    check_large_mass(module)


def check_all_logprobs(module: EmulatedModule) -> None:
    """All of them with one compilation."""
    check_logprobs(module)
    check_infinite_logprobs(module)


LOGPROBS = later("logits_logprobs.cu", check_all_logprobs, {}, SMALL)
ALL_DRAWS = later("sampling.cu", check_all_draws, {"REPORT_KEPT": 1}, SMALL)

SAMPLING: dict[str, list[Variant]] = {
    "logits_edits.cu": [later("logits_edits.cu", check_edits, {})],
    "logits_logprobs.cu": [LOGPROBS],
    "philox.cuh": [NUMBERS, ALL_DRAWS],
    "sampling.cu": [ALL_DRAWS],
    "sampling_mass.cuh": [NUMBERS, ALL_DRAWS],
    "sampling_row.cuh": [ALL_DRAWS, LOGPROBS],
    "sampling_search.cuh": [ALL_DRAWS, LOGPROBS],
}
