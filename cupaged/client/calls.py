"""The calls of the service, as data: method, request, and how the answer is read.

Both clients make the same calls from this module; they differ in how they wait only.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Generic, TypeVar, Unpack

from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from cupaged.client import answers, facts, requests
from cupaged.client.connection import (
    DEFAULT_ADDRESS,
    Connection,
    ConnectionOptions,
    checked_request_id,
)
from cupaged.client.requests import Messages, Prompt
from cupaged.client.retry import RetryBudget, RetryPolicy
from cupaged.errors import ConfigError, InvalidParameterError
from cupaged.v1 import generation_pb2, model_pb2

DEFAULT_RETRIES = 3
_MOST_RETRIES = 1000
_GENERATION = "/cupaged.v1.GenerationService"
_MODEL = "/cupaged.v1.ModelService"
_HEALTH = "/grpc.health.v1.Health"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """A call of one method.

    path: of the method. answer: the class of the message, or messages, that come back.
    read: makes of such a message what the caller gets.
    """

    path: str
    request: Message
    answer: type[Message]
    read: Callable[[Any], T]
    request_id: str = field(default_factory=lambda: checked_request_id(None))


class ClientSettings:
    """What a client is made of, and what its calls have in common.

    Args:
        address: where the server is, see `Connection`.
        retries: most attempts after the first one of each call, see `cupaged.client.retry`; 0
            turns them off.
        timeout: seconds that a call may take with all its retries, unless it has a timeout of its
            own; None for no limit. It is the deadline of the RPC, so that the server ends the
            request as well.
        connection: TLS, token and options of the channel, see `Connection`.

    Raises:
        ConfigError: one of these is out of range, or a file of them is not what it must be.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        retries: int = DEFAULT_RETRIES,
        timeout: float | None = None,
        **connection: Unpack[ConnectionOptions],
    ) -> None:
        if isinstance(retries, bool) or not isinstance(retries, int):
            raise ConfigError("retries", retries, "an integer")
        if not 0 <= retries <= _MOST_RETRIES:
            raise ConfigError("retries", retries, f"in [0, {_MOST_RETRIES}]")
        self._connection = Connection(address, **connection)
        self._policy = RetryPolicy(retries, RetryBudget())
        self._timeout_s = checked_timeout(timeout)

    @property
    def address(self) -> str:
        """The target, as gRPC has it."""
        return self._connection.target

    def _seconds(self, timeout: float | None) -> float | None:
        return self._timeout_s if timeout is None else checked_timeout(timeout)


def checked_timeout(timeout: float | None) -> float | None:
    """Seconds, or None; InvalidParameterError otherwise."""
    if timeout is None:
        return None
    is_number = isinstance(timeout, numbers.Real) and not isinstance(timeout, bool)
    if not is_number or not 0 < float(timeout) < math.inf:
        raise InvalidParameterError("timeout", timeout, "None, or a number of seconds > 0")
    return float(timeout)


def generate(
    prompt: Prompt | None,
    messages: Messages | None,
    model: str,
    request_id: str | None,
    options: Mapping[str, Any],
) -> Call[answers.Generation]:
    """A prompt or a chat, for a whole answer; errors as of `requests.generation_request`."""
    name = checked_request_id(request_id)
    request = requests.generation_request(
        generation_pb2.GenerateRequest(), model, name, options, prompt=prompt, messages=messages
    )
    answer = generation_pb2.GenerateResponse
    return Call(f"{_GENERATION}/Generate", request, answer, answers.read_generation, name)


def generate_stream(
    prompt: Prompt | None,
    messages: Messages | None,
    model: str,
    request_id: str | None,
    options: Mapping[str, Any],
) -> Call[generation_pb2.GenerateStreamResponse]:
    """A prompt or a chat, for a stream; errors as of `requests.generation_request`."""
    name = checked_request_id(request_id)
    request = requests.generation_request(
        generation_pb2.GenerateStreamRequest(),
        model,
        name,
        options,
        prompt=prompt,
        messages=messages,
    )
    answer = generation_pb2.GenerateStreamResponse
    return Call(f"{_GENERATION}/GenerateStream", request, answer, lambda message: message, name)


