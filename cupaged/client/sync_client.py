"""`Client`: calls that block, for programs with threads or without."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeVar, Unpack

import grpc

from cupaged.client import calls
from cupaged.client.answers import Generation, RenderedChat
from cupaged.client.calls import Call, ClientSettings, T
from cupaged.client.connection import DEFAULT_ADDRESS, ConnectionOptions
from cupaged.client.errors import ClientError
from cupaged.client.facts import HealthStatus, Load, ModelInfo, ServerInfo
from cupaged.client.requests import GenerateOptions, Messages, Prompt, StreamOptions
from cupaged.client.retry import Attempts, RetryPolicy
from cupaged.client.streams import CLOSED, cancellation, error_of
from cupaged.client.sync_streams import CancelledOnExit, GenerationStream, Rpc, Watch
from cupaged.interrupts import Uninterrupted
from cupaged.v1 import generation_pb2 as pb

_S = TypeVar("_S", bound=CancelledOnExit)


class Client(ClientSettings):
    """A client whose calls block.

    Any number of threads may use it at the same time; one connection serves them all. It does not
    survive a `fork`, since gRPC's threads do not: start processes before the first client is made,
    or by the method "spawn", and let each make a client of its own.

    Args: see `ClientSettings`. `close` it, or use it as a context; what runs is then cancelled.

    Every call raises `ClientError` if it fails, `InvalidParameterError` for an argument of a wrong
    type, and takes `timeout` in seconds. `traceparent` is the W3C trace context of the caller.
    `model` may be left out if the server has one only.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        retries: int = calls.DEFAULT_RETRIES,
        timeout: float | None = None,
        **connection: Unpack[ConnectionOptions],
    ) -> None:
        super().__init__(address, retries=retries, timeout=timeout, **connection)
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._live: weakref.WeakSet[CancelledOnExit] = weakref.WeakSet()
        credentials, options = self._connection.credentials(), self._connection.options
        if credentials is None:
            self._channel = grpc.insecure_channel(self.address, options)
        else:
            self._channel = grpc.secure_channel(self.address, credentials, options)

    def generate(
        self,
        prompt: Prompt,
        *,
        model: str = "",
        request_id: str | None = None,
        timeout: float | None = None,
        traceparent: str | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Generation:
        """Continue a prompt, a text or token ids, and wait for the whole answer."""
        call = calls.generate(prompt, None, model, request_id, options)
        return self._unary(call, timeout, traceparent)

    def chat(
        self,
        messages: Messages,
        *,
        model: str = "",
        request_id: str | None = None,
        timeout: float | None = None,
        traceparent: str | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Generation:
        """Answer a chat, mappings with role and content, and wait for the whole answer."""
        call = calls.generate(None, messages, model, request_id, options)
        return self._unary(call, timeout, traceparent)

    def stream(
        self,
        prompt: Prompt,
        *,
        model: str = "",
        request_id: str | None = None,
        timeout: float | None = None,
        traceparent: str | None = None,
        **options: Unpack[StreamOptions],
    ) -> GenerationStream:
        """Continue a prompt and give the answer as it comes."""
        call = calls.generate_stream(prompt, None, model, request_id, options)
        return self._stream(call, timeout, traceparent)

    def stream_chat(
        self,
        messages: Messages,
        *,
        model: str = "",
        request_id: str | None = None,
        timeout: float | None = None,
        traceparent: str | None = None,
        **options: Unpack[StreamOptions],
    ) -> GenerationStream:
        """Answer a chat and give the answer as it comes."""
        call = calls.generate_stream(None, messages, model, request_id, options)
        return self._stream(call, timeout, traceparent)

    def tokenize(
        self,
        prompt: str | Messages,
        *,
        model: str = "",
        add_special_tokens: bool | None = None,
        timeout: float | None = None,
    ) -> list[int]:
        """Token ids of a text or a chat, with the special tokens that `generate` adds."""
        return self._unary(calls.tokenize(prompt, model, add_special_tokens), timeout)

    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str = "",
        skip_special_tokens: bool = True,
        timeout: float | None = None,
    ) -> str:
        """The text of token ids."""
        return self._unary(calls.detokenize(token_ids, model, skip_special_tokens), timeout)

    def apply_chat_template(
        self, messages: Messages, *, model: str = "", timeout: float | None = None
    ) -> RenderedChat:
        """The prompt that the model's chat template makes of a chat."""
        return self._unary(calls.apply_chat_template(messages, model), timeout)

    def abort(self, *request_ids: str, timeout: float | None = None) -> list[str]:
        """End requests by their ids, whoever sent them; returns those that were live."""
        return self._unary(calls.abort(request_ids), timeout)

    def model_info(self, model: str = "", *, timeout: float | None = None) -> ModelInfo:
        """What a model is, and what it takes."""
        return self._unary(calls.model_info(model), timeout)

    def list_models(self, *, timeout: float | None = None) -> list[ModelInfo]:
        """All models of the server; `timeout` is for each page."""
        models, page_token = self._unary(calls.list_models(), timeout)
        while page_token:
            more, page_token = self._unary(calls.list_models(page_token), timeout)
            models += more
        return models

    def server_info(self, *, timeout: float | None = None) -> ServerInfo:
        """Version, features and build of the server."""
        return self._unary(calls.server_info(), timeout)

    def load(self, model: str = "", *, timeout: float | None = None) -> Load:
        """How busy the engine is."""
        return self._unary(calls.load(model), timeout)

    def watch_load(self, model: str = "", *, interval_s: float = 1.0) -> Watch[Load]:
        """How busy the engine is: at once, then every `interval_s` in [0.1, 3600]."""
        return self._watch(calls.watch_load(model, interval_s))

    def health(self, service: str = "", *, timeout: float | None = None) -> HealthStatus:
        """Whether the server takes requests, without retries. A server that cannot be reached has
        no status: that raises UnreachableError."""
        return self._unary(
            calls.health(service), timeout, policy=RetryPolicy(0, self._policy.budget)
        )

    def watch_health(self, service: str = "") -> Watch[HealthStatus]:
        """Whether the server takes requests: at once, then whenever it changes."""
        return self._watch(calls.watch_health(service))

    def close(self) -> None:
        """Cancel what runs and close the connection; any number of times."""
        self._closed.set()
        with self._lock:
            live = list(self._live)
        for stream in live:
            stream.cancel()
        with Uninterrupted():
            self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _unary(
        self,
        call: Call[T],
        timeout: float | None,
        traceparent: str | None = None,
        policy: RetryPolicy | None = None,
    ) -> T:
        attempts = Attempts(policy or self._policy, self._seconds(timeout), call.request_id)
        while True:
            failure, answer = self._attempt(call, attempts.remaining_s(), traceparent)
            if failure is None:
                attempts.succeeded()
                return call.read(answer)
            if self._closed.wait(attempts.wait_s(failure)):
                raise cancellation(CLOSED, call.request_id)

    def _attempt(
        self, call: Call[Any], timeout_s: float | None, traceparent: str | None
    ) -> tuple[ClientError | None, Any]:
        method = self._channel.unary_unary(
            call.path, type(call.request).SerializeToString, call.answer.FromString
        )
        with Uninterrupted() as uninterrupted:
            future = self._begin(method.future, call, timeout_s, traceparent)
            uninterrupted.ending(future.cancel)
            try:
                return None, future.result()
            except grpc.RpcError as error:
                return error_of(error, call.request_id), None
            except BaseException:  # of a handler that the program has for its signals
                future.cancel()
                raise

    def _stream(
        self,
        call: Call[pb.GenerateStreamResponse],
        timeout: float | None,
        traceparent: str | None,
    ) -> GenerationStream:
        def begin(timeout_s: float | None) -> Rpc[pb.GenerateStreamResponse]:
            return self._start(call, timeout_s, traceparent)

        attempts = Attempts(self._policy, self._seconds(timeout), call.request_id)
        stream = GenerationStream(begin, call.request_id, attempts)
        return self._tracked(stream)

    def _watch(self, call: Call[T]) -> Watch[T]:
        watch = Watch(self._start(call, None, None), call.read, call.request_id)
        return self._tracked(watch)

    def _tracked(self, stream: _S) -> _S:
        with self._lock:
            self._live.add(stream)
        if self._closed.is_set():  # by another thread, a moment ago
            stream.cancel()
        return stream

    def _start(self, call: Call[Any], timeout_s: float | None, traceparent: str | None) -> Rpc[Any]:
        method = self._channel.unary_stream(
            call.path, type(call.request).SerializeToString, call.answer.FromString
        )
        with Uninterrupted() as uninterrupted:
            rpc: Rpc[Any] = self._begin(method, call, timeout_s, traceparent)
            uninterrupted.ending(rpc.cancel)
        return rpc

    def _begin(
        self,
        method: Callable[..., Any],
        call: Call[Any],
        timeout_s: float | None,
        traceparent: str | None,
    ) -> Any:
        metadata = self._connection.metadata(call.request_id, traceparent)
        try:
            return method(call.request, timeout=timeout_s, metadata=metadata)
        except ValueError:  # what gRPC raises for a closed channel
            if not self._closed.is_set():
                raise
        raise cancellation(CLOSED, call.request_id)
