"""Requests of the protos as what the engine's parts take: parameters, prompts, times.

Every field is checked, here or by whatever it is handed to, and errors carry names from which
`field_paths` finds the field. Nothing here waits or sends.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from cupaged.engine.door import MAX_SALT_BYTES
from cupaged.errors import InvalidParameterError, PromptError
from cupaged.sampling_params import SamplingParams
from cupaged.server.field_paths import PARAMETER_PATHS
from cupaged.v1 import generation_pb2 as pb

GenerationRequest = pb.GenerateRequest | pb.GenerateStreamRequest

MAX_MESSAGES = 2**16  # of a chat
MAX_DETOKENIZE_IDS = 2**20
MAX_STRING_CHARS = 4096  # of a stop string and of a bad word
MAX_ABORT_IDS = 1024
MAX_INTERVAL_S = 60.0
MAX_TIMEOUT_S = 365 * 86400.0
_GROUPS = ("sampling", "stopping", "output")
_PARAMETERS = {path: name for name, path in PARAMETER_PATHS.items()}
_REQUEST_ID = re.compile(r"[ -~]{1,256}")
_NANOS = 10**9


@dataclass(frozen=True, slots=True)
class OutputForm:
    """What the messages of an answer hold.

    interval_tokens, interval_s: how long tokens wait to be sent together; 0 for no waiting.
    """

    token_ids: bool
    echo: bool
    interval_tokens: int = 0
    interval_s: float = 0.0

    @property
    def is_paced(self) -> bool:
        """Whether tokens wait for more of them; an interval of one token does not."""
        return self.interval_tokens > 1 or (self.interval_tokens == 0 and self.interval_s > 0)


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asks for, whichever service it came by.

    prompt: a text, token ids, or a chat that is still to be rendered.
    parameters: the given ones, by their names in `SamplingParams`, unchecked.
    priority, cache_salt: None and "" where the request says nothing.
    max_tokens: of the output where neither the request nor the model says; None for the rest of the
        context.
    """

    prompt: str | Sequence[int] | pb.Chat
    parameters: Mapping[str, Any]
    form: OutputForm
    queue_timeout_s: float | None = None
    priority: int | None = None
    cache_salt: str = ""
    max_tokens: int | None = None


def asked_of(request: GenerationRequest) -> Asked:
    """What a request of `cupaged.v1` asks for.

    Raises:
        PromptError: there is no prompt.
        InvalidParameterError: an interval or a time is out of range.
    """
    return Asked(
        prompt=prompt_of(request),
        parameters=parameters_of(request),
        form=output_form(request),
        queue_timeout_s=queue_timeout_s(request),
        priority=request.priority if request.HasField("priority") else None,
        cache_salt=request.cache_salt,
    )


def parameters_of(request: GenerationRequest) -> dict[str, Any]:
    """The parameters that a request gives, as they stand in it, by their names."""
    given: dict[str, Any] = {}
    for group in _GROUPS:
        message: Message = getattr(request, group)
        for field, value in message.ListFields():
            name = _PARAMETERS.get(f"{group}.{field.name}")
            if name is not None:
                given[name] = value
    return given


def sampling_params(
    given: Mapping[str, Any], defaults: Mapping[str, Any], max_tokens: int | None = None
) -> SamplingParams:
    """The parameters of a request.

    Args:
        given: those that it names.
        defaults: fields of `SamplingParams` for what the request leaves out.
        max_tokens: the length of the output where neither says.

    Raises:
        InvalidParameterError: a value is out of range.
        NotSupportedError: a value that is known and not built.
    """
    return SamplingParams(**{"max_tokens": max_tokens, **defaults, **given})


def check_sizes(given: Mapping[str, Any], *, vocab_size: int, max_model_len: int) -> None:
    """Refuse lists and strings that are long for no reason, before anybody works on them.

    Raises:
        InvalidParameterError: an id must stand twice in a list, or a string is too long.
    """
    lists = (
        ("allowed_token_ids", vocab_size),
        ("logit_bias", vocab_size),
        ("trace_decode_token_ids", max_model_len),
        ("stop_token_ids", vocab_size),
    )
    for name, most in lists:
        ids = given.get(name)
        if isinstance(ids, Sized) and len(ids) > most:
            raise InvalidParameterError(name, len(ids), f"a list of at most {most} ids")
    for name in ("bad_words", "stop"):
        strings = given.get(name)
        if isinstance(strings, str):
            strings = [strings]
        for i, string in enumerate(strings if isinstance(strings, Sequence) else ()):
            if isinstance(string, str) and len(string) > MAX_STRING_CHARS:
                allowed = f"at most {MAX_STRING_CHARS} characters long"
                raise InvalidParameterError(f"{name}[{i}]", len(string), allowed)


