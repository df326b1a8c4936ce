"""What requests ask of their logits, and the edits that the batch page makes of it."""

from __future__ import annotations

import math
from collections.abc import Sequence as Ids
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupaged.engine.sampling_batch import MAX_PENALTY, LogitsEdits, build_edits
from cupaged.logits_rules import LogitsRules, rules_of
from cupaged.request import CoreRequest, Request, Sequence
from cupaged.sampling_params import SamplingParams
from tests.ops.sampling_oracle import edited

VOCAB_SIZE = 12
Words = tuple[tuple[int, ...], ...]


def rules(eos: Ids[int] = (), words: Words = (), **params: Any) -> LogitsRules:
    found = rules_of(SamplingParams(**params), eos, words)
    assert found is not None
    return found


def sequence_of(
    prompt: Ids[int],
    output: Ids[int] = (),
    *,
    eos: Ids[int] = (),
    words: Words = (),
    **params: Any,
) -> Sequence:
    core = CoreRequest(
        "a", tuple(prompt), SamplingParams(**params), tuple(eos), bad_words_token_ids=words
    )
    sequence = Request(core, arrival=0, max_tokens=99).sequences[0]
    sequence.token_ids += output
    return sequence


def edits_for(*sequences: Sequence) -> LogitsEdits:
    edits = build_edits(enumerate(sequences))
    assert edits is not None
    return edits


def with_values(pairs: Any, values: Any) -> dict[tuple[int, int], float]:
    """Pairs as a mapping; no pair may stand twice."""
    found = {(r, t): float(v) for (r, t), v in zip(pairs.tolist(), values, strict=True)}
    assert len(found) == len(pairs)
    return found


# ---- rules ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("eos", "params"),
    [
        ((), {}),
        ((7,), {}),
        ((7,), {"stop_token_ids": [3]}),
        ((7,), {"min_tokens": 3, "ignore_eos": True}),
        ((), {"min_tokens": 3}),
        ((7,), {"temperature": 0.3, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "logprobs": 3}),
        ((7,), {"trace_decode_token_ids": [3], "prompt_logprobs": 1}),
        ((), {"logit_bias": {}, "repetition_penalty": 1, "presence_penalty": 0}),
    ],
)
def test_who_asks_for_nothing_has_no_rules(eos: Ids[int], params: dict[str, Any]) -> None:
    assert rules_of(SamplingParams(**params), eos, ()) is None
    assert build_edits(enumerate([sequence_of([1], [2], eos=eos, **params)] * 2)) is None


def test_rules_of_parameters() -> None:
    found = rules(
        eos=(7, 9),
        words=((4,), (1, 2)),
        logit_bias={5: -1, 2: 0.25},
        allowed_token_ids=[8, 3, 8],
        repetition_penalty=1.5,
        presence_penalty=-1,
        frequency_penalty=2,
        stop_token_ids=[9, 1],
        min_tokens=2,
    )
    assert dict(zip(found.bias_ids.tolist(), found.bias_values.tolist(), strict=True)) == {
        5: -1.0,
        2: 0.25,
    }
    assert found.allowed_ids.tolist() == [3, 8]
    assert (found.repetition, found.presence, found.frequency) == (1.5, -1.0, 2.0)
    assert (found.early_ids.tolist(), found.min_tokens) == ([1, 7, 9], 2)
    assert found.bad_words == ((4,), (1, 2))
    assert found.bias_ids.dtype == found.allowed_ids.dtype == found.early_ids.dtype == np.int32
    assert found.bias_values.dtype == np.float32
    assert rules(eos=(7,), stop_token_ids=[3], ignore_eos=True, min_tokens=1).early_ids == [3]


def test_the_last_token_of_a_bad_word_is_banned_after_the_others() -> None:
    found = rules(words=((4,), (1, 2), (1, 2, 3), (2, 5), (1, 1, 1)))
    for output, banned in [
        ([], {4}),
        ([1], {4, 2}),
        ([1, 2], {4, 3, 5}),
        ([2], {4, 5}),
        ([1, 2, 3], {4}),
        ([9, 1], {4, 2}),
        ([1, 1], {4, 1, 2}),
        ([1, 9, 1], {4, 2}),
        ([9, 9, 1, 2], {4, 3, 5}),
    ]:
        assert set(found.banned_after(output)) == banned


# ---- edits by hand -------------------------------------------------------------------------------


def test_edits_of_a_step_by_hand() -> None:
    """Rows are those of the logits: 0 has no rules, 1 has most of them, 2 is limited."""
    free = sequence_of([1, 2], [3])
    most = sequence_of(
        [6, 6, 2],
        [5, 6, 5],
        eos=(7,),
        words=((0,), (5, 11), (6, 5, 10), (6, 9)),
        logit_bias={2: -3, 9: 0.5},
        repetition_penalty=2,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        min_tokens=4,
    )
    limited = sequence_of([1], [4, 4], allowed_token_ids=[8, 3], frequency_penalty=-1)
    edits = edits_for(free, most, limited)
    assert with_values(edits.bias, edits.bias_values) == {(1, 2): -3.0, (1, 9): 0.5}
    assert with_values(edits.repetition, edits.repetition_values) == {
        (1, 2): 2.0,
        (1, 5): 2.0,
        (1, 6): 2.0,
    }
    assert with_values(edits.subtracted, edits.subtracted_values) == {
        (1, 5): 1.0,
        (1, 6): 0.75,
        (2, 4): -2.0,
    }
    assert edits.allowed_rows.tolist() == [2]
    assert edits.allowed.tolist() == [[2, 3], [2, 8]]
    assert sorted(edits.banned.tolist()) == [[1, 0], [1, 7], [1, 10], [1, 11]]


