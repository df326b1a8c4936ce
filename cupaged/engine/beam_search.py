"""Beam search over candidates: which beams go on, which hypotheses are finished, when it ends.

It knows log probabilities and token ids, and neither sequences nor blocks nor models. Rules and
names are those of transformers' search: among the best candidates of all beams, those that end are
finished hypotheses if they stand among the first `beam_width`, and the best others go on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cupaged.outputs import TokenLogprobs
from cupaged.sampling_params import BeamSearchParams


class Candidate(NamedTuple):
    """A token that may follow a beam: its log probability and its rank there, 1 the likeliest."""

    token_id: int
    logprob: float
    rank: int


class Continuation(NamedTuple):
    """The beam at place `beam` goes on with a token."""

    beam: int
    token_id: int


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """Tokens after the prompt, and the sum of their log probabilities.

    has_ended: its last token is one that ends the output.
    """

    tokens: tuple[Candidate, ...] = ()
    cumulative_logprob: float = 0.0
    has_ended: bool = False

    def score(self, length_penalty: float) -> float:
        """Sum over length ** length_penalty; the length counts all tokens here, an ending one too.

        Not for a hypothesis without tokens.
        """
        return self.cumulative_logprob / math.pow(len(self.tokens), length_penalty)


class BeamSearch:
    """The search for one prompt. It begins with one beam that has no tokens.

    Args:
        params: width, length penalty, early stopping.
        max_tokens: with so many tokens every hypothesis is finished.
        ending_ids: tokens that end a hypothesis.

    `live` are the beams to be continued, best first; empty when the search has ended.
    """

    def __init__(
        self, params: BeamSearchParams, *, max_tokens: int, ending_ids: frozenset[int]
    ) -> None:
        self.live = [Hypothesis()]
        self._finished: list[Hypothesis] = []  # best first
        self._width = params.beam_width
        self._num_kept = params.num_candidates(len(ending_ids))
        self._length_penalty = params.length_penalty
        self._early_stopping = params.early_stopping
        self._max_tokens = max_tokens
        self._ending_ids = ending_ids
        self._length = 0  # tokens of each live beam

    def advance(self, candidates: Sequence[Sequence[Candidate]]) -> list[Continuation]:
        """Choose among the candidates of the live beams, in their order.

        Each beam needs its `BeamSearchParams.num_candidates` likeliest tokens. Of equal candidates
        those of the better beam come first, then those of the lower token id.

        Returns:
            What the new `live` beams are made of, best first; empty when the search has ended.
        """
        ranked = sorted(
            (-(beam.cumulative_logprob + candidate.logprob), place, candidate)
            for place, (beam, following) in enumerate(zip(self.live, candidates, strict=True))
            for candidate in following
        )
        self._length += 1
        live: list[Hypothesis] = []
        chosen: list[Continuation] = []
        for rank, (negated, place, candidate) in enumerate(ranked[: self._num_kept]):
            tokens = (*self.live[place].tokens, candidate)
            has_ended = candidate.token_id in self._ending_ids
            if has_ended or self._length == self._max_tokens:
                if rank < self._width:
                    self._finished.append(Hypothesis(tokens, -negated, has_ended))
            elif len(live) < self._width:
                live.append(Hypothesis(tokens, -negated))
                chosen.append(Continuation(place, candidate.token_id))
        self._finished = self._best(self._finished)
        self.live = live
        if live and self._is_over():
            self.live, chosen = [], []
        return chosen

    def hypotheses(self) -> list[Hypothesis]:
        """The best `beam_width` by score; while the search goes on, live beams are among them."""
        return self._best([*self._finished, *(beam for beam in self.live if beam.tokens)])

    def _best(self, hypotheses: list[Hypothesis]) -> list[Hypothesis]:
        """Of equal scores the earlier ones."""
        hypotheses.sort(key=lambda h: -h.score(self._length_penalty))
        return hypotheses[: self._width]

    def _is_over(self) -> bool:
        """True when enough is finished and, unless early stopping asks no more, when the best live
        beam cannot become better than the worst of that.

        What a beam can reach is estimated: its probability stays, and its length is the present one
        or, with "never" and a penalty for which longer is better, the greatest.
        """
        if len(self._finished) < self._width:
            return False
        if self._early_stopping is True:
            return True
        reaches_end = self._early_stopping == "never" and self._length_penalty > 0
        length = self._max_tokens if reaches_end else self._length
        reachable = self.live[0].cumulative_logprob / math.pow(length, self._length_penalty)
        return reachable <= self._finished[-1].score(self._length_penalty)


def candidates_of(told: TokenLogprobs) -> list[Candidate]:
    """The likeliest tokens of a report, without the drawn one that stands before them."""
    return list(map(Candidate, told.token_ids[1:], told.logprobs[1:], told.ranks[1:]))
