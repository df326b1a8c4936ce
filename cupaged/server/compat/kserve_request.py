"""A ModelInferRequest as what it asks for: tensors, JSON and request parameters made one.

The tensors are those of Triton's vLLM backend, where sampling parameters are JSON with vLLM's names
and values that may be strings; the TensorRT-LLM backend has a tensor for each instead. Either may
be used, and nothing is ignored: what is not known, or not built, is refused by its name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from cupaged.errors import InvalidParameterError, NotSupportedError, PromptError
from cupaged.sampling_params import SamplingParams
from cupaged.server.compat.kserve_model import OUTPUTS
from cupaged.server.compat.tensors import read_tensors
from cupaged.server.conversions import MAX_TIMEOUT_S, Asked, OutputForm
from cupaged.server.field_paths import PROMPT_NAMES

_SAMPLING = "sampling_parameters"
_ECHO = "exclude_input_in_output"
_MAX_TOKENS = 16  # where nobody says more, as in vLLM
_MAX_ID_CHARS = 1024
_INT32 = 2**31
# Tensors that are parameters, by their names in SamplingParams.
_ONE = {
    "max_tokens": "max_tokens",
    "min_tokens": "min_tokens",
    "num_return_sequences": "n",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "seed": "seed",
}
_LISTS = {"stop_words": "stop", "bad_words": "bad_words"}
# Tensors and parameters that are known: at these values they ask for nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "beam_width": (0, 1),
    "length_penalty": (0, 0.0, 1, 1.0),
    "early_stopping": (0, False),
    "return_log_probs": (False,),
    "return_context_logits": (False,),
    "return_generation_logits": (False,),
    "return_perf_metrics": (False,),
    "best_of": (None, 1),
    "use_beam_search": (False,),
    "lora_name": (None, ""),
    "guided_decoding": (None,),
    "prompt_logprobs": (None,),
    "image": (),
    "embedding_request": (),
    "prompt_embedding_table": (),
    "lora_task_id": (),
    "lora_weights": (),
    "lora_config": (),
    "guided_decoding_guide_type": (),
    "guided_decoding_guide": (),
    "embedding_bias_words": (),
    "embedding_bias_weights": (),
}
_NO_EFFECT = ("pad_id", "binary_data_output", "triton_enable_empty_final_response")
_SEQUENCES: Mapping[str, tuple[Any, ...]] = {
    "sequence_id": (0, ""),
    "sequence_start": (False,),
    "sequence_end": (False,),
}
_PARAMETER_TYPES = {f.name: str(f.type).removesuffix(" | None") for f in fields(SamplingParams)}
_FLAGS = {
    "return_finish_reason": "finish_reason",
    "return_cumulative_logprob": "cumulative_logprob",
    "return_logprobs": "logprobs",
    "return_num_input_tokens": "num_input_tokens",
    "return_num_output_tokens": "num_output_tokens",
}


@dataclass(frozen=True, slots=True)
class InferRequest:
    """What a request asks for, and how it is answered.

    stream: in several answers. echo: the prompt stands before each text. outputs: names of tensors.
    is_raw: the values of tensors are raw bytes.
    """

    asked: Asked
    stream: bool
    echo: bool
    outputs: tuple[str, ...]
    is_raw: bool


def field_path(name: str) -> str:
    """The tensor that an error of the engine is about."""
    if name in PROMPT_NAMES or name.startswith("prompt_token_ids"):
        return "text_input"
    return name


def read_request(request: Any) -> InferRequest:
    """Read a ModelInferRequest.

    Raises:
        PromptError: there is no prompt, or it is not UTF-8.
        InvalidParameterError: a tensor or a parameter is unknown, or has no such value.
        NotSupportedError: it asks for what is known and not built.
    """
    if len(request.id) > _MAX_ID_CHARS:  # every answer carries it
        raise InvalidParameterError("id", len(request.id), f"at most {_MAX_ID_CHARS} characters")
    tensors = read_tensors(request)
    if "text_input" not in tensors:
        raise PromptError("text_input", None, "a tensor of one text")
    prompt = _text("text_input", _only("text_input", tensors.pop("text_input")))
    stream = _switch(tensors, "stream", False)
    excludes = _switch(tensors, _ECHO, stream)
    if stream and not excludes:
        raise InvalidParameterError(_ECHO, False, "true or absent where stream is true")
    told = [name for flag, name in _FLAGS.items() if _switch(tensors, flag, False)]
    given, others = _request_parameters(request)
    if _SAMPLING in tensors:
        text = _text(_SAMPLING, _only(_SAMPLING, tensors.pop(_SAMPLING)))
        given |= _json_parameters(text)
    given |= _tensor_parameters(tensors, given)
    if {"cumulative_logprob", "logprobs"} & {*told}:
        given.setdefault("logprobs", 0)
    return InferRequest(
        asked=Asked(
            prompt=prompt,
            parameters=given,
            form=OutputForm(token_ids=False, echo=not excludes),
            max_tokens=_MAX_TOKENS,
            **others,
        ),
        stream=stream,
        echo=not excludes,
        outputs=_outputs(request, ("text_output", *told)),
        is_raw=bool(request.raw_input_contents),
    )


def _outputs(request: Any, told: tuple[str, ...]) -> tuple[str, ...]:
    """Of the tensors that could be told, those that the request wants: all, if it names none."""
    wanted = [output.name for output in request.outputs]
    for name in wanted:
        if name not in OUTPUTS:
            raise InvalidParameterError("outputs", name, f"one of {', '.join(OUTPUTS)}")
    return tuple(name for name in told if not wanted or name in wanted)


def _request_parameters(request: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Sampling parameters among the request's own, and fields of `Asked`."""
    given: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name, parameter in request.parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        value = None if kind is None else getattr(parameter, kind)
        if name == "priority":
            number = _coerced(name, value, "int")
            if not isinstance(number, int) or not -_INT32 <= number < _INT32:
                raise InvalidParameterError(name, value, f"an integer in [{-_INT32}, {_INT32})")
            others["priority"] = number or None  # 0 is what clients send that want none
        elif name == "timeout":
            microseconds = _coerced(name, value, "int")
            if not isinstance(microseconds, int) or microseconds < 0:
                raise InvalidParameterError(name, value, "microseconds >= 0")
            others["queue_timeout_s"] = min(microseconds, MAX_TIMEOUT_S * 1e6) / 1e6 or None
        elif name == _SAMPLING and isinstance(value, str):
            given |= _json_parameters(value)
        elif name in _SEQUENCES:
            if value not in _SEQUENCES[name]:
                raise NotSupportedError(f"{name}: requests that belong together are not supported")
        else:
            given |= _parameter(name, value)
    return given, others