def tokenize(
    prompt: str | Messages, model: str, add_special_tokens: bool | None
) -> Call[list[int]]:
    """A text or a chat."""
    return Call(
        f"{_GENERATION}/Tokenize",
        requests.tokenize_request(prompt, model, add_special_tokens),
        generation_pb2.TokenizeResponse,
        lambda answer: list(answer.token_ids),
    )


def detokenize(token_ids: Sequence[int], model: str, skip_special_tokens: bool) -> Call[str]:
    """Token ids."""
    return Call(
        f"{_GENERATION}/Detokenize",
        requests.detokenize_request(token_ids, model, skip_special_tokens),
        generation_pb2.DetokenizeResponse,
        lambda answer: str(answer.text),
    )


def apply_chat_template(messages: Messages, model: str) -> Call[answers.RenderedChat]:
    """A chat."""
    return Call(
        f"{_GENERATION}/ApplyChatTemplate",
        requests.chat_template_request(messages, model),
        generation_pb2.ApplyChatTemplateResponse,
        lambda answer: answers.RenderedChat(answer.text, list(answer.token_ids)),
    )


def abort(request_ids: Sequence[str]) -> Call[list[str]]:
    """Requests by their ids."""
    for request_id in request_ids:
        checked_request_id(request_id)
    return Call(
        f"{_GENERATION}/Abort",
        generation_pb2.AbortRequest(request_ids=request_ids),
        generation_pb2.AbortResponse,
        lambda answer: list(answer.aborted_request_ids),
    )


def model_info(model: str) -> Call[facts.ModelInfo]:
    """One model."""
    return Call(
        f"{_MODEL}/GetModelInfo",
        requests.for_model(model_pb2.GetModelInfoRequest(), model),
        model_pb2.GetModelInfoResponse,
        lambda answer: facts.read_model_info(answer.model),
    )


def list_models(page_token: str = "") -> Call[tuple[list[facts.ModelInfo], str]]:
    """A page of the models, and the token of the next page, "" after the last."""
    return Call(
        f"{_MODEL}/ListModels",
        model_pb2.ListModelsRequest(page_token=page_token),
        model_pb2.ListModelsResponse,
        lambda page: ([facts.read_model_info(m) for m in page.models], page.next_page_token),
    )


def server_info() -> Call[facts.ServerInfo]:
    """The server."""
    return Call(
        f"{_MODEL}/GetServerInfo",
        model_pb2.GetServerInfoRequest(),
        model_pb2.GetServerInfoResponse,
        facts.read_server_info,
    )


def load(model: str) -> Call[facts.Load]:
    """How busy the engine is."""
    return Call(
        f"{_MODEL}/GetLoad",
        requests.for_model(model_pb2.GetLoadRequest(), model),
        model_pb2.GetLoadResponse,
        lambda answer: facts.read_load(answer.load),
    )


def watch_load(model: str, interval_s: float) -> Call[facts.Load]:
    """The same, again and again."""
    request = requests.for_model(model_pb2.WatchLoadRequest(), model)
    try:
        request.interval.FromTimedelta(timedelta(seconds=interval_s))
    except (TypeError, ValueError, OverflowError):
        raise InvalidParameterError("interval_s", interval_s, "a number of seconds") from None
    return Call(
        f"{_MODEL}/WatchLoad",
        request,
        model_pb2.WatchLoadResponse,
        lambda answer: facts.read_load(answer.load),
    )


def health(service: str) -> Call[facts.HealthStatus]:
    """Whether the server takes requests."""
    request = health_pb2.HealthCheckRequest(service=service)
    return Call(f"{_HEALTH}/Check", request, health_pb2.HealthCheckResponse, facts.read_health)


def watch_health(service: str) -> Call[facts.HealthStatus]:
    """The same, at once and whenever it changes."""
    request = health_pb2.HealthCheckRequest(service=service)
    return Call(f"{_HEALTH}/Watch", request, health_pb2.HealthCheckResponse, facts.read_health)
