"""Sampling against a naive oracle, exact distributions and the published Philox vectors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cupaged.engine.sampling_batch import SamplingBatch
from cupaged.engine.sequence_table import MAX_COUNT, MAX_TEMPERATURE
from cupaged.ops.numpy_ops import NumpyOps
from cupaged.ops.philox import gumbel, philox
from tests.ops.sampling_oracle import as_list, kept_tokens, oracle, oracle_philox, rows

NAN, INF = math.nan, math.inf


def sample(logits: Any, sampling: SamplingBatch) -> list[int]:
    tokens = NumpyOps().sample(np.array(logits, np.float32), sampling)
    assert tokens.dtype == np.int32 and tokens.shape == sampling.logits_row.shape
    return [int(token) for token in tokens]


def take(s: SamplingBatch, which: Any) -> SamplingBatch:
    """Some of the samples, in that order, over the same rows of logits."""
    names = {field.name for field in fields(s)} - {"edits"}
    return SamplingBatch(edits=s.edits, **{name: getattr(s, name)[which] for name in names})


# ---- random numbers ------------------------------------------------------------------------------

# From the known-answer file of Random123, the library of Philox's authors.
KNOWN_ANSWERS = [
    ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_known_answers(counter: list[int], key: list[int], expected: list[int]) -> None:
    words = philox(
        tuple(np.array([word], np.uint64) for word in counter),
        np.array([key[0] | key[1] << 32], np.uint64),
    )
    assert [int(word[0]) for word in words] == expected
    assert oracle_philox(counter, key[0] | key[1] << 32) == expected


def test_gumbel_noise_is_finite_at_both_ends() -> None:
    noise = gumbel(np.array([0, 2**31, 2**32 - 1], np.uint64))
    expected = [-math.log(33 * math.log(2)), -math.log(math.log(2)), 33 * math.log(2)]
    np.testing.assert_allclose(noise, expected, rtol=1e-6)


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 4, 5, 7, 37, 131])
def test_draws_equal_the_oracle(vocab_size: int) -> None:
    """Every kind of row at once, with ties, against one row at a time in Python."""
    rng = np.random.default_rng(vocab_size)
    num = 60
    logits = (3 * rng.standard_normal((num, vocab_size))).astype(np.float32)
    logits[::3] = np.rint(logits[::3])  # many equal logits
    sampling = rows(
        num=num,
        temperature=rng.choice([0.0, 1e-5, 0.3, 1.0, 4.0, MAX_TEMPERATURE], num),
        top_k=rng.choice([0, 1, 2, 5, vocab_size, MAX_COUNT], num),
        top_p=rng.choice([0.0, 1e-9, 0.3, 0.9, 0.999, 1.0], num),
        min_p=rng.choice([0.0, 0.0, 0.0, 1e-9, 0.1, 1.0], num),
        seed=rng.integers(0, 2**64, num, np.uint64),
        index=rng.integers(0, 1024, num),
        position=rng.integers(0, 2**31, num),
    )
    expected = [oracle(as_list(logits[i]), sampling, i) for i in range(num)]
    assert sample(logits, sampling) == expected


# ---- greedy --------------------------------------------------------------------------------------


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    logits = [[0, 5, 5, 5], [7, 7, 7, 7], [-1, -2, -3, -1], [0, 0, -0.0, 1e-30]]
    sampling = rows(num=4, temperature=0.0, top_k=[0, 2, 0, 1], top_p=[1.0, 0.5, 0.0, 1.0])
    assert sample(logits, sampling) == [1, 0, 0, 3]


# ---- what is kept --------------------------------------------------------------------------------


def drawn(logits: Sequence[float], *, top_k: int = 0, top_p: float = 1.0) -> set[int]:
    """Every token that comes in 4000 draws of one row."""
    index = np.arange(4000)
    sampling = rows(num=4000, logits_row=0, top_k=top_k, top_p=top_p, index=index)
    return set(sample([logits], sampling))


FLAT = [1.0] * 4 + [-INF] * 4  # four tokens of mass 1/4


@pytest.mark.parametrize(
    ("top_k", "top_p", "expected"),
    [
        (0, 1.0, {0, 1, 2, 3}),
        (8, 1.0, {0, 1, 2, 3}),
        (6, 1.0, {0, 1, 2, 3}),
        (9_999_999, 1.0, {0, 1, 2, 3}),
        (3, 1.0, {0, 1, 2}),
        (1, 1.0, {0}),
        (0, 0.75, {0, 1, 2}),  # reached exactly: no token more
        (0, float(np.nextafter(np.float32(0.75), np.float32(1))), {0, 1, 2, 3}),
        (0, float(np.nextafter(np.float32(0.75), np.float32(0))), {0, 1, 2}),
        (0, 0.5, {0, 1}),
        (0, 0.25, {0}),
        (0, 1e-9, {0}),
        (0, 0.0, {0}),
        (2, 0.5, {0}),  # half of what top_k left
        (2, 0.51, {0, 1}),
        (3, 0.0, {0}),
    ],
)
def test_kept_tokens_by_hand(top_k: int, top_p: float, expected: set[int]) -> None:
    assert drawn(FLAT, top_k=top_k, top_p=top_p) == expected
    assert drawn(FLAT[::-1], top_k=top_k, top_p=top_p) == {4 + i for i in expected}


@pytest.mark.parametrize("seed", range(8))
def test_kept_tokens_equal_the_oracle(seed: int) -> None:
    """Spread so little that a kept token which is never drawn is out of the question."""
    rng = np.random.default_rng(seed)
    logits = as_list(np.rint(2 * rng.standard_normal(12)) / 2)
    for top_k, top_p in [(0, 0.5), (0, 0.9), (5, 1.0), (7, 0.8), (11, 0.95), (1, 0.3), (40, 0.7)]:
        expected = set(kept_tokens(logits, 1.0, top_k, float(np.float32(top_p))))
        assert drawn(logits, top_k=top_k, top_p=top_p) == expected


def test_a_large_vocabulary_with_a_long_tail() -> None:
    """The tail is left out of the sorting, but not of the mass."""
    logits = np.full(50_000, -8.0, np.float32)
    logits[49_990:] = 0.0  # ten tokens of 37 % together
    mass = 10 + 49_990 * math.exp(-8.0)
    assert 0.37 < 10 / mass < 0.38
    for top_p, num_kept in [(0.3, 9), (0.37, 10)]:
        tokens = sample([logits], rows(num=80, logits_row=0, top_p=top_p, index=range(80)))
        assert set(tokens) == set(range(49_990, 49_990 + num_kept))
    tokens = sample([logits], rows(num=10, logits_row=0, top_p=0.9, index=range(10)))
    assert any(token < 49_990 for token in tokens)


# ---- banned tokens and logits that are no numbers ------------------------------------------------


def test_banned_tokens_are_never_drawn() -> None:
    logits = np.zeros((3, 5), np.float32)
    logits[0, 2] = 9.0
    pairs = [(0, 2), (1, 0), (1, 1), (1, 2), (1, 4), (2, 4)]
    sampling = rows(num=3, temperature=[0.0, 1.0, 0.0], banned=pairs)
    assert sample(logits, sampling) == [0, 3, 0]
    sampling = rows(num=900, logits_row=np.repeat([0, 1, 2], 300), index=range(900), banned=pairs)
    tokens = sample(logits, sampling)
    assert set(tokens[:300]) == {0, 1, 3, 4}
    assert set(tokens[300:600]) == {3}
    assert set(tokens[600:]) == {0, 1, 2, 3}
    for top_k, top_p in [(3, 1.0), (0, 0.5), (4, 0.9)]:
        sampling = rows(num=1, logits_row=1, top_k=top_k, top_p=top_p, banned=pairs)
        assert sample(logits, sampling) == [3]


def test_rows_without_a_number_fail_alone() -> None:
    nan_somewhere = [0.0, NAN, 2.0, 1.0]
    bad = [nan_somewhere, [NAN] * 4, [-INF] * 4, [0, INF, 0, 0], [INF, -INF, NAN, 0]]
    good = [[0, 3, 1, 2], [-INF, -INF, 1, -INF], [4, 4, 4, 4]]
    for temperature, top_k, top_p in [(0.0, 0, 1.0), (1.0, 0, 1.0), (1.0, 2, 1.0), (1.0, 0, 0.5)]:
        how: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        alone = sample(good, rows(num=3, seed=[1, 2, 3], **how))
        mixed = [bad[0], good[0], bad[1], bad[2], good[1], bad[3], good[2], bad[4]]
        tokens = sample(mixed, rows(num=8, seed=[9, 1, 9, 9, 2, 9, 3, 9], **how))
        assert tokens == [-1, alone[0], -1, -1, alone[1], -1, alone[2], -1]
    everything = [(0, token) for token in range(4)]
    assert sample([good[0], good[0]], rows(num=2, temperature=0.0, banned=everything)) == [-1, 1]


def test_logits_at_the_limits_of_float32() -> None:
    sampling = rows(num=3, temperature=[1e-5, 1.0, MAX_TEMPERATURE], top_k=[0, 3, 0])
    assert sample([[-3e38, 3e38, -INF, 0]] * 3, sampling) == [1, 1, 1]


# ---- distributions -------------------------------------------------------------------------------

LOGITS = [0.0, 1.5, -1.0, 1.5, 0.3, -2.0, 0.9, 2.2, -0.4, 1.0, 0.0, -3.0]


def chi_square(counts: NDArray[np.int64], expected: Sequence[float]) -> float:
    return float(sum((n - e) ** 2 / e for n, e in zip(counts, expected, strict=True)))


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.7, 0, 1.0), (2.5, 0, 1.0), (1.0, 5, 1.0), (1.3, 0, 0.8), (0.9, 8, 0.9)],
)
@pytest.mark.parametrize("varying", ["seed", "index", "position"])
def test_frequencies(temperature: float, top_k: int, top_p: float, varying: str) -> None:
    """Whichever of the three numbers changes from draw to draw. Seeds are fixed: no luck needed."""
    num = 20_000
    which: dict[str, Any] = {varying: np.arange(num)}
    how: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    tokens = sample([LOGITS], rows(num=num, logits_row=0, **how, **which))
    kept = kept_tokens(LOGITS, temperature, top_k, top_p)
    weights = [math.exp(LOGITS[token] / temperature) for token in kept]
    counts = np.bincount(tokens, minlength=len(LOGITS))
    assert counts.sum() == counts[kept].sum() == num
    expected = [num * w / sum(weights) for w in weights]
    freedom = len(kept) - 1
    # A statistic with `freedom` degrees of freedom has that mean and variance 2 * freedom.
    assert chi_square(counts[kept], expected) < freedom + 4 * math.sqrt(2 * freedom)


def test_neighbouring_draws_are_independent() -> None:
    """Of positions in one output, of samples of one request, and of the seeds n and n + 1."""
    num = 16_000
    for name in ("seed", "index", "position"):
        even: dict[str, Any] = {name: np.arange(num) * 2}
        odd: dict[str, Any] = {name: np.arange(num) * 2 + 1}
        first = np.array(sample([[0.0] * 4], rows(num=num, logits_row=0, **even)))
        second = np.array(sample([[0.0] * 4], rows(num=num, logits_row=0, **odd)))
        counts = np.bincount(first * 4 + second, minlength=16)
        assert chi_square(counts, [num / 16] * 16) < 15 + 4 * math.sqrt(30)


# ---- the same draw in any company ----------------------------------------------------------------


def test_rows_do_not_depend_on_each_other() -> None:
    """Alone, reversed, twice, and beside other kinds of rows: the same token."""
    rng = np.random.default_rng(5)
    logits = (2 * rng.standard_normal((6, 16))).astype(np.float32)
    sampling = rows(
        num=6,
        temperature=[0.0, 1.0, 1.0, 1.0, 0.5, 1.0],
        top_k=[0, 3, 0, MAX_COUNT, 0, 16],
        top_p=[1.0, 1.0, 1.0, 1.0, 0.6, 0.0],
        seed=[0, 11, 2**64 - 1, 13, 14, 15],
        position=range(6),
    )
    together = sample(logits, sampling)
    for i in range(6):
        assert sample(logits, take(sampling, [i])) == [together[i]]
        only = take(sampling, [i])
        only.logits_row[0] = 0
        assert sample(logits[i : i + 1], only) == [together[i]]
    assert sample(logits, take(sampling, slice(None, None, -1))) == together[::-1]
    assert sample(logits, take(sampling, [0, 1, 2, 3, 4, 5] * 3)) == together * 3


def test_limits_that_keep_everything_change_no_draw() -> None:
    logits = np.random.default_rng(6).standard_normal((1, 37)).astype(np.float32)
    plain = sample(logits, rows(num=50, logits_row=0, index=range(50)))
    for top_k, top_p in [(36, 1.0), (37, 1.0), (MAX_COUNT, 1.0), (0, 0.999999)]:
        how: dict[str, Any] = {"top_k": top_k, "top_p": top_p}
        limited = sample(logits, rows(num=50, logits_row=0, index=range(50), **how))
        assert limited == plain


def test_samples_of_one_row_differ() -> None:
    logits = [[0.0] * 1000]
    tokens = sample(logits, rows(num=3, logits_row=0, seed=42, index=[0, 1, 2]))
    assert len(set(tokens)) == 3
    assert len({sample(logits, rows(num=1, seed=42, position=i))[0] for i in range(20)}) > 15
    assert len({sample(logits, rows(num=1, seed=i))[0] for i in range(20)}) > 15


def test_no_samples() -> None:
    assert sample(np.zeros((0, 7)), rows(num=0)) == []
    assert sample(np.zeros((2, 7)), rows(num=0)) == []
