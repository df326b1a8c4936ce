"""The door of the engine core: a request is served or refused here, before memory is taken.

Everything that needs the model's vocabulary, the context or the pool is checked in this one place;
what a parameter may be by itself is checked when `SamplingParams` is made.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

import numpy as np
from numpy.typing import NDArray

from cupaged.config import EngineConfig
from cupaged.errors import (
    CapacityError,
    ContextLengthError,
    DuplicateRequestError,
    InvalidParameterError,
    PromptError,
)
from cupaged.request import CoreRequest
from cupaged.sampling_params import BeamSearchParams, SamplingParams

MAX_SALT_BYTES = 256  # of `CoreRequest.cache_salt` as UTF-8


def check_request(request: CoreRequest, config: EngineConfig, unfinished: Container[str]) -> int:
    """Refuse what cannot be served.

    Args:
        unfinished: ids that are in use.

    Returns:
        The most tokens that may be generated.

    Raises:
        PromptError, InvalidParameterError, CapacityError: see `EngineCore.add_request`.
    """
    params = request.params
    if not isinstance(request.request_id, str):
        raise InvalidParameterError("request_id", request.request_id, "a string")
    if request.request_id in unfinished:
        raise DuplicateRequestError(
            "request_id", request.request_id, "different from all unfinished requests"
        )
    if not isinstance(params, SamplingParams):
        raise InvalidParameterError("params", params, "a SamplingParams")
    _check_integer("seed", request.seed, 0, 2**64 - 1)
    _check_integer("priority", request.priority, -(2**63), 2**63 - 1)
    _check_caching(request, config)
    prompt = _checked_prompt(request.prompt_token_ids, config.vocab_size)
    if len(prompt) >= config.max_model_len:
        raise ContextLengthError(
            "prompt length in tokens",
            len(prompt),
            f"at most {config.max_model_len - 1} (max_model_len={config.max_model_len} less "
            "one token of output)",
        )
    _check_ids(request, config.vocab_size)
    if request.beams is not None:
        _check_beams(request, request.beams, config)
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(params, name)
        if (
            count is not None
            and (config.vocab_size if count == -1 else count) > config.max_logprobs
        ):
            raise InvalidParameterError(name, count, f"at most max_logprobs={config.max_logprobs}")
    if params.n > config.max_num_seqs:
        raise InvalidParameterError("n", params.n, f"at most max_num_seqs={config.max_num_seqs}")
    max_tokens = _max_tokens(len(prompt), params.max_tokens, config)
    if request.beams is not None and max_tokens > 1:
        _check_room_for_beams(len(prompt), max_tokens, params.n, config)
    return max_tokens


def _check_beams(request: CoreRequest, beams: BeamSearchParams, config: EngineConfig) -> None:
    """A width for which there are slots, reports and, at the first position, tokens enough."""
    if not isinstance(beams, BeamSearchParams):
        raise InvalidParameterError("beams", beams, "None or a BeamSearchParams")
    if request.params != beams.sampling_params(request.eos_token_ids):
        raise InvalidParameterError("params", request.params, "what its beams ask for")
    width, num_told = beams.beam_width, request.params.logprobs or 0
    num_ending = 0 if beams.ignore_eos else len(set(request.eos_token_ids))
    for most, what in (
        (config.max_num_seqs, f"max_num_seqs={config.max_num_seqs}"),
        (
            config.max_logprobs // (num_told // width),
            f"max_logprobs={config.max_logprobs} / {num_told // width}, since "
            f"{num_told // width} candidates a beam are compared",
        ),
        (config.vocab_size - num_ending, "the tokens that do not end an output"),
    ):
        if width > most:
            raise InvalidParameterError("beam_width", width, f"at most {most} ({what})")


def _check_room_for_beams(
    prompt_length: int, max_tokens: int, width: int, config: EngineConfig
) -> None:
    """Beams share the full blocks of the prompt; of all others each may need its own."""
    size = config.block_size
    shared = prompt_length // size
    own = -(-(prompt_length + max_tokens - 1) // size) - shared
    if shared + width * own > config.num_blocks:
        raise CapacityError(
            "beam_width",
            width,
            f"at most {(config.num_blocks - shared) // own} for a prompt of {prompt_length} and "
            f"max_tokens={max_tokens}: the KV pool has {config.num_blocks} blocks of {size} tokens",
        )


def _max_tokens(prompt_length: int, asked: int | None, config: EngineConfig) -> int:
    """What context and pool leave; more than the pool has is refused, not cut."""
    room = config.max_model_len - prompt_length
    pool = config.num_blocks * config.block_size
    # The last token of a sequence is drawn but never computed: it needs no slot.
    fitting = pool - prompt_length + 1
    in_pool = f"the KV pool has {config.num_blocks} blocks of {config.block_size} tokens"
    if fitting < 1:
        raise CapacityError("prompt length in tokens", prompt_length, f"at most {pool}: {in_pool}")
    if asked is None:
        return min(room, fitting)
    if min(asked, room) > fitting:
        allowed = f"at most {fitting} for a prompt of {prompt_length} tokens: {in_pool}"
        raise CapacityError("max_tokens", asked, allowed)
    return min(asked, room)


def _check_ids(request: CoreRequest, vocab_size: int) -> None:
    """Every list of token ids of a request but its prompt."""
    params = request.params
    lists: list[tuple[str, Iterable[int]]] = [
        ("stop_token_ids", params.stop_ids),
        ("eos_token_ids", request.eos_token_ids),
        ("logit_bias", params.logit_bias or ()),
        ("allowed_token_ids", params.allowed_token_ids or ()),
        ("trace_decode_token_ids", params.trace_decode_token_ids or ()),
        *(("bad_words_token_ids", word) for word in request.bad_words_token_ids),
    ]
    for name, ids in lists:
        for i, token in enumerate(ids):
            if not 0 <= token < vocab_size:
                place = "logit_bias key" if name == "logit_bias" else f"{name}[{i}]"
                raise InvalidParameterError(place, token, f"in [0, {vocab_size})")
    if not all(request.bad_words_token_ids):
        raise InvalidParameterError("bad_words_token_ids", (), "lists of at least one token id")
    ending = {*params.stop_ids, *(() if params.ignore_eos else request.eos_token_ids)}
    ending = ending if params.min_tokens else set()
    banned = {word[0] for word in request.bad_words_token_ids if len(word) == 1}
    if not params.allowed_token_ids and len(ending) + len(banned) < vocab_size:
        return
    drawable = set(params.allowed_token_ids or range(vocab_size))
    if drawable <= ending:
        raise InvalidParameterError(
            "min_tokens", params.min_tokens, "0 when every token that may be drawn ends the output"
        )
    if drawable <= banned | ending:
        raise InvalidParameterError("bad_words", params.bad_words, "not all tokens there are")


def _check_caching(request: CoreRequest, config: EngineConfig) -> None:
    wanted, salt = request.prefix_caching, request.cache_salt
    allowed = (None, False, True) if config.enable_prefix_caching else (None, False)
    if not any(wanted is value for value in allowed):
        raise InvalidParameterError(
            "prefix_caching",
            wanted,
            f"one of {allowed}: enable_prefix_caching={config.enable_prefix_caching}",
        )
    if salt is None:
        return
    if not isinstance(salt, str) or len(salt.encode("utf-8", "surrogatepass")) > MAX_SALT_BYTES:
        raise InvalidParameterError("cache_salt", salt, f"a text of at most {MAX_SALT_BYTES} bytes")


def _check_integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidParameterError(name, value, f"an integer in [{low}, {high}]")


def _checked_prompt(token_ids: Iterable[int], vocab_size: int) -> NDArray[np.int64]:
    """The prompt as an array; PromptError unless it is integers inside the vocabulary."""
    try:
        prompt = np.array(token_ids)
    except ValueError:  # lists of unequal lengths
        prompt = np.array(None)
    if prompt.ndim == 1 and not len(prompt):
        raise PromptError("prompt", [], "at least one token")
    if prompt.ndim != 1 or prompt.dtype.kind != "i":
        raise PromptError("prompt_token_ids", token_ids, f"integers in [0, {vocab_size})")
    outside = np.flatnonzero((prompt < 0) | (prompt >= vocab_size))
    if outside.size:
        position = int(outside[0])
        raise PromptError(
            f"prompt_token_ids[{position}]", int(prompt[position]), f"in [0, {vocab_size})"
        )
    return prompt
