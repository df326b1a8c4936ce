"""Every parameter takes what vLLM's takes, and anything else is refused by name."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupaged.errors import InvalidParameterError, NotSupportedError
from cupaged.sampling_params import SamplingParams

LARGE = 10**400  # more than a float holds
HUGE = 10**5000  # more digits than Python prints
NAN, INF = math.nan, math.inf
ODD = object()


def test_defaults_are_those_of_vllm() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k) == (1, 1.0, 1.0, 0)
    assert (params.max_tokens, params.min_tokens, params.seed) == (16, 0, None)
    assert (params.stop_strings, params.stop_token_ids) == ((), ())
    assert not params.is_greedy
    assert len(SamplingParams.field_names()) == 25


def test_values_are_normalised() -> None:
    numpy: Any = np
    half: Any = Fraction(1, 2)
    params = SamplingParams(
        temperature=0, top_k=-1, seed=-1, stop="end", stop_token_ids=[3, numpy.int64(4)]
    )
    assert params.temperature == 0.0
    assert params.is_greedy
    assert params.top_k == 0
    assert params.seed is None
    assert params.stop_strings == ("end",)
    assert params.stop_token_ids == (3, 4)
    assert SamplingParams(temperature=9e-6).is_greedy
    assert not SamplingParams(temperature=1e-5).is_greedy
    assert SamplingParams(temperature=half).temperature == 0.5
    assert SamplingParams(top_p=numpy.float32(0.5)).top_p == 0.5
    assert SamplingParams(n=numpy.int32(2)).n == 2
    params = SamplingParams(
        logit_bias={numpy.int64(3): 1}, allowed_token_ids=[numpy.int32(5)], bad_words=["a"]
    )
    assert params.logit_bias == {3: 1.0}
    assert [type(token) for token in params.allowed_token_ids or ()] == [int]
    assert params.bad_words == ("a",)
    params = SamplingParams()
    assert (params.logit_bias, params.allowed_token_ids, params.bad_words) == ({}, None, ())
    assert (params.trace_decode_token_ids, params.logprobs) == ((), None)


def test_nothing_changes_later() -> None:
    params = SamplingParams()
    with pytest.raises(FrozenInstanceError):
        params.n = 2  # type: ignore[misc]
    with pytest.raises(TypeError):
        SamplingParams(2)  # type: ignore[call-arg]
    bias, words = {3: 1.0}, ["a"]
    params = SamplingParams(logit_bias=bias, bad_words=words)
    bias[4] = NAN
    words.append("")
    assert (params.logit_bias, params.bad_words) == ({3: 1.0}, ("a",))
    assert hash(params) == hash(SamplingParams(logit_bias={3: 1.0}, bad_words=["a"]))


@pytest.mark.parametrize(
    "accepted",
    [
        {"n": 1024},
        {"top_p": 0},
        {"top_p": 1e-9},
        {"top_k": 9_999_999},
        {"temperature": 1e300},
        {"seed": 2**64 - 1},
        {"seed": 0},
        {"max_tokens": 1},
        {"max_tokens": None, "min_tokens": 10**9},
        {"max_tokens": 10**18},
        {"min_tokens": 16},
        {"stop": ["a", "b"]},
        {"stop": []},
        {"stop": ["x"] * 64},
        {"detokenize": False},
        {"presence_penalty": -2, "frequency_penalty": 2},
        {"repetition_penalty": 5e-324},
        {"repetition_penalty": 1e308},
        {"min_p": 1},
        {"logprobs": 0, "prompt_logprobs": -1},
        {"logprobs": 10**18},
        {"logit_bias": {0: 100, 10**9: -100.0}},
        {"logit_bias": {}},
        {"allowed_token_ids": (3,)},
        {"bad_words": ("a", " b c")},
        {"trace_decode_token_ids": (1, 2, 1)},
    ],
)
def test_the_edges_are_accepted(accepted: dict[str, Any]) -> None:
    params = SamplingParams(**accepted)
    for name in accepted.keys() - {"stop"}:
        assert getattr(params, name) == accepted[name]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("n", [0, -1, 1.5, 1025, "2", None, True, NAN, INF, HUGE, [1], ODD]),
        ("temperature", ["hot", -0.1, NAN, INF, -INF, None, True, HUGE, 1j, [], ODD]),
        ("top_p", [-0.1, 1.1, NAN, INF, "0.5", None, False, HUGE, ODD]),
        ("top_k", [0.01, -2, 3.0, NAN, INF, "3", None, True, HUGE, -HUGE, ODD]),
        ("seed", [-2, 2**64, 1.5, NAN, "1", True, HUGE, ODD]),
        ("max_tokens", [0, -1, 1.5, NAN, INF, "5", True, HUGE, ODD]),
        ("min_tokens", [-1, 17, 1.5, NAN, None, "1", True, HUGE, ODD]),
        ("stop", ["", ["a", ""], [1], 5, b"a", [b"a"], ["x"] * 65, {"a": 1}, NAN, HUGE, ODD]),
        ("stop_token_ids", ["12", b"12", 5, [-1], [1.0], [NAN], [None], [True], [HUGE], {1}, ODD]),
        ("ignore_eos", [1, 0, None, "yes", NAN, HUGE]),
        ("detokenize", [1, None, "no"]),
        ("skip_special_tokens", [1, None, "no"]),
        ("include_stop_str_in_output", [1, None, "no"]),
        ("presence_penalty", [-2.1, 2.1, NAN, INF, "0.5", None, True, HUGE, ODD, np.zeros(2)]),
        ("frequency_penalty", [-2.1, 2.1, NAN, -INF, "x", None, False, HUGE, [0.5], 1j]),
        ("repetition_penalty", [0, 0.0, -1.0, NAN, INF, "x", None, True, HUGE, ODD]),
        ("min_p", [-0.1, 1.1, NAN, INF, "x", None, True, HUGE, ODD]),
        ("logprobs", [-2, 1.5, 1.0, NAN, INF, "1", True, HUGE, -HUGE, [1], ODD]),
        ("prompt_logprobs", [-2, 0.5, NAN, "x", False, HUGE, ODD]),
        ("logit_bias", [{-1: 5}, {"5": 5}, {1.0: 5}, {NAN: 5}, {None: 5}, {True: 5}, {HUGE: 5}]),
        ("logit_bias", [{0: INF}, {0: NAN}, {0: 101}, {0: "1"}, {0: None}, {0: HUGE}, {0: True}]),
        ("logit_bias", [HUGE, [HUGE], [(1, 2.0)], "ab", 5, NAN, True, {1}, ODD, np.zeros(3)]),
        ("allowed_token_ids", [[], (), "", "12", b"1", 5, NAN, True, {1}, {1: 2}, ODD]),
        ("allowed_token_ids", [[-1], [1.0], [NAN], [INF], [None], [True], ["1"], [HUGE], [[1]]]),
        ("bad_words", ["x", "", [""], ["a", ""], [1], [None], [b"a"], b"a", {"a"}, {"a": 1}]),
        ("bad_words", [["x"] * 65, 5, NAN, True, HUGE, ODD, ["a", NAN]]),
        ("trace_decode_token_ids", ["12", 5, [-1], [1.0], [NAN], [None], [True], [HUGE], {1}, ODD]),
    ],
)
def test_anything_else_is_refused_by_name(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(InvalidParameterError) as refused:
            SamplingParams(**{name: value})
        assert refused.value.name.startswith(name)
        assert refused.value.allowed


def test_an_error_says_what_was_wrong_and_what_is_allowed() -> None:
    with pytest.raises(InvalidParameterError, match=r"^top_p must be a number in \[0, 1\], got 2"):
        SamplingParams(top_p=2)
    with pytest.raises(InvalidParameterError, match=r"^stop_token_ids\[1\] must be .*, got -1$"):
        SamplingParams(stop_token_ids=[1, -1])
    with pytest.raises(InvalidParameterError, match=r"^allowed_token_ids\[0\] must be .*, got -3$"):
        SamplingParams(allowed_token_ids=[-3])
    with pytest.raises(InvalidParameterError, match=r"^logit_bias key must be .*, got -1$"):
        SamplingParams(logit_bias={-1: 2.0})
    with pytest.raises(InvalidParameterError, match=r"^logit_bias\[7\] must be .* \[-100, 100\]"):
        SamplingParams(logit_bias={7: 1000})
    with pytest.raises(InvalidParameterError, match="detokenize must be True when stop strings"):
        SamplingParams(stop="a", detokenize=False)
    with pytest.raises(InvalidParameterError, match=r"min_tokens must be an integer in \[0, 3\]"):
        SamplingParams(max_tokens=3, min_tokens=4)


@pytest.mark.parametrize(
    ("name", "neutral", "values"),
    [
        ("spaces_between_special_tokens", True, [False, "x", NAN, HUGE]),
        ("structured_outputs", None, [{"json": {}}, ODD, 0, NAN, HUGE]),
    ],
)
def test_what_is_not_built_is_refused_unless_it_is_neutral(
    name: str, neutral: Any, values: list[Any]
) -> None:
    assert getattr(SamplingParams(**{name: neutral}), name) == neutral
    for value in values:
        with pytest.raises(NotSupportedError, match=f"^{name}=.* is not supported") as refused:
            SamplingParams(**{name: value})
        assert f"leave it at {neutral!r}" in str(refused.value)


def test_a_long_value_is_cut_in_the_message() -> None:
    with pytest.raises(NotSupportedError) as refused:
        SamplingParams(structured_outputs=dict.fromkeys(range(50_000), 1.0))
    assert len(str(refused.value)) < 300
    with pytest.raises(InvalidParameterError) as wrong:
        SamplingParams(logit_bias=list(range(50_000)))  # type: ignore[arg-type]
    assert len(str(wrong.value)) < 300


ANYTHING = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.complex_numbers(),
        st.text(max_size=4),
        st.binary(max_size=4),
        st.sampled_from([LARGE, -LARGE, ODD, np.array([1, 2]), np.float64(NAN), Fraction(LARGE)]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=2), inner, max_size=2)
    ),
    max_leaves=4,
)


@settings(max_examples=400, deadline=None, derandomize=True, database=None)
@given(values=st.dictionaries(st.sampled_from(SamplingParams.field_names()), ANYTHING, max_size=3))
def test_any_values_are_accepted_or_refused_with_an_error_of_ours(values: dict[str, Any]) -> None:
    try:
        params = SamplingParams(**values)
    except (InvalidParameterError, NotSupportedError):
        return
    assert 1 <= params.n <= 1024
    assert 0.0 <= params.temperature < INF
    assert 0.0 <= params.top_p <= 1.0
    assert 0 <= params.top_k < 2**63
    assert params.seed is None or 0 <= params.seed < 2**64
    assert params.max_tokens is None or 1 <= params.max_tokens < 2**63
    assert all(0 <= token < 2**63 for token in params.stop_token_ids or ())
    assert all(0 <= token < 2**63 for token in params.allowed_token_ids or ())
    assert all(-100 <= value <= 100 for value in (params.logit_bias or {}).values())
    assert 0.0 <= params.min_p <= 1.0 and 0.0 < params.repetition_penalty < INF
    assert abs(params.presence_penalty) <= 2 and abs(params.frequency_penalty) <= 2
    assert params.logprobs is None or -1 <= params.logprobs < 2**63
    assert SamplingParams(**{k: getattr(params, k) for k in SamplingParams.field_names()}) == params