def _json_parameters(text: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        allowed = f"a JSON object ({str(error)[:80]})"
        raise InvalidParameterError(_SAMPLING, text, allowed) from None
    if not isinstance(values, dict):
        raise InvalidParameterError(_SAMPLING, text, "a JSON object")
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= _parameter(name, value)
    return found


def _tensor_parameters(tensors: dict[str, list[Any]], given: dict[str, Any]) -> dict[str, Any]:
    """The parameters that have tensors of their own; every tensor that is left has to be one."""
    found: dict[str, Any] = {}
    for tensor, values in tensors.items():
        if tensor in _LISTS:
            texts = [_text(f"{tensor}[{i}]", value) for i, value in enumerate(values)]
            parameters: dict[str, Any] = {_LISTS[tensor]: [text for text in texts if text]}
        elif tensor == "end_id":
            token = _only(tensor, values)
            is_id = isinstance(token, int) and token >= 0
            parameters = {"stop_token_ids": [token]} if is_id else {"ignore_eos": True}
        else:
            known = tensor in _NEUTRAL or tensor in _ONE or tensor in _NO_EFFECT
            value = _only(tensor, values) if known and values[1:] == [] else values
            if not known:
                allowed = "tensors that ModelMetadata names"
                raise InvalidParameterError("inputs", tensor, allowed)
            parameters = _parameter(_ONE.get(tensor, tensor), value)
        for name in parameters:
            if name in given or name in found:
                raise InvalidParameterError(tensor, "given", f"absent where {name} is given, too")
        found |= parameters
    return found


def _parameter(name: str, value: Any) -> dict[str, Any]:
    """A parameter by its name in `SamplingParams`; empty if it asks for nothing."""
    if name in _NO_EFFECT:
        return {}
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    if name in _NEUTRAL:
        is_plain = not isinstance(value, list | dict)
        if is_plain and str(value).lower() in {str(v).lower() for v in _NEUTRAL[name]}:
            return {}
        raise NotSupportedError(f"{name} is not supported in this version")
    if name not in _PARAMETER_TYPES:
        allowed = f"one of {', '.join(_PARAMETER_TYPES)}"
        raise InvalidParameterError("parameter", name, allowed)
    elements = value.values() if isinstance(value, dict) else value
    if isinstance(value, list | dict) and any(isinstance(e, list | dict) for e in elements):
        raise InvalidParameterError(name, "lists within it", "a value, or a list or object of them")
    return {name: _coerced(name, value, _PARAMETER_TYPES[name])}


def _coerced(name: str, value: Any, kind: str) -> Any:
    """A text as the value that it says; other values, and texts that say none, as they are."""
    if kind.startswith("Mapping") and isinstance(value, dict):  # keys of JSON are texts
        return {_coerced(name, key, "int"): number for key, number in value.items()}
    if not isinstance(value, str) or kind.startswith("str"):
        return value
    try:
        if kind == "bool":
            return {"true": True, "false": False}[value.strip().lower()]
        if kind == "int":
            return int(value)
        if kind == "float":
            return float(value)
        parsed = json.loads(value)
        return _coerced(name, parsed, kind) if isinstance(parsed, dict) else parsed
    except (KeyError, ValueError, RecursionError):
        return value


def _switch(tensors: dict[str, list[Any]], name: str, default: bool) -> bool:
    if name not in tensors:
        return default
    value = _only(name, tensors.pop(name))
    if not isinstance(value, bool):
        raise InvalidParameterError(name, value, "a tensor of one BOOL")
    return value


def _only(name: str, values: list[Any]) -> Any:
    if len(values) != 1:
        allowed = "a tensor of one element, such as of shape [1] or [1, 1]"
        raise InvalidParameterError(name, f"{len(values)} elements", allowed)
    return values[0]


def _text(name: str, value: Any) -> str:
    if not isinstance(value, bytes):
        raise InvalidParameterError(name, value, "a tensor of BYTES")
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        raise PromptError(name, value, "text in UTF-8") from None
