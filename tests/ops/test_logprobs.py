"""Log probabilities and ranks against a log-softmax in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cupaged.ops.numpy_ops import NumpyOps

NAN, INF = math.nan, math.inf
Told = tuple[list[list[int]], NDArray[np.float32], list[list[int]]]


def logprobs(logits: Any, token_ids: Sequence[int], count: int) -> Told:
    given = np.array(logits, np.float32)
    before = given.copy()
    ids, values, ranks = NumpyOps().logprobs(given, np.array(token_ids, np.int32), count)
    np.testing.assert_array_equal(given, before)  # the logits are only read
    width = 1 + min(count, given.shape[1])
    assert ids.shape == values.shape == ranks.shape == (len(given), width)
    assert [a.dtype.name for a in (ids, values, ranks)] == ["int32", "float32", "int32"]
    return ids.tolist(), values, ranks.tolist()


def oracle(row: Sequence[float], token: int, count: int) -> tuple[list[int], list[float], int]:
    """Ids, log probabilities, and the rank of `token`, one number at a time."""
    highest = max(row)
    norm = highest + math.log(math.fsum(math.exp(x - highest) for x in row))
    likeliest = sorted(range(len(row)), key=lambda i: (-row[i], i))[:count]
    ids = [token, *likeliest]
    return ids, [row[i] - norm for i in ids], sum(x >= row[token] for x in row)


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 7, 37, 509])
@pytest.mark.parametrize("count", [0, 1, 2, 5, 20, 508, 509, 10**6, 2**31 - 1])
def test_every_count_equals_the_oracle(vocab_size: int, count: int) -> None:
    rng = np.random.default_rng(vocab_size)
    logits = (4 * rng.standard_normal((7, vocab_size))).astype(np.float32)
    logits[::2] = np.rint(logits[::2])  # many equal logits
    tokens = rng.integers(0, vocab_size, 7).tolist()
    ids, values, ranks = logprobs(logits, tokens, count)
    for i, row in enumerate(logits.tolist()):
        expected_ids, expected, rank = oracle(row, tokens[i], count)
        assert ids[i] == expected_ids
        np.testing.assert_allclose(values[i], expected, rtol=0, atol=2e-6)
        assert ranks[i] == [rank, *range(1, len(ids[i]))]


def test_ties_by_hand() -> None:
    """Equal tokens are told by id; the rank of a given token counts all that are as likely."""
    logits = [[1.0, 3.0, 3.0, 0.0, 3.0], [2.0] * 5, [0.0, 1.0, 2.0, 3.0, 4.0]]
    ids, values, ranks = logprobs(logits, [4, 0, 0], 3)
    assert ids == [[4, 1, 2, 4], [0, 0, 1, 2], [0, 4, 3, 2]]
    assert ranks == [[3, 1, 2, 3], [5, 1, 2, 3], [5, 1, 2, 3]]
    np.testing.assert_allclose(values[1], [-math.log(5)] * 4, rtol=1e-6)
    assert len({float(value) for value in values[0]}) == 1


def test_all_probabilities_add_up_to_one() -> None:
    logits = np.random.default_rng(1).normal(scale=6, size=(3, 5000))
    ids, values, _ = logprobs(logits, [0, 1, 2], 5000)
    assert all(sorted(row[1:]) == [*range(5000)] for row in ids)
    np.testing.assert_allclose(np.exp(values[:, 1:].astype(np.float64)).sum(axis=1), 1, rtol=1e-5)


def test_large_logits_and_tokens_that_cannot_come() -> None:
    logits = [[1e4, 1e4 - 1, -1e4, -INF], [-1e4, -1e4, -INF, -INF], [3e38, -3e38, 0, -INF]]
    ids, values, ranks = logprobs(logits, [1, 1, 3], 4)
    first = math.log1p(math.exp(-1))
    np.testing.assert_allclose(values[0, :3], [-1 - first, -first, -1 - first], rtol=1e-6)
    np.testing.assert_allclose(values[1, :3], [-math.log(2)] * 3, rtol=1e-6)
    assert values[2, 1] == 0
    assert [row[-1] for row in values.tolist()] == [-INF] * 3
    assert ids == [[1, 0, 1, 2, 3], [1, 0, 1, 2, 3], [3, 0, 2, 1, 3]]
    assert ranks[2][0] == 4


@pytest.mark.parametrize("count", [0, 1, 3, 4, 99])
def test_rows_without_a_number_do_not_touch_the_others(count: int) -> None:
    bad = [[0.0, NAN, 2.0, 1.0], [NAN] * 4, [-INF] * 4, [0, INF, 0, 0], [INF, -INF, NAN, 0]]
    good = [[0.0, 3.0, 1.0, 2.0], [-INF, 1.0, -INF, 1.0], [4.0] * 4]
    alone = logprobs(good, [0, 1, 2], count)
    mixed = [bad[0], good[0], bad[1], bad[2], good[1], bad[3], good[2], bad[4]]
    ids, values, ranks = logprobs(mixed, [0, 0, 3, 2, 1, 1, 2, 0], count)
    which = [1, 4, 6]
    assert [ids[i] for i in which] == alone[0]
    np.testing.assert_array_equal(values[which], alone[1])
    assert [ranks[i] for i in which] == alone[2]
    assert np.isnan(np.delete(values, which, axis=0)).all()
    assert [row[0] for row in ids] == [0, 0, 3, 2, 1, 1, 2, 0]
    assert all(0 <= token < 4 for row in ids for token in row)


@pytest.mark.parametrize("count", [0, 2, 5, 9])
def test_no_rows(count: int) -> None:
    ids, _, ranks = logprobs(np.zeros((0, 5)), [], count)
    assert ids == ranks == []
