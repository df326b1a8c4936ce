"""Edits of the logits and min-p: by hand, and against the naive oracle."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupaged.engine.sampling_batch import LogitsEdits, SamplingBatch
from cupaged.ops.numpy_ops import NumpyOps
from tests.ops.sampling_oracle import as_list, edited, edits_of, kept_tokens, oracle, rows

INF = math.inf
VOCAB_SIZE = 9


def sample(logits: Any, sampling: SamplingBatch) -> tuple[list[int], list[list[float]]]:
    """The tokens, and the logits after the edits, which are made in place."""
    array = np.array(logits, np.float32)
    tokens = NumpyOps().sample(array, sampling)
    assert tokens.dtype == np.int32 and tokens.shape == sampling.logits_row.shape
    return tokens.tolist(), [as_list(row) for row in array]


def drawn(logits: Sequence[float], edits: LogitsEdits | None = None, **how: Any) -> set[int]:
    """Every token that comes in 2000 draws of one row."""
    sampling = rows(num=2000, logits_row=0, index=range(2000), edits=edits, **how)
    return set(sample([logits], sampling)[0])


# ---- edits by hand -------------------------------------------------------------------------------


def test_edits_in_their_order() -> None:
    """1 + (-3) = -2; a negative logit times 2 is -4; less 0.5. And 4 + 2 = 6; 6 / 2 = 3; 3 - 1."""
    edits = edits_of(
        bias={(1, 0): -3, (1, 2): 2, (0, 1): 5},
        repetition={(1, 0): 2, (1, 2): 2, (1, 3): 2},
        subtracted={(1, 0): 0.5, (1, 2): 1, (1, 1): -2},
    )
    logits = [[1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 4.0, 0.0], [1.0, 2.0, 3.0, 4.0]]
    tokens, after = sample(logits, rows(num=3, temperature=0.0, edits=edits))
    assert after == [[1, 7, 3, 4], [-4.5, 4, 2, 0], [1, 2, 3, 4]]
    assert tokens == [1, 1, 3]


def test_penalties_of_equal_logits() -> None:
    """Repetition of 2: a positive logit is halved, a negative one doubled; both are less likely."""
    for logit, after in ((1.0, 0.5), (-1.0, -2.0), (0.0, 0.0)):
        _, (row,) = sample([[logit] * 5], rows(num=1, edits=edits_of(repetition={(0, 3): 2})))
        assert row == [logit, logit, logit, after, logit]
    greedy: dict[str, Any] = {"num": 1, "temperature": 0.0}
    tokens, _ = sample([[1.0] * 3], rows(**greedy, edits=edits_of(repetition={(0, 0): 2})))
    assert tokens == [1]
    tokens, _ = sample([[1.0] * 3], rows(**greedy, edits=edits_of(repetition={(0, 2): 0.5})))
    assert tokens == [2]
    frequencies = {(0, 0): 1.0, (0, 1): 3.0, (0, 2): 2.0}
    _, (row,) = sample([[4.0] * 4], rows(**greedy, edits=edits_of(subtracted=frequencies)))
    assert row == [3, 1, 2, 4]


@pytest.mark.parametrize("left", [0, 7, 15])
def test_all_tokens_but_one_at_minus_100(left: int) -> None:
    logits = np.random.default_rng(left).normal(scale=5, size=16)
    logits[left] = logits.min() - 5
    edits = edits_of(bias={(0, token): -100.0 for token in range(16) if token != left})
    for how in ({}, {"temperature": 0.0}, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.1}):
        assert drawn(as_list(logits), edits, **how) == {left}


def test_allowed_tokens_and_bans() -> None:
    logits = [0.5, 9.0, 0.0, 1.0, 8.0, 0.25]
    allowed = [(0, token) for token in (5, 2, 3, 0)]
    for how in ({}, {"top_k": 5}, {"top_p": 0.999}, {"min_p": 0.01}):
        assert drawn(logits, edits_of(allowed=allowed), **how) == {0, 2, 3, 5}
        both = edits_of(allowed=allowed, banned=[(0, 3), (0, 1), (0, 5)])
        assert drawn(logits, both, **how) == {0, 2}
    assert drawn(logits, edits_of(allowed=[(0, 2)]), temperature=0.0) == {2}
    nothing = edits_of(allowed=[(0, 2)], banned=[(0, 2)])
    assert sample([logits, logits], rows(num=2, temperature=0.0, edits=nothing))[0] == [-1, 1]
    twice = edits_of(allowed=[(0, 2)], bias={(0, 2): -5, (0, 1): 5}, banned=[(0, 1), (0, 1)])
    assert drawn(logits, twice) == {2}


def test_values_that_overflow_fail_their_row_alone() -> None:
    """Towards +inf the row fails; towards -inf the token is never drawn."""
    logits = [[3e38, 0.0, 1.0], [-3e38, 0.0, 1.0], [3e38, 0.0, 1.0], [0.0, 2.0, 1.0]]
    up = {(0, 0): 3e38}
    tokens, after = sample(logits, rows(num=4, temperature=0.0, edits=edits_of(bias=up)))
    assert (tokens, after[0][0]) == ([-1, 2, 0, 1], INF)
    edits = edits_of(repetition={(0, 0): 1e-30, (1, 0): 1e30, (3, 0): 1e30})
    tokens, after = sample(logits, rows(num=4, temperature=0.0, edits=edits))
    assert (tokens, after[0][0], after[1][0]) == ([-1, 2, 0, 1], INF, -INF)
    edits = edits_of(subtracted={(0, 0): -3e38, (1, 0): 3e38})
    tokens, _ = sample(logits, rows(num=4, temperature=[0, 1, 0, 0], edits=edits, top_k=2))
    assert tokens[0] == -1 and tokens[1] in (1, 2) and tokens[2:] == [0, 1]


# ---- min-p ---------------------------------------------------------------------------------------

FOUR = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({"min_p": 0.0}, {0, 1, 2, 3}),
        ({"min_p": 0.24}, {0, 1, 2, 3}),
        ({"min_p": 0.26}, {0, 1, 2}),
        ({"min_p": 0.51}, {0, 1}),
        ({"min_p": 0.76}, {0}),
        ({"min_p": 1.0}, {0}),
        ({"min_p": 0.26, "top_k": 2}, {0, 1}),
        ({"min_p": 0.51, "top_k": 3}, {0, 1}),
        ({"min_p": 0.26, "top_k": 99}, {0, 1, 2}),
        ({"min_p": 0.26, "top_p": 0.44}, {0}),  # 0.4 of the 0.9 that min_p leaves is 0.444
        ({"min_p": 0.0, "top_p": 0.44}, {0, 1}),
        ({"min_p": 0.26, "top_p": 0.45}, {0, 1}),
        ({"min_p": 0.26, "top_k": 2, "top_p": 0.57}, {0}),  # 0.4 of 0.7 is 0.571
        ({"min_p": 0.26, "top_k": 2, "top_p": 0.58}, {0, 1}),
        ({"min_p": 0.51, "top_p": 0.0}, {0}),
        # Shares are those after the temperature: 0.16, 0.09, 0.04, 0.01.
        ({"min_p": 0.26, "temperature": 0.5}, {0, 1}),
        ({"min_p": 0.24, "temperature": 0.5}, {0, 1, 2}),
        ({"min_p": 0.6, "temperature": 2.0}, {0, 1, 2}),
        ({"min_p": 0.9, "temperature": 0.0}, {0}),
    ],
    ids=str,
)
def test_min_p_by_hand(how: dict[str, Any], expected: set[int]) -> None:
    assert drawn(FOUR, **how) == expected
    assert drawn(FOUR[::-1], **how) == {3 - i for i in expected}


def test_min_p_keeps_ties_and_the_likeliest() -> None:
    assert drawn([2.0, 0.0, 2.0, 2.0], min_p=1.0) == {0, 2, 3}
    assert drawn([2.0, 0.0, 2.0, 2.0], min_p=1.0, top_k=2) == {0, 2}
    assert drawn([-INF, 1.0, -INF], min_p=1e-9) == {1}
    assert drawn([0.0] * 4, edits_of(bias={(0, 2): -0.1}), min_p=0.95) == {0, 1, 3}


def test_min_p_of_one_row_leaves_the_others_alone() -> None:
    sampling = rows(num=3000, logits_row=[0, 1, 2] * 1000, index=range(3000))
    sampling.min_p[1::3] = 0.6
    tokens = np.array(sample([FOUR] * 3, sampling)[0])
    assert set(tokens[0::3]) == set(tokens[2::3]) == {0, 1, 2, 3}
    assert set(tokens[1::3]) == {0, 1}


# ---- against the oracle --------------------------------------------------------------------------

HALVES = st.integers(-6, 6).map(lambda n: n / 2)  # exact in float32, and full of ties
PAIRS = st.tuples(st.integers(0, 2), st.integers(0, VOCAB_SIZE - 1))
EDITS = st.builds(
    edits_of,
    bias=st.dictionaries(PAIRS, HALVES, max_size=5),
    repetition=st.dictionaries(PAIRS, st.sampled_from([0.5, 2.0, 4.0]), max_size=5),
    subtracted=st.dictionaries(PAIRS, HALVES, max_size=5),
    allowed=st.lists(PAIRS, max_size=6, unique=True),
    banned=st.lists(PAIRS, max_size=4),
)
LIMITS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.5, 1.0, 2.0]),
        "top_k": st.sampled_from([0, 1, 2, 5, VOCAB_SIZE, 10**6]),
        "top_p": st.sampled_from([0.0, 0.3, 0.7, 0.95, 1.0]),
        "min_p": st.sampled_from([0.0, 1e-3, 0.05, 0.3, 1.0]),
    }
)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(
    logits=st.lists(
        st.lists(HALVES, min_size=VOCAB_SIZE, max_size=VOCAB_SIZE), min_size=3, max_size=3
    ),
    edits=EDITS,
    limits=st.lists(LIMITS, min_size=3, max_size=3),
    seed=st.integers(0, 2**64 - 1),
)
def test_draws_equal_the_oracle(
    logits: list[list[float]], edits: LogitsEdits, limits: list[dict[str, Any]], seed: int
) -> None:
    """Three rows of four samples each, every row with limits of its own."""
    columns: dict[str, Any] = {
        name: np.repeat([each[name] for each in limits], 4) for name in limits[0]
    }
    sampling = rows(
        num=12,
        logits_row=np.repeat(range(3), 4),
        seed=seed,
        index=range(12),
        edits=edits,
        **columns,
    )
    tokens, after = sample(logits, sampling)
    expected = edited(logits, edits)
    assert after == expected
    for i, token in enumerate(tokens):
        row = expected[i // 4]
        if max(row) == -INF:
            assert token == -1
            continue
        assert token == oracle(row, sampling, i)
        if limits[i // 4]["temperature"] > 0:
            how = (limits[i // 4][name] for name in ("temperature", "top_k", "top_p", "min_p"))
            assert token in kept_tokens(row, *how)
