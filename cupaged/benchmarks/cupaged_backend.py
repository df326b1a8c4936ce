"""The backend `cupaged`: GenerateStream of cupaged.v1.

On the clock it does as little as it can: requests are serialised beforehand, answers are read as
bytes from `grpc.aio` and parsed one by one, for their token counts only. What is asked before and
after (the model, the lengths of texts) goes through `cupaged.client`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from itertools import cycle
from typing import Any

import grpc
import grpc.aio

from cupaged.benchmarks.backend import (
    BackendOptions,
    Received,
    RequestFailed,
    ServerFacts,
    Usage,
)
from cupaged.benchmarks.datasets import ModelFacts, Sample
from cupaged.client import Client
from cupaged.client.connection import Connection
from cupaged.client.errors import ClientError, LoadingError, UnreachableError, error_from_status
from cupaged.client.requests import generation_request
from cupaged.v1 import generation_pb2 as pb

__all__ = ["CupagedBackend"]

_METHOD = "/cupaged.v1.GenerationService/GenerateStream"
_POLL_S = 0.2
_CALL_S = 10.0  # for an answer that needs no model
_FAILED_ENDS = {pb.FINISH_REASON_ABORT: "abort", pb.FINISH_REASON_ERROR: "error"}


class CupagedBackend:
    """See `Backend`. `address` is what `cupaged.client.Client` takes."""

    def __init__(self, options: BackendOptions) -> None:
        self._options = options
        self._connection = Connection(options.address, **options.connection)
        self._channels: list[grpc.aio.Channel] = []
        self._stubs: Any = None
        self._metadata: tuple[tuple[str, str], ...] = ()

    def facts(self, wait_s: float) -> ServerFacts:
        """Poll until the server answers; a server that loads, or is not there yet, is waited for.

        Raises:
            ClientError: not in time, or another failure, at once.
        """
        deadline = time.monotonic() + wait_s
        while True:
            try:
                with self._client() as client:
                    model = client.model_info(self._options.model, timeout=_CALL_S)
                    server = client.server_info(timeout=_CALL_S)
                break
            except (LoadingError, UnreachableError):
                if time.monotonic() + _POLL_S > deadline:
                    raise
            time.sleep(_POLL_S)
        special = set(model.eos_token_ids) | {model.bos_token_id}
        facts = ModelFacts(
            name=model.name,
            vocab_size=model.vocab_size,
            max_model_len=model.max_model_len,
            special_token_ids=tuple(sorted(i for i in special if i is not None)),
            has_chat_template=model.has_chat_template,
        )
        about = {
            "version": server.version,
            "device": server.device,
            "python": server.python_version,
            "platform": server.platform,
            "packages": dict(server.packages),
            "dtype": model.dtype,
            "max_num_seqs": model.max_num_seqs,
            "num_kv_blocks": model.num_kv_blocks,
            "block_size": model.block_size,
        }
        return ServerFacts(facts, about)

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """By the server's Tokenize, one call a text."""
        with self._client() as client:
            return [len(client.tokenize(text, model=self._options.model)) for text in texts]

    def prepare(self, sample: Sample, request_id: str) -> bytes:
        """The serialised request."""
        prompt = sample.prompt
        request = generation_request(
            pb.GenerateStreamRequest(),
            self._options.model,
            request_id,
            {**self._options.sampling, "max_tokens": sample.max_tokens},
            prompt=None if sample.is_chat else prompt,
            messages=[{"role": "user", "content": str(prompt)}] if sample.is_chat else None,
        )
        return request.SerializeToString()

    async def open(self) -> None:
        """Make the channels, and wait until each is connected.

        Raises:
            RequestFailed: one is not connected in time.
        """
        self._metadata = self._connection.metadata()
        credentials = self._connection.credentials()
        # Equal channels of a process share a connection, unless told not to.
        options = [*self._connection.options, ("grpc.use_local_subchannel_pool", 1)]
        for _ in range(self._options.connections):
            if credentials is None:
                channel = grpc.aio.insecure_channel(self._connection.target, options)
            else:
                channel = grpc.aio.secure_channel(self._connection.target, credentials, options)
            self._channels.append(channel)
        try:
            async with asyncio.timeout(_CALL_S):
                await asyncio.gather(*(channel.channel_ready() for channel in self._channels))
        except TimeoutError:
            raise RequestFailed(
                "UNAVAILABLE", f"{self._connection.target}: no connection"
            ) from None
        # Without (de)serialisers the bytes of the messages pass as they are.
        self._stubs = cycle([channel.unary_stream(_METHOD) for channel in self._channels])

    async def request(self, prepared: bytes) -> AsyncGenerator[Received, None]:
        """Send it over the next connection in turn; give its messages."""
        call = next(self._stubs)(prepared, timeout=self._options.timeout_s, metadata=self._metadata)
        is_complete = False
        try:
            while (data := await call.read()) is not grpc.aio.EOF:
                now = time.perf_counter()
                message = pb.GenerateStreamResponse.FromString(data)
                event = message.WhichOneof("event")
                num_tokens, usage = 0, None
                if event == "delta":
                    num_tokens = len(message.delta.token_ids)
                elif event == "finished" and message.finished.reason in _FAILED_ENDS:
                    end = _FAILED_ENDS[message.finished.reason]
                    raise RequestFailed(f"OK {end}", f"the server ended the answer: {end}")
                if message.HasField("usage"):
                    is_complete = True
                    usage = Usage(message.usage.prompt_tokens, message.usage.completion_tokens)
                yield Received(now, num_tokens, usage)
            code = await call.code()
            if code is not grpc.StatusCode.OK:
                trailer = await call.trailing_metadata() or ()
                raise _failure(code, await call.details(), trailer)
        except grpc.aio.AioRpcError as error:
            raise _failure(error.code(), error.details(), error.trailing_metadata() or ()) from None
        finally:
            call.cancel()  # of no effect on a call that has ended
        if not is_complete:
            raise RequestFailed("OK incomplete", "the answer ended without its usage")

    async def close(self) -> None:
        """Cancel what runs and disconnect."""
        for channel in self._channels:
            await channel.close()
        self._channels.clear()

    def _client(self) -> Client:
        return Client(self._options.address, retries=0, **self._options.connection)


def _failure(code: grpc.StatusCode, details: str | None, trailer: Any) -> RequestFailed:
    """Counted by the status code and the server's reason: `RESOURCE_EXHAUSTED QUEUE_FULL`."""
    error: ClientError = error_from_status(code, details, trailer)
    return RequestFailed(f"{code.name} {error.reason}".strip(), error.message)
