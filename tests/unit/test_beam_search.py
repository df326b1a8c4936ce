"""`BeamSearch` alone, on toy transition tables: against an enumeration of all outputs where beams
cannot miss one, and against an independent search everywhere else."""

from __future__ import annotations

import math
from itertools import product
from random import Random

import numpy as np
import pytest

from cupaged.engine.beam_search import BeamSearch, Candidate, Hypothesis
from cupaged.errors import InvalidParameterError, NotSupportedError
from cupaged.sampling_params import BeamSearchParams
from tests.beam_reference import Following, Found, Tokens, enumerate_all, search

PENALTIES = (-1.0, 0.0, 0.6, 1.0, 2.0)
EARLY_STOPPING = (False, True, "never")
MODES = tuple(product(PENALTIES, EARLY_STOPPING))


def table(seed: int, vocab_size: int, *, ties: bool = False) -> Following:
    """Log probabilities after each sequence of tokens: of its own, of few values with `ties`."""

    def following(tokens: Tokens) -> list[tuple[int, float]]:
        random = Random(f"{seed} {tokens}")
        if ties:
            return [(token, -random.randint(1, 3) / 2) for token in range(vocab_size)]
        weights = [random.random() ** 3 + 1e-3 for _ in range(vocab_size)]
        return [(token, math.log(w / sum(weights))) for token, w in enumerate(weights)]

    return following


def run(following: Following, params: BeamSearchParams, ending: frozenset[int]) -> list[Hypothesis]:
    """Search as the engine does: with the likeliest candidates of each beam and nothing else."""
    beams = BeamSearch(params, max_tokens=params.max_tokens, ending_ids=ending)
    count = params.num_candidates(len(ending))
    while beams.live:
        reports = []
        for beam in beams.live:
            tokens = tuple(token.token_id for token in beam.tokens)
            likeliest = sorted(following(tokens), key=lambda pair: (-pair[1], pair[0]))[:count]
            reports.append([Candidate(t, p, rank) for rank, (t, p) in enumerate(likeliest, 1)])
        before = beams.live
        chosen = beams.advance(reports)
        assert [b.tokens[:-1] for b in beams.live] == [before[c.beam].tokens for c in chosen]
        assert [b.tokens[-1].token_id for b in beams.live] == [c.token_id for c in chosen]
    return beams.hypotheses()


def plain(hypotheses: list[Hypothesis], length_penalty: float) -> list[Found]:
    """In the form of the reference."""
    return [
        Found(
            tuple(token.token_id for token in h.tokens),
            h.cumulative_logprob,
            h.score(length_penalty),
            h.has_ended,
        )
        for h in hypotheses
    ]


def assert_same(got: list[Found], expected: list[Found]) -> None:
    assert [f.tokens for f in got] == [f.tokens for f in expected]
    assert [f.has_ended for f in got] == [f.has_ended for f in expected]
    assert [f.total for f in got] == pytest.approx([f.total for f in expected], abs=1e-12)
    assert [f.score for f in got] == pytest.approx([f.score for f in expected], abs=1e-12)


@pytest.mark.parametrize(("length_penalty", "early_stopping"), MODES)
@pytest.mark.parametrize("width", [2, 3, 4, 5])
def test_bs_02_equal_to_an_independent_search(
    width: int, length_penalty: float, early_stopping: bool
) -> None:
    """Finished beams do not shrink the set, none mixes words of others, the best comes first."""
    for seed in range(12):
        random = Random(seed)
        following = table(seed, random.choice((4, 7, 12)), ties=seed % 3 == 0)
        ending = frozenset(random.sample(range(4), random.choice((0, 1, 1, 2))))
        params = BeamSearchParams(
            beam_width=width,
            max_tokens=random.choice((1, 2, 5, 8)),
            length_penalty=length_penalty,
            early_stopping=early_stopping,
        )
        expected = search(
            following,
            width=width,
            max_tokens=params.max_tokens,
            ending=ending,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
        )
        assert_same(plain(run(following, params, ending), length_penalty), expected)


@pytest.mark.parametrize("length_penalty", PENALTIES)
@pytest.mark.parametrize(
    ("width", "vocab_size", "max_tokens"), [(2, 2, 6), (3, 2, 6), (3, 3, 2), (4, 4, 2), (5, 5, 2)]
)
def test_bs_02_equal_to_an_enumeration_where_no_output_can_be_missed(
    width: int, vocab_size: int, max_tokens: int, length_penalty: float
) -> None:
    """No position but the last has more candidates than beams, and "never" ends no search whose
    beams can still become better."""
    for seed in range(20):
        following = table(seed, vocab_size)
        ending = frozenset([vocab_size - 1])
        params = BeamSearchParams(
            beam_width=width,
            max_tokens=max_tokens,
            length_penalty=length_penalty,
            early_stopping="never",
        )
        expected = enumerate_all(
            following, max_tokens=max_tokens, ending=ending, length_penalty=length_penalty
        )
        got = plain(run(following, params, ending), length_penalty)
        assert_same(got, expected[:width])