def prompt_of(request: GenerationRequest) -> str | Sequence[int] | pb.Chat:
    """The prompt: a text, token ids, or a chat that is still to be rendered.

    Raises:
        PromptError: there is none.
    """
    kind = request.WhichOneof("input")
    if kind == "text":
        return request.text
    if kind == "token_ids":
        return request.token_ids.ids
    if kind == "chat":
        return request.chat
    raise PromptError("input", None, "text, token_ids or chat")


def messages_of(chat: pb.Chat) -> list[dict[str, str]]:
    """A chat as a template takes it.

    Raises:
        PromptError: there is no message, or one without a role, or there are too many.
    """
    if not chat.messages:
        raise PromptError("messages", [], "at least one message")
    if len(chat.messages) > MAX_MESSAGES:
        raise PromptError("messages", len(chat.messages), f"at most {MAX_MESSAGES} messages")
    for i, message in enumerate(chat.messages):
        if not message.role:
            raise PromptError(f"messages[{i}].role", "", "a role, such as 'user'")
    return [{"role": m.role, "content": m.content} for m in chat.messages]


def adds_generation_prompt(chat: pb.Chat) -> bool:
    """Whether the rendered chat ends with the head of an answer."""
    return chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True


def output_form(request: GenerationRequest) -> OutputForm:
    """What the answer has to hold.

    Raises:
        InvalidParameterError: an interval is out of range.
    """
    output = request.output
    token_ids = output.token_ids if output.HasField("token_ids") else True
    if not isinstance(request, pb.GenerateStreamRequest) or not request.HasField("stream"):
        return OutputForm(token_ids, output.echo)
    stream = request.stream
    if stream.interval_tokens < 0:
        raise InvalidParameterError("stream.interval_tokens", stream.interval_tokens, ">= 0")
    interval_s = 0.0
    if stream.HasField("interval"):
        interval_s = seconds_of(stream.interval, "stream.interval")
        if not 0 <= interval_s <= MAX_INTERVAL_S:
            allowed = f"in [0, {MAX_INTERVAL_S:g}] seconds"
            raise InvalidParameterError("stream.interval", interval_s, allowed)
    return OutputForm(token_ids, output.echo, stream.interval_tokens, interval_s)


def queue_timeout_s(request: GenerationRequest) -> float | None:
    """Longest wait in seconds, None for no limit.

    Raises:
        InvalidParameterError: it is not positive.
    """
    if not request.HasField("queue_timeout"):
        return None
    seconds = seconds_of(request.queue_timeout, "queue_timeout")
    if seconds <= 0:
        raise InvalidParameterError("queue_timeout", seconds, "> 0 seconds")
    return min(seconds, MAX_TIMEOUT_S)


def checked_priority(priority: int | None, *, has_priorities: bool) -> int:
    """Raises InvalidParameterError where the engine's policy does not look at priorities."""
    if priority is None:
        return 0
    if not has_priorities:
        allowed = "absent: the server's scheduling policy is not 'priority'"
        raise InvalidParameterError("priority", priority, allowed)
    return priority


def checked_salt(salt: str) -> str | None:
    """None for no salt. Raises InvalidParameterError if it is too long."""
    if len(salt.encode()) > MAX_SALT_BYTES:
        raise InvalidParameterError("cache_salt", salt, f"at most {MAX_SALT_BYTES} bytes")
    return salt or None


def check_request_id(request_id: str) -> str:
    """The id itself.

    Raises:
        InvalidParameterError: it could not be sent as metadata, or is too long.
    """
    if not _REQUEST_ID.fullmatch(request_id) or request_id != request_id.strip():
        raise InvalidParameterError(
            "request_id", request_id, "1 to 256 printable ASCII characters, no space at either end"
        )
    return request_id


def seconds_of(duration: Duration, name: str) -> float:
    """A duration in seconds.

    Raises:
        InvalidParameterError: seconds and nanoseconds do not fit together.
    """
    seconds, nanos = duration.seconds, duration.nanos
    if abs(nanos) >= _NANOS or seconds * nanos < 0:
        allowed = "a duration with nanos in (-10^9, 10^9) and of the sign of its seconds"
        raise InvalidParameterError(name, f"{seconds} s {nanos} ns", allowed)
    return seconds + nanos / _NANOS
