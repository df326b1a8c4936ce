"""What a request of beams must give, and requests of beams for traces.

The search is that of `tests.beam_reference`, on the log probabilities of a context that is written
down as a list, without paging.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np

from cupaged.config import EngineConfig
from cupaged.engine.hash_runner import kv_of, logprobs_of
from cupaged.errors import BadValueError, CapacityError, InvalidParameterError
from cupaged.request import CoreRequest
from cupaged.sampling_params import BeamSearchParams
from tests.beam_reference import Found, Tokens, search


class Contexts:
    """The "model" after any output tokens of a request: its likeliest tokens."""

    def __init__(self, prompt: Tokens, vocab_size: int) -> None:
        kv: list[int] = []
        for token in prompt:
            kv.append(kv_of(token, len(kv), kv[-1] if kv else 0))
        self._kv: dict[Tokens, list[int]] = {(): kv}
        self._vocab_size = vocab_size

    def logprobs(self, tokens: Tokens) -> list[float]:
        """Of all tokens after these."""
        kv = np.array(self._kv_after(tokens), np.uint64)
        logprobs: list[float] = logprobs_of(kv, self._vocab_size).tolist()
        return logprobs

    def likeliest(self, tokens: Tokens, count: int) -> list[tuple[int, float]]:
        """Tokens and their log probabilities, equal ones by token id."""
        logprobs = self.logprobs(tokens)
        ranked = np.lexsort((np.arange(self._vocab_size), np.negative(logprobs)))
        return [(token, logprobs[token]) for token in ranked[:count].tolist()]

    def _kv_after(self, tokens: Tokens) -> list[int]:
        if tokens not in self._kv:
            before = self._kv_after(tokens[:-1])
            self._kv[tokens] = [*before, kv_of(tokens[-1], len(before), before[-1])]
        return self._kv[tokens]


def found(request: CoreRequest, max_tokens: int, config: EngineConfig) -> list[Found]:
    """The outputs of a request of beams that the engine accepts, best first."""
    beams = request.beams
    assert beams is not None
    ending = frozenset(() if beams.ignore_eos else request.eos_token_ids)
    contexts = Contexts(request.prompt_token_ids, config.vocab_size)
    count = (2 + len(ending)) * beams.beam_width  # more than can matter
    return search(
        lambda tokens: contexts.likeliest(tokens, count),
        width=beams.beam_width,
        max_tokens=max_tokens,
        ending=ending,
        length_penalty=beams.length_penalty,
        early_stopping=beams.early_stopping,
    )


def refusal(
    request: CoreRequest, max_tokens: int, config: EngineConfig
) -> type[BadValueError] | None:
    """The error for beams which there is no room for, though there is for one sequence."""
    beams = request.beams
    if beams is None:
        return None
    num_ending = 0 if beams.ignore_eos else len(set(request.eos_token_ids))
    if beams.beam_width > min(config.max_num_seqs, config.vocab_size - num_ending):
        return InvalidParameterError
    if beams.beam_width * max(2, 1 + num_ending) > config.max_logprobs:
        return InvalidParameterError
    return CapacityError if _num_blocks(request, max_tokens, config) > config.num_blocks else None


def num_blocks(request: CoreRequest, config: EngineConfig) -> int:
    """Blocks with which a request is not refused, whatever `max_model_len` says."""
    return max(1, _num_blocks(request, request.params.max_tokens or 1, config))


def _num_blocks(request: CoreRequest, max_tokens: int, config: EngineConfig) -> int:
    """A block for each `block_size` tokens of each sequence, but for the prompt's full ones."""
    prompt, size = len(request.prompt_token_ids), config.block_size
    width = 1 if request.beams is None or max_tokens == 1 else request.beams.beam_width
    blocks = {
        (beam if position >= prompt // size * size else 0, position // size)
        for beam in range(width)
        for position in range(prompt + max_tokens - 1)
    }
    return len(blocks)


def draw_beams(random: Random) -> BeamSearchParams:
    """Any kind of search."""
    return BeamSearchParams(
        beam_width=random.choice((1, 2, 2, 3, 4, 5)),
        max_tokens=random.choice((1, 2, 5, 9, 14)),
        ignore_eos=random.random() < 0.2,
        length_penalty=random.choice((1.0, 1.0, 0.0, 0.6, -1.0, 2.0)),
        early_stopping=random.choice((False, True, "never")),
    )


def with_beams(
    random: Random, request: CoreRequest, beams: BeamSearchParams, config: EngineConfig
) -> CoreRequest:
    """The request, searched; often with an EOS that stands in one of its likeliest outputs."""
    contexts = Contexts(request.prompt_token_ids, config.vocab_size)
    eos: set[int] = set()
    for _ in range(random.choice((0, 1, 1, 2))):
        tokens: Tokens = ()
        for _ in range(random.randint(1, 3)):
            tokens += (random.choice(contexts.likeliest(tokens, 3))[0],)
        eos.add(tokens[-1])
    eos_token_ids = tuple(sorted(eos))
    return replace(
        request,
        beams=beams,
        params=beams.sampling_params(eos_token_ids),
        eos_token_ids=eos_token_ids,
    )
