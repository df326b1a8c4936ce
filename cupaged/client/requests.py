"""Requests as Python programs write them, made into messages: one table maps every name.

Names of sampling parameters are those of `SamplingParams`. Values are checked for their types only;
what a value may be is for the server to say, which answers with the path of the field.
"""

from __future__ import annotations

import difflib
import numbers
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypedDict, TypeVar

from google.protobuf.message import Message

from cupaged.errors import InvalidParameterError, NotSupportedError
from cupaged.v1 import generation_pb2 as pb

Prompt = str | Sequence[int] | Mapping[str, Any]
Messages = Sequence[Mapping[str, str]]
_M = TypeVar("_M", bound=Message)
_R = TypeVar("_R", pb.GenerateRequest, pb.GenerateStreamRequest)


class GenerateOptions(TypedDict, total=False):
    """What a request may hold beside its prompt; what is absent or None, the server chooses.

    The sampling parameters mean what they mean in `SamplingParams`. Besides:

    - return_token_ids: False leaves the token ids out of the answer;
    - echo: the answer has the prompt as the model got it;
    - priority: lower is served earlier, where the server schedules by priority;
    - queue_timeout_s: longest wait in the server's queue, else QueueTimeoutError;
    - cache_salt: cached prefixes are shared only among requests with equal salts.
    """

    n: int | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    max_tokens: int | None
    min_tokens: int | None
    logprobs: int | None
    prompt_logprobs: int | None
    detokenize: bool | None
    skip_special_tokens: bool | None
    spaces_between_special_tokens: bool | None
    include_stop_str_in_output: bool | None
    logit_bias: Mapping[int, float] | None
    allowed_token_ids: Sequence[int] | None
    bad_words: Sequence[str] | None
    trace_decode_token_ids: Sequence[int] | None
    return_token_ids: bool | None
    echo: bool | None
    priority: int | None
    queue_timeout_s: float | None
    cache_salt: str | None


class StreamOptions(GenerateOptions, total=False):
    """GenerateOptions, and how often a stream's messages are sent.

    - stream_interval_tokens: that many tokens of a sample are sent together;
    - stream_interval_s: longest time that they wait for it.
    """

    stream_interval_tokens: int | None
    stream_interval_s: float | None


class _Field(NamedTuple):
    """Where a parameter goes: a path in the message, and how its value is written there."""

    path: str
    write: Callable[[Any, str, Any], None]
    allowed: str


def _scalar(message: Any, name: str, value: Any) -> None:
    if isinstance(value, bool):
        raise TypeError
    setattr(message, name, value)


