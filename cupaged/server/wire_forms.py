"""Requests, outputs, statistics and facts of the engine as plain values, and back.

Both ends use these functions, so the order of fields is written down once. What is at its default
is left out: an output of one token and nothing else costs two integers and a list.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from cupaged.config import EngineConfig
from cupaged.outputs import CoreOutput, EngineStats, TokenLogprobs
from cupaged.request import CoreRequest
from cupaged.sampling_params import BeamSearchParams, SamplingParams
from cupaged.server.wire import WireError

Row = list[Any]  # [index, new token ids, None or a mapping of what else there is]

_PARAMS = SamplingParams()
_PARAM_DEFAULTS = tuple((name, getattr(_PARAMS, name)) for name in SamplingParams.field_names())
_REQUEST_FIELDS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What a front end knows of the engine: enough to check requests and to describe the model.

    Args:
        version: of cupaged.
        model: the model as it was named; model_path: its folder or file.
        config: the limits of the engine, with which `check_request` works.
        eos_token_ids: ids that end a sequence.
        generation_defaults: fields of `SamplingParams` for requests that leave them out.
        has_priorities: whether the scheduling policy looks at the priorities of requests.
        seed: draws the seeds of requests that bring none.
        device, device_description: e.g. "cuda" and the GPU's name.
        dtype: the type that the device computes in.
        runner: "model" or "null".
        pid: of the engine's process.
        load_seconds: how long loading took.
    """

    version: str
    model: str
    model_path: str
    architecture: str
    num_parameters: int
    config: EngineConfig
    eos_token_ids: tuple[int, ...] = ()
    generation_defaults: Mapping[str, Any]
    has_priorities: bool = False
    seed: int = 0
    device: str
    device_description: str
    dtype: str
    runner: str = "model"
    pid: int = 0
    load_seconds: float = 0.0

    def to_wire(self) -> dict[str, Any]:
        """As plain values."""
        form = _to_mapping(self)
        return form | {"config": _to_mapping(self.config), "eos_token_ids": [*self.eos_token_ids]}

    @classmethod
    def from_wire(cls, form: dict[str, Any]) -> EngineInfo:
        """Back from plain values.

        Raises:
            WireError: a field is missing, unknown or out of range.
        """
        try:
            rest = {"eos_token_ids": tuple(form["eos_token_ids"])}
            return cls(**{**form, **rest, "config": EngineConfig(**form["config"])})
        except (TypeError, KeyError, ValueError) as error:
            raise WireError(f"facts of the engine that cannot be read: {error}") from None


def request_to_wire(request: CoreRequest) -> list[Any]:
    """The fields of a request in order; of its parameters only what is not at its default."""
    params, beams = request.params, request.beams
    given = {
        name: value
        for name, default in _PARAM_DEFAULTS
        if (value := getattr(params, name)) != default
    }
    return [
        request.request_id,
        request.prompt_token_ids,
        given,
        request.eos_token_ids,
        request.seed,
        request.priority,
        request.bad_words_token_ids,
        request.prefix_caching,
        request.cache_salt,
        None if beams is None else _to_mapping(beams),
    ]


def request_from_wire(form: list[Any]) -> CoreRequest:
    """The request again.

    Raises:
        WireError: it is not what `request_to_wire` makes.
        InvalidParameterError, NotSupportedError: a parameter is refused.
    """
    if not isinstance(form, list) or len(form) != _REQUEST_FIELDS or not isinstance(form[2], dict):
        raise WireError("a request that is not an array of its fields")
    request_id, prompt, given, eos_token_ids, seed, priority, bad_words = form[:7]
    prefix_caching, cache_salt, beams = form[7:]
    try:
        params = SamplingParams(**given)
        words = tuple(tuple(word) for word in bad_words)
        return CoreRequest(
            request_id, tuple(prompt), params, tuple(eos_token_ids), seed, priority, words,
            prefix_caching, cache_salt, None if beams is None else BeamSearchParams(**beams),
        )  # fmt: skip
    except TypeError as error:
        raise WireError(f"a request whose fields cannot be read: {error}") from None


def more_to_wire(
    output: CoreOutput, *, is_first: bool, had_preemptions: int
) -> dict[str, Any] | None:
    """What an output tells beside its tokens, None for nothing.

    Args:
        is_first: the request's first output, which tells when it was scheduled and what of its
            prompt was cached.
        had_preemptions: the number of the request's preemptions that its reader knows.
    """
    more: dict[str, Any] = {}
    if is_first:
        more["first_scheduled_time"] = output.first_scheduled_time
        if output.num_cached_tokens:
            more["num_cached_tokens"] = output.num_cached_tokens
    if output.num_preemptions != had_preemptions:
        more["num_preemptions"] = output.num_preemptions
    if output.finish_reason is not None:
        more["finish_reason"] = output.finish_reason
        if output.stop_reason is not None:
            more["stop_reason"] = output.stop_reason
    if output.logprobs is not None:
        more["logprobs"] = _positions_to_wire(output.logprobs)
    if output.prompt_logprobs:
        more["prompt_logprobs"] = _positions_to_wire(output.prompt_logprobs)
    return more or None


def logprobs_from_wire(form: list[list[Any]]) -> list[TokenLogprobs]:
    """Positions with their tokens, log probabilities and ranks."""
    return [TokenLogprobs(*position) for position in form]


def stats_to_wire(stats: EngineStats) -> dict[str, Any]:
    """A snapshot of the engine as a mapping."""
    return _to_mapping(stats)


def stats_from_wire(form: dict[str, Any]) -> EngineStats:
    """The snapshot again.

    Raises:
        WireError: a field is missing or unknown.
    """
    try:
        return EngineStats(**form)
    except TypeError as error:
        raise WireError(f"statistics that cannot be read: {error}") from None


def _positions_to_wire(positions: Iterable[TokenLogprobs]) -> list[list[Any]]:
    return [[p.token_ids, p.logprobs, p.ranks] for p in positions]


def _to_mapping(instance: Any) -> dict[str, Any]:
    return {field.name: getattr(instance, field.name) for field in fields(instance)}