@pytest.mark.parametrize("length_penalty", PENALTIES)
@pytest.mark.parametrize(("width", "max_tokens"), [(2, 2), (4, 3), (5, 3)])
def test_bs_02_equal_to_an_enumeration_of_outputs_of_one_length(
    width: int, max_tokens: int, length_penalty: float
) -> None:
    """Two tokens, none of which ends: `width` beams hold all beginnings before the last token."""
    for seed in range(20):
        following = table(seed, 2)
        params = BeamSearchParams(
            beam_width=width, max_tokens=max_tokens, length_penalty=length_penalty
        )
        expected = enumerate_all(
            following, max_tokens=max_tokens, ending=frozenset(), length_penalty=length_penalty
        )
        got = plain(run(following, params, frozenset()), length_penalty)
        assert_same(got, expected[:width])


def candidates(*pairs: tuple[int, float]) -> list[Candidate]:
    return [Candidate(token, logprob, rank) for rank, (token, logprob) in enumerate(pairs, 1)]


def test_a_search_by_hand() -> None:
    """Token 9 ends. First position: 1 (-1), 9 (-2), 2 (-3), 3 (-4); of beam 1 then 9 (-1)."""
    params = BeamSearchParams(beam_width=2, max_tokens=5)
    beams = BeamSearch(params, max_tokens=5, ending_ids=frozenset([9]))
    chosen = beams.advance([candidates((1, -1.0), (9, -2.0), (2, -3.0), (3, -4.0))])
    assert chosen == [(0, 1), (0, 2)]
    assert [h.cumulative_logprob for h in beams.hypotheses()] == [-1.0, -2.0]
    chosen = beams.advance(
        [
            candidates((9, -1.0), (4, -5.0), (5, -6.0), (6, -7.0)),
            candidates((7, -2.0), (9, -2.5), (8, -9.0), (6, -9.5)),
        ]
    )
    # (1, 9) is worth -2 / 2; the best beam that goes on is (2, 7) at -5 / 2, worse than (9,) at -2.
    assert chosen == []
    best, second = beams.hypotheses()
    assert [token.token_id for token in best.tokens] == [1, 9]
    assert [token.token_id for token in second.tokens] == [9]
    assert (best.score(1.0), second.score(1.0)) == (-1.0, -2.0)


def test_an_ending_token_outside_the_first_width_does_not_count() -> None:
    params = BeamSearchParams(beam_width=1, max_tokens=5)
    beams = BeamSearch(params, max_tokens=5, ending_ids=frozenset([9]))
    assert beams.advance([candidates((1, -1.0), (9, -1.5))]) == [(0, 1)]
    assert [h.has_ended for h in beams.hypotheses()] == [False]


def test_ties_go_to_the_better_beam_and_the_lower_token() -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=5)
    beams = BeamSearch(params, max_tokens=5, ending_ids=frozenset())
    assert beams.advance([candidates((3, -1.0), (5, -1.0), (6, -1.0))]) == [(0, 3), (0, 5)]
    same = candidates((2, -1.0), (4, -1.0), (7, -1.0))
    assert beams.advance([same, same]) == [(0, 2), (0, 4)]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("beam_width", 0),
        ("beam_width", 1025),
        ("beam_width", True),
        ("max_tokens", 0),
        ("max_tokens", None),
        ("ignore_eos", 1),
        ("include_stop_str_in_output", "yes"),
        ("temperature", -1.0),
        ("length_penalty", math.nan),
        ("length_penalty", 11),
        ("length_penalty", "1"),
        ("early_stopping", "always"),
        ("early_stopping", 1),
        ("early_stopping", np.array([True, False])),
    ],
)
def test_bad_parameters_are_named(field: str, value: object) -> None:
    good = {"beam_width": 2, "max_tokens": 4}
    with pytest.raises(InvalidParameterError, match=f"^{field} must be"):
        BeamSearchParams(**{**good, field: value})  # type: ignore[arg-type]


def test_a_temperature_is_not_supported() -> None:
    with pytest.raises(NotSupportedError, match=r"temperature=0\.7"):
        BeamSearchParams(beam_width=2, max_tokens=4, temperature=0.7)