def test_penalties_of_a_prompt_that_repeats_a_token() -> None:
    """Repetition sees prompt and output; presence and frequency see the output, with repeats."""
    how: dict[str, Any] = {
        "repetition_penalty": 2,
        "presence_penalty": 1,
        "frequency_penalty": 1,
    }
    logits = [[1.0] * 5]
    assert edited(logits, edits_for(sequence_of([3, 3], **how))) == [[1, 1, 1, 0.5, 1]]
    assert edited([[-1.0] * 5], edits_for(sequence_of([3, 3], **how))) == [[-1, -1, -1, -2, -1]]
    assert edited(logits, edits_for(sequence_of([3, 3], [3, 1, 3], **how))) == [
        [1, 0.5 - 2, 1, 0.5 - 3, 1]
    ]
    assert edited([[0.0] * 5], edits_for(sequence_of([3, 3], **how))) == [[0.0] * 5]


@pytest.mark.parametrize(("penalty", "used"), [(1e308, MAX_PENALTY), (5e-324, 1 / MAX_PENALTY)])
def test_penalties_fit_float32(penalty: float, used: float) -> None:
    edits = edits_for(sequence_of([3], repetition_penalty=penalty))
    assert edits.repetition_values.tolist() == [np.float32(used)]
    assert np.isfinite(edits.repetition_values * np.float32(1e8)).all()


def test_edits_are_copies() -> None:
    sequence = sequence_of([1], [2], logit_bias={3: 1}, repetition_penalty=2, allowed_token_ids=[4])
    edits = edits_for(sequence)
    before = edited([[1.0] * VOCAB_SIZE], edits)
    sequence.token_ids += [5, 6]
    assert edited([[1.0] * VOCAB_SIZE], edits) == before
    edits.bias_values[0] = 9
    again = edits_for(sequence)
    assert with_values(again.bias, again.bias_values) == {(0, 3): 1.0}


# ---- edits against a naive oracle ----------------------------------------------------------------


def naive(logits: Ids[float], sequence: Sequence) -> list[float]:
    """One row, as vLLM's parameters are defined."""
    core, row = sequence.request.core, [*logits]
    params, prompt = core.params, list(core.prompt_token_ids)
    output = sequence.token_ids[len(prompt) :]
    for token, bias in (params.logit_bias or {}).items():
        row[token] += bias
    for token in range(len(row)):
        if token in prompt or token in output:
            penalty = params.repetition_penalty
            row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty
        row[token] -= params.presence_penalty * (token in output)
        row[token] -= params.frequency_penalty * output.count(token)
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            row[token] = -math.inf
    if len(output) < params.min_tokens:
        for token in (*params.stop_ids, *(() if params.ignore_eos else core.eos_token_ids)):
            row[token] = -math.inf
    for *begin, last in core.bad_words_token_ids:
        if output[len(output) - len(begin) :] == begin and len(output) >= len(begin):
            row[last] = -math.inf
    return row


IDS = st.integers(0, VOCAB_SIZE - 1)
SEQUENCES = st.builds(
    sequence_of,
    st.lists(IDS, min_size=1, max_size=5),
    st.lists(IDS, max_size=6),
    eos=st.lists(IDS, max_size=2),
    words=st.lists(st.lists(IDS, min_size=1, max_size=3).map(tuple), max_size=4).map(tuple),
    logit_bias=st.dictionaries(IDS, st.integers(-100, 100), max_size=4),
    allowed_token_ids=st.none() | st.lists(IDS, min_size=1, max_size=5),
    repetition_penalty=st.sampled_from([1, 0.5, 2, 1.3]),
    presence_penalty=st.sampled_from([0, -2, 0.5]),
    frequency_penalty=st.sampled_from([0, 2, -0.25]),
    stop_token_ids=st.lists(IDS, max_size=2),
    ignore_eos=st.booleans(),
    min_tokens=st.integers(0, 8),
)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(sequences=st.lists(SEQUENCES, min_size=1, max_size=4), seed=st.integers(0, 99))
def test_edits_equal_a_naive_oracle(sequences: list[Sequence], seed: int) -> None:
    logits = np.random.default_rng(seed).normal(scale=3, size=(4, VOCAB_SIZE)).tolist()
    edits = build_edits(enumerate(sequences))
    if edits is not None:
        for pairs in (edits.bias, edits.repetition, edits.subtracted, edits.allowed):
            assert len({*map(tuple, pairs.tolist())}) == len(pairs)
    expected = [naive(row, s) for row, s in zip(logits, sequences, strict=False)]
    np.testing.assert_allclose(edited(logits, edits)[: len(sequences)], expected, rtol=1e-5)
    assert edited(logits, edits)[len(sequences) :] == logits[len(sequences) :]
