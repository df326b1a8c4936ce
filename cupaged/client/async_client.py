"""`AsyncClient`: the same calls as `Client`, for asyncio."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Sequence
from typing import Any, Self, Unpack

import grpc

from cupaged.client import calls
from cupaged.client.answers import Generation, RenderedChat
from cupaged.client.async_streams import (
    AsyncGenerationStream,
    AsyncWatch,
    CancelledOnExit,
    Rpc,
    is_cancelling,
    sleep,
)
from cupaged.client.calls import Call, ClientSettings, T
from cupaged.client.connection import DEFAULT_ADDRESS, ConnectionOptions
from cupaged.client.errors import ClientError
from cupaged.client.facts import HealthStatus, Load, ModelInfo, ServerInfo
from cupaged.client.requests import GenerateOptions, Messages, Prompt, StreamOptions
from cupaged.client.retry import Attempts, RetryPolicy
from cupaged.client.streams import CLOSED, cancellation, error_of
from cupaged.v1 import generation_pb2 as pb


class AsyncClient(ClientSettings):
    """A client for asyncio, with the calls of `Client`.

    It belongs to the event loop in which it makes its first call, and to the thread of that loop.
    It does not survive a `fork`, see `Client`.

    Args: see `ClientSettings`. `close` it, or use it as a context; what runs is then cancelled.

    Every call raises `ClientError` if it fails, `InvalidParameterError` for an argument of a wrong
    type, and takes `timeout` in seconds. `traceparent` is the W3C trace context of the caller.
    `model` may be left out if the server has one only. Cancelling the task that waits for a call
    cancels the call.
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
        self._closed = asyncio.Event()
        self._live: weakref.WeakSet[CancelledOnExit] = weakref.WeakSet()
        self._waiting: set[grpc.aio.UnaryUnaryCall[Any, Any]] = set()
        self._opened: grpc.aio.Channel | None = None

    async def generate(
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
        return await self._unary(call, timeout, traceparent)

    async def chat(
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
        return await self._unary(call, timeout, traceparent)

    def stream(
        self,
        prompt: Prompt,
        *,
        model: str = "",
        request_id: str | None = None,
        timeout: float | None = None,
        traceparent: str | None = None,
        **options: Unpack[StreamOptions],
    ) -> AsyncGenerationStream:
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
    ) -> AsyncGenerationStream:
        """Answer a chat and give the answer as it comes."""
        call = calls.generate_stream(None, messages, model, request_id, options)
        return self._stream(call, timeout, traceparent)

    async def tokenize(
        self,
        prompt: str | Messages,
        *,
        model: str = "",
        add_special_tokens: bool | None = None,
        timeout: float | None = None,
    ) -> list[int]:
        """Token ids of a text or a chat, with the special tokens that `generate` adds."""
        return await self._unary(calls.tokenize(prompt, model, add_special_tokens), timeout)

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str = "",
        skip_special_tokens: bool = True,
        timeout: float | None = None,
    ) -> str:
        """The text of token ids."""
        return await self._unary(calls.detokenize(token_ids, model, skip_special_tokens), timeout)

    async def apply_chat_template(
        self, messages: Messages, *, model: str = "", timeout: float | None = None
    ) -> RenderedChat:
        """The prompt that the model's chat template makes of a chat."""
        return await self._unary(calls.apply_chat_template(messages, model), timeout)

    async def abort(self, *request_ids: str, timeout: float | None = None) -> list[str]:
        """End requests by their ids, whoever sent them; returns those that were live."""
        return await self._unary(calls.abort(request_ids), timeout)

    async def model_info(self, model: str = "", *, timeout: float | None = None) -> ModelInfo:
        """What a model is, and what it takes."""
        return await self._unary(calls.model_info(model), timeout)

    async def list_models(self, *, timeout: float | None = None) -> list[ModelInfo]:
        """All models of the server; `timeout` is for each page."""
        models, page_token = await self._unary(calls.list_models(), timeout)
        while page_token:
            more, page_token = await self._unary(calls.list_models(page_token), timeout)
            models += more
        return models

    async def server_info(self, *, timeout: float | None = None) -> ServerInfo:
        """Version, features and build of the server."""
        return await self._unary(calls.server_info(), timeout)

    async def load(self, model: str = "", *, timeout: float | None = None) -> Load:
        """How busy the engine is."""
        return await self._unary(calls.load(model), timeout)

    def watch_load(self, model: str = "", *, interval_s: float = 1.0) -> AsyncWatch[Load]:
        """How busy the engine is: at once, then every `interval_s` in [0.1, 3600]."""
        return self._watch(calls.watch_load(model, interval_s))

    async def health(self, service: str = "", *, timeout: float | None = None) -> HealthStatus:
        """Whether the server takes requests, without retries. A server that cannot be reached has
        no status: that raises UnreachableError."""
        return await self._unary(
            calls.health(service), timeout, policy=RetryPolicy(0, self._policy.budget)
        )

    def watch_health(self, service: str = "") -> AsyncWatch[HealthStatus]:
        """Whether the server takes requests: at once, then whenever it changes."""
        return self._watch(calls.watch_health(service))

    async def close(self) -> None:
        """Cancel what runs and close the connection; any number of times."""
        self._closed.set()
        # gRPC's own close looks for calls in the frames of tasks, and need not find all of them.
        for stream in list(self._live):
            stream.cancel()
        for rpc in list(self._waiting):
            rpc.cancel()
        if self._opened is not None:
            await self._opened.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def _channel(self, request_id: str) -> grpc.aio.Channel:
        """The channel, opened by the first call, since that runs in the loop it belongs to."""
        if self._closed.is_set():
            raise cancellation(CLOSED, request_id)
        if self._opened is None:
            credentials, options = self._connection.credentials(), self._connection.options
            if credentials is None:
                self._opened = grpc.aio.insecure_channel(self.address, options)
            else:
                self._opened = grpc.aio.secure_channel(self.address, credentials, options)
        return self._opened

    async def _unary(
        self,
        call: Call[T],
        timeout: float | None,
        traceparent: str | None = None,
        policy: RetryPolicy | None = None,
    ) -> T:
        attempts = Attempts(policy or self._policy, self._seconds(timeout), call.request_id)
        while True:
            failure, answer = await self._attempt(call, attempts.remaining_s(), traceparent)
            if failure is None:
                attempts.succeeded()
                return call.read(answer)
            if await sleep(self._closed, attempts.wait_s(failure)):
                raise cancellation(CLOSED, call.request_id)

    async def _attempt(
        self, call: Call[Any], timeout_s: float | None, traceparent: str | None
    ) -> tuple[ClientError | None, Any]:
        metadata = self._connection.metadata(call.request_id, traceparent)
        method = self._channel(call.request_id).unary_unary(
            call.path, type(call.request).SerializeToString, call.answer.FromString
        )
        rpc = method(call.request, timeout=timeout_s, metadata=metadata)
        self._waiting.add(rpc)
        try:
            return None, await rpc
        except grpc.RpcError as error:
            return error_of(error, call.request_id), None
        except asyncio.CancelledError:
            rpc.cancel()
            if not self._closed.is_set() or is_cancelling():
                raise
            return cancellation(CLOSED, call.request_id), None
        finally:
            self._waiting.discard(rpc)

    def _stream(
        self,
        call: Call[pb.GenerateStreamResponse],
        timeout: float | None,
        traceparent: str | None,
    ) -> AsyncGenerationStream:
        def begin(timeout_s: float | None) -> Rpc[pb.GenerateStreamResponse]:
            return self._start(call, timeout_s, traceparent)

        attempts = Attempts(self._policy, self._seconds(timeout), call.request_id)
        stream = AsyncGenerationStream(begin, call.request_id, attempts)
        self._live.add(stream)
        return stream

    def _watch(self, call: Call[T]) -> AsyncWatch[T]:
        watch = AsyncWatch(self._start(call, None, None), call.read, call.request_id)
        self._live.add(watch)
        return watch

    def _start(self, call: Call[Any], timeout_s: float | None, traceparent: str | None) -> Rpc[Any]:
        metadata = self._connection.metadata(call.request_id, traceparent)
        method = self._channel(call.request_id).unary_stream(
            call.path, type(call.request).SerializeToString, call.answer.FromString
        )
        return method(call.request, timeout=timeout_s, metadata=metadata)