def _flag(message: Any, name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError
    setattr(message, name, value)


def _seed(message: Any, name: str, value: Any) -> None:
    if value != -1:  # as in SamplingParams: none
        _scalar(message, name, value)


def _several(message: Any, name: str, value: Any) -> None:
    if isinstance(value, str | bytes) or any(isinstance(item, bool) for item in value):
        raise TypeError
    getattr(message, name).extend(value)


def _at_least_one(message: Any, name: str, value: Any) -> None:
    if not len(value):
        raise ValueError
    _several(message, name, value)


def _stop(message: Any, name: str, value: Any) -> None:
    _several(message, name, [value] if isinstance(value, str) else value)


def _mapping(message: Any, name: str, value: Any) -> None:
    getattr(message, name).update(value)


def _duration(message: Any, name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError
    getattr(message, name).FromTimedelta(timedelta(seconds=float(value)))


_NUMBER, _INT32 = "a number", "an integer of 32 bits"
_YES_NO = "True or False"
_IDS, _TEXTS = "a list of token ids", "a list of strings of UTF-8 text"
FIELDS: dict[str, _Field] = {
    "n": _Field("sampling.n", _scalar, _INT32),
    "presence_penalty": _Field("sampling.presence_penalty", _scalar, _NUMBER),
    "frequency_penalty": _Field("sampling.frequency_penalty", _scalar, _NUMBER),
    "repetition_penalty": _Field("sampling.repetition_penalty", _scalar, _NUMBER),
    "temperature": _Field("sampling.temperature", _scalar, _NUMBER),
    "top_p": _Field("sampling.top_p", _scalar, _NUMBER),
    "top_k": _Field("sampling.top_k", _scalar, _INT32),
    "min_p": _Field("sampling.min_p", _scalar, _NUMBER),
    "seed": _Field("sampling.seed", _seed, "an integer in [-1, 2**64)"),
    "logit_bias": _Field("sampling.logit_bias", _mapping, "a mapping of token ids to numbers"),
    "allowed_token_ids": _Field("sampling.allowed_token_ids", _at_least_one, f"{_IDS}, not empty"),
    "bad_words": _Field("sampling.bad_words", _several, _TEXTS),
    "trace_decode_token_ids": _Field("sampling.trace_decode_token_ids", _several, _IDS),
    "max_tokens": _Field("stopping.max_new_tokens", _scalar, _INT32),
    "min_tokens": _Field("stopping.min_new_tokens", _scalar, _INT32),
    "stop": _Field("stopping.stop", _stop, f"a string, or {_TEXTS}"),
    "stop_token_ids": _Field("stopping.stop_token_ids", _several, _IDS),
    "ignore_eos": _Field("stopping.ignore_eos", _flag, _YES_NO),
    "include_stop_str_in_output": _Field("stopping.include_stop_str_in_output", _flag, _YES_NO),
    "logprobs": _Field("output.logprobs", _scalar, _INT32),
    "prompt_logprobs": _Field("output.prompt_logprobs", _scalar, _INT32),
    "detokenize": _Field("output.detokenize", _flag, _YES_NO),
    "skip_special_tokens": _Field("output.skip_special_tokens", _flag, _YES_NO),
    "spaces_between_special_tokens": _Field("output.spaces_between_special_tokens", _flag, _YES_NO),
    "return_token_ids": _Field("output.token_ids", _flag, _YES_NO),
    "echo": _Field("output.echo", _flag, _YES_NO),
    "priority": _Field("priority", _scalar, _INT32),
    "queue_timeout_s": _Field("queue_timeout", _duration, "a number of seconds"),
    "cache_salt": _Field("cache_salt", _scalar, "UTF-8 text"),
}
STREAM_FIELDS: dict[str, _Field] = {
    **FIELDS,
    "stream_interval_tokens": _Field("stream.interval_tokens", _scalar, _INT32),
    "stream_interval_s": _Field("stream.interval", _duration, "a number of seconds"),
}
_NOT_BUILT = ("structured_outputs",)
_MODEL = _Field("model", _scalar, "UTF-8 text")
_TEXT = _Field("text", _scalar, "UTF-8 text")


def generation_request(
    request: _R,
    model: str,
    request_id: str,
    options: Mapping[str, Any],
    *,
    prompt: Prompt | None = None,
    messages: Messages | None = None,
) -> _R:
    """Fill an empty request and return it.

    Args:
        options: of GenerateOptions; for a stream, of StreamOptions.
        prompt, messages: exactly one of them: a text, token ids, `{"prompt": ...}` or
            `{"prompt_token_ids": ...}`; or a chat.

    Raises:
        InvalidParameterError: a value of the wrong type, or an unknown name.
        NotSupportedError: a name that is known and not built.
    """
    fields = STREAM_FIELDS if isinstance(request, pb.GenerateStreamRequest) else FIELDS
    request.request_id = request_id
    for_model(request, model)
    if messages is None:
        _set_prompt(request, prompt)
    else:
        request.chat.CopyFrom(chat(messages))
    for name, value in options.items():
        if name not in fields:
            _refuse(name, value, fields)
        elif value is not None:
            _set(request, name, fields[name], value)
    return request


def tokenize_request(
    prompt: str | Messages, model: str, add_special_tokens: bool | None
) -> pb.TokenizeRequest:
    """A text or a chat to make token ids of; errors as of `generation_request`."""
    request = for_model(pb.TokenizeRequest(), model)
    if isinstance(prompt, str):
        _set(request, "prompt", _TEXT, prompt)
    else:
        request.chat.CopyFrom(chat(prompt))
    if add_special_tokens is not None:
        field = _Field("add_special_tokens", _flag, _YES_NO)
        _set(request, "add_special_tokens", field, add_special_tokens)
    return request


def detokenize_request(
    token_ids: Sequence[int], model: str, skip_special_tokens: bool
) -> pb.DetokenizeRequest:
    """Token ids to make a text of; errors as of `generation_request`."""
    request = for_model(pb.DetokenizeRequest(), model)
    _set(request, "token_ids", _Field("token_ids", _several, _IDS), token_ids)
    field = _Field("skip_special_tokens", _flag, _YES_NO)
    _set(request, "skip_special_tokens", field, skip_special_tokens)
    return request


def chat_template_request(messages: Messages, model: str) -> pb.ApplyChatTemplateRequest:
    """A chat to render; errors as of `generation_request`."""
    request = for_model(pb.ApplyChatTemplateRequest(), model)
    request.chat.CopyFrom(chat(messages))
    return request


def for_model(request: _M, model: str) -> _M:
    """The request, with the name of its model; "" is the only one that the server has."""
    _set(request, "model", _MODEL, model)
    return request


def chat(messages: Messages) -> pb.Chat:
    """Messages with `role` and `content`; errors as of `generation_request`."""
    allowed = "a list of mappings with a role and a content, both UTF-8 text"
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise InvalidParameterError("messages", messages, allowed)
    made = pb.Chat()
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
            raise InvalidParameterError(
                f"messages[{i}]", message, "a mapping with role and content and nothing else"
            )
        entry = made.messages.add()
        for name in ("role", "content"):
            field = _Field(name, _scalar, "UTF-8 text")
            _set(entry, f"messages[{i}].{name}", field, message[name])
    return made


def _refuse(name: str, value: object, fields: Mapping[str, _Field]) -> None:
    """A name that goes nowhere; one that is known and not built may still be None."""
    if name not in _NOT_BUILT:
        near = difflib.get_close_matches(name, fields, 1)
        hint = f", perhaps {near[0]}" if near else ""
        raise InvalidParameterError("option", name, f"a name of GenerateOptions{hint}")
    if value is not None:
        raise NotSupportedError(f"{name} is not supported in this version; leave it out")


def _set_prompt(
    request: pb.GenerateRequest | pb.GenerateStreamRequest, prompt: Prompt | None
) -> None:
    if isinstance(prompt, Mapping):
        known = [name for name in ("prompt_token_ids", "prompt") if prompt.get(name) is not None]
        if not known:
            raise InvalidParameterError("prompt", prompt, "with prompt or prompt_token_ids in it")
        prompt = prompt[known[0]]
    if isinstance(prompt, str):
        _set(request, "prompt", _TEXT, prompt)
    else:
        request.token_ids.SetInParent()  # also when there are none, for the server to refuse
        field = _Field("token_ids.ids", _several, "a text, or a list of token ids")
        _set(request, "prompt", field, prompt)


def _set(message: Any, name: str, field: _Field, value: Any) -> None:
    *parents, last = field.path.split(".")
    for parent in parents:
        message = getattr(message, parent)
    try:
        field.write(message, last, value)
    except (TypeError, ValueError, AttributeError, OverflowError):
        raise InvalidParameterError(name, value, field.allowed) from None
