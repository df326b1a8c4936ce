"""Log probabilities as the float64 reference has them, and what an engine may tell instead."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from cupaged.engine.core import EngineCore
from cupaged.outputs import CoreOutput, TokenAlternatives, TokenLogprobs
from cupaged.request import CoreRequest
from cupaged.sampling_params import SamplingParams
from tests import reference
from tests.tiny_models import TINY, TINY_WIDE_HEAD, hf_config, hf_weights

CLOSE = 1e-4  # in float32, and in another batch
SPECS = {spec.name: spec for spec in (TINY, TINY_WIDE_HEAD)}

F64 = NDArray[np.float64]


@functools.cache
def reference_logprobs(name: str, ids: tuple[int, ...]) -> F64:
    """Log probabilities [len(ids), vocab_size] of what comes after each token."""
    logits = reference.reference_logits(hf_config(SPECS[name]), hf_weights(SPECS[name]), ids)
    logits = logits - logits.max(axis=1, keepdims=True)
    result: F64 = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return result


def check_position(told: TokenLogprobs, row: F64, token: int, count: int) -> None:
    """One position: the token that stands there, then the `count` likeliest."""
    assert told.token_ids[0] == token
    assert len(told.token_ids) == len(told.logprobs) == len(told.ranks) == 1 + count
    np.testing.assert_allclose(told.logprobs, row[told.token_ids], rtol=0, atol=CLOSE)
    above, near = (row > row[token] + CLOSE).sum(), (row >= row[token] - CLOSE).sum()
    assert above + 1 <= told.ranks[0] <= near
    likeliest = np.sort(row)[::-1][:count]
    np.testing.assert_allclose(told.logprobs[1:], likeliest, rtol=0, atol=CLOSE)
    assert len({*told.token_ids[1:]}) == count
    assert told.ranks[1:] == [*range(1, count + 1)]


def check_prompt(name: str, told: Sequence[TokenLogprobs], ids: Sequence[int], count: int) -> None:
    """Every prompt token but the first."""
    assert len(told) == len(ids) - 1
    rows = reference_logprobs(name, tuple(ids))
    for position, row, token in zip(told, rows, ids[1:], strict=False):
        check_position(position, row, token, count)


def check_output(
    name: str, told: Sequence[TokenLogprobs], prompt: Sequence[int], output: Sequence[int], n: int
) -> None:
    """Every token of an output."""
    rows = reference_logprobs(name, (*prompt, *output))[len(prompt) - 1 :]
    assert len(told) == len(output)
    for position, row, token in zip(told, rows, output, strict=False):
        check_position(position, row, token, n)


def as_told(position: TokenAlternatives, count: int) -> TokenLogprobs:
    """What a user sees, with a first token that is among the likeliest told twice again."""
    first, *likeliest = [
        (token, entry.logprob, entry.rank or 0) for token, entry in position.items()
    ]
    if first[2] <= count:
        likeliest = sorted([first, *likeliest], key=lambda entry: entry[2])
    ids, logprobs, ranks = zip(first, *likeliest, strict=True)
    return TokenLogprobs([*ids], [*logprobs], [*ranks])


class Collected:
    """The outputs of a core, put together by request and sample."""

    def __init__(self) -> None:
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.logprobs: dict[tuple[str, int], list[TokenLogprobs]] = {}
        self.prompt_logprobs: dict[str, list[TokenLogprobs]] = {}
        self.reasons: dict[tuple[str, int], str] = {}

    def add(self, output: CoreOutput) -> None:
        """Note an output; prompt logprobs come once a request, with its first tokens."""
        key = (output.request_id, output.index)
        if output.prompt_logprobs:
            assert output.request_id not in self.prompt_logprobs
            assert not any(request_id == output.request_id for request_id, _ in self.tokens)
            self.prompt_logprobs[output.request_id] = [*output.prompt_logprobs]
        self.tokens.setdefault(key, []).extend(output.new_token_ids)
        if output.logprobs is not None:
            assert len(output.logprobs) == len(output.new_token_ids)
            self.logprobs.setdefault(key, []).extend(output.logprobs)
        if output.finish_reason is not None:
            self.reasons[key] = output.finish_reason


def run(core: EngineCore, *requests: CoreRequest) -> Collected:
    """Everything that the core gives until nothing is left."""
    for each in requests:
        core.add_request(each)
    collected = Collected()
    while core.has_unfinished_requests:
        for output in core.step():
            collected.add(output)
        core.audit()
    assert core.stats().num_used_blocks == 0
    return collected


def ask(name: str, prompt: Sequence[int], *, seed: int = 0, **params: object) -> CoreRequest:
    """A greedy request of one token, changed by `params`."""
    fields: dict[str, object] = {"temperature": 0, "max_tokens": 1, "ignore_eos": True, **params}
    request = CoreRequest(name, tuple(prompt), SamplingParams(**fields))  # type: ignore[arg-type]
    return replace(request, seed=seed)
