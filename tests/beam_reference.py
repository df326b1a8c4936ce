"""Beam search for one prompt, a second time: whole lists, all tokens, nothing shared or cut.

The rules are those of transformers' search: of the continuations of all beams, best first, those
that end count if they are among the first `width`, and the first `width` others go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product

Tokens = tuple[int, ...]
Following = Callable[[Tokens], Iterable[tuple[int, float]]]  # tokens and their log probabilities


@dataclass(frozen=True, slots=True)
class Found:
    """An output, the sum of its log probabilities, and what it is worth."""

    tokens: Tokens
    total: float
    score: float
    has_ended: bool


def search(
    following: Following,
    *,
    width: int,
    max_tokens: int,
    ending: frozenset[int],
    length_penalty: float,
    early_stopping: bool | str,
) -> list[Found]:
    """The outputs, best first."""
    beams: list[tuple[Tokens, float]] = [((), 0.0)]
    found: list[Found] = []
    for length in range(1, max_tokens + 1):
        every = [
            (total + logprob, -place, -token)
            for place, (tokens, total) in enumerate(beams)
            for token, logprob in following(tokens)
        ]
        every.sort(reverse=True)
        goes_on: list[tuple[Tokens, float]] = []
        for position, (total, place, token) in enumerate(every):
            tokens = (*beams[-place][0], -token)
            if -token not in ending and length < max_tokens:
                goes_on.append((tokens, total))
            elif position < width:
                score = total / length**length_penalty
                found.append(Found(tokens, total, score, -token in ending))
        found = sorted(found, key=lambda f: f.score, reverse=True)[:width]
        beams = goes_on[:width]
        if not beams:
            break
        if len(found) == width:
            longest = early_stopping == "never" and length_penalty > 0
            reach = beams[0][1] / (max_tokens if longest else length) ** length_penalty
            if early_stopping is True or reach <= found[-1].score:
                break
    return found


def enumerate_all(
    following: Following, *, max_tokens: int, ending: frozenset[int], length_penalty: float
) -> list[Found]:
    """Every output there is, best first: those that end, and all others of `max_tokens` tokens."""
    tables: dict[Tokens, dict[int, float]] = {}
    vocabulary = [token for token, _ in following(())]
    found = []
    for length in range(1, max_tokens + 1):
        for tokens in product(vocabulary, repeat=length):
            if ending.intersection(tokens[:-1]):
                continue
            if tokens[-1] not in ending and length < max_tokens:
                continue
            total = 0.0
            for i, token in enumerate(tokens):
                if tokens[:i] not in tables:
                    tables[tokens[:i]] = dict(following(tokens[:i]))
                total += tables[tokens[:i]][token]
            found.append(Found(tokens, total, total / length**length_penalty, tokens[-1] in ending))
    return sorted(found, key=lambda f: f.score, reverse=True)
