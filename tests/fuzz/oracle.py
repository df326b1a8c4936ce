"""What a request must give, computed for it alone, in plain Python and without paging.

`cupaged.engine.hash_runner` defines the hashes; here they are applied to a list instead of to
blocks, and the rules of stopping and refusing are written down a second time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cupaged.config import EngineConfig
from cupaged.engine.hash_runner import kv_of, token_of
from cupaged.errors import (
    BadValueError,
    CapacityError,
    ContextLengthError,
    DuplicateRequestError,
    InvalidParameterError,
)
from cupaged.outputs import FinishReason
from cupaged.request import CoreRequest
from tests.fuzz import beam_oracle


@dataclass(frozen=True, slots=True)
class Answer:
    """The tokens of one sample, and why it ends; of one of several beams, the sum of its log
    probabilities."""

    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | None
    cumulative_logprob: float | None = None


def answers(request: CoreRequest, config: EngineConfig) -> list[Answer]:
    """All outputs of a request that the engine accepts."""
    if request.beams is None:
        return [answer(request, i, config) for i in range(request.params.n)]
    return [
        Answer([*f.tokens], "stop" if f.has_ended else "length", None, f.total)
        for f in beam_oracle.found(request, most_tokens(request, config), config)
    ]


def answer(request: CoreRequest, index: int, config: EngineConfig) -> Answer:
    """Sample `index` of a request that the engine accepts."""
    params = request.params
    stops, ending = set(params.stop_token_ids or ()), _ending_ids(request)
    kv: list[int] = []
    for token in request.prompt_token_ids:
        kv.append(kv_of(token, len(kv), kv[-1] if kv else 0))
    output: list[int] = []
    while True:
        seen = np.array(kv, np.uint64)
        token = token_of(seen, config.vocab_size, request.seed, index, len(output))
        while len(output) < params.min_tokens and token in ending:
            token = (token + 1) % config.vocab_size
        output.append(token)
        if len(output) >= params.min_tokens and token in ending:
            return Answer(output, "stop", token if token in stops else None)
        if len(output) == most_tokens(request, config):
            return Answer(output, "length", None)
        kv.append(kv_of(token, len(kv), kv[-1]))


def _ending_ids(request: CoreRequest) -> set[int]:
    eos = () if request.params.ignore_eos else request.eos_token_ids
    return {*(request.params.stop_token_ids or ()), *eos}


def most_tokens(request: CoreRequest, config: EngineConfig) -> int:
    """Output tokens that the limits leave; the last of them is never stored."""
    num_prompt = len(request.prompt_token_ids)
    in_context = config.max_model_len - num_prompt
    in_pool = config.num_blocks * config.block_size - num_prompt + 1
    if request.params.max_tokens is None:
        return min(in_context, in_pool)
    return min(in_context, request.params.max_tokens)


def refusal(request: CoreRequest, config: EngineConfig, held: bool) -> type[BadValueError] | None:
    """The error that `add_request` must raise; `held` says that its id is in use."""
    num_prompt = len(request.prompt_token_ids)
    if held:
        return DuplicateRequestError
    if request.prefix_caching and not config.enable_prefix_caching:
        return InvalidParameterError
    if num_prompt >= config.max_model_len:
        return ContextLengthError
    if request.params.n > config.max_num_seqs:
        return InvalidParameterError
    beams = beam_oracle.refusal(request, most_tokens(request, config), config)
    if beams is InvalidParameterError:
        return beams
    if request.params.min_tokens and len(_ending_ids(request)) >= config.vocab_size:
        return InvalidParameterError
    if num_prompt + most_tokens(request, config) - 1 > config.num_blocks * config.block_size:
        return CapacityError
    if most_tokens(request, config) < 1:
        return CapacityError
    return beams
