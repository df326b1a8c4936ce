"""The backend `cupaged`: GenerateStream of cupaged.v1.

On the clock it does as little as it can: requests are serialised beforehand, answers are read as
bytes from `grpc.aio` and parsed one by one, for their token counts only. What is asked before and
after (the model, the lengths of texts) goes through `cupaged.client`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from itertools import cycle
from typing import Any

from cupaged.benchmarks.backend import (
    BackendOptions,
    Received,
    RequestFailed,
    ServerFacts,
    Usage,
)
from cupaged.benchmarks.datasets import ModelFacts, Sample
from cupaged.benchmarks.grpc_channels import GrpcChannels, messages
from cupaged.benchmarks.readiness import when_ready
from cupaged.client import Client
from cupaged.client.errors import LoadingError, UnreachableError
from cupaged.client.facts import ModelInfo, ServerInfo
from cupaged.client.requests import generation_request
from cupaged.v1 import generation_pb2 as pb

__all__ = ["CupagedBackend"]

_METHOD = "/cupaged.v1.GenerationService/GenerateStream"
_CALL_S = 10.0  # for an answer that needs no model
_FAILED_ENDS = {pb.FINISH_REASON_ABORT: "abort", pb.FINISH_REASON_ERROR: "error"}


class CupagedBackend:
    """See `Backend`. `address` is what `cupaged.client.Client` takes."""

    def __init__(self, options: BackendOptions) -> None:
        self._options = options
        self._channels = GrpcChannels(options)
        self._stubs: Any = None

    def facts(self, wait_s: float) -> ServerFacts:
        """Poll until the server answers; a server that loads, or is not there yet, is waited for.

        Raises:
            ClientError: not in time, or another failure, at once.
        """
        model, server = when_ready(self._infos, wait_s, (LoadingError, UnreachableError))
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
        return ServerFacts(facts, about, self._count_tokens)

    def _count_tokens(self, texts: Sequence[str]) -> list[int]:
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
        """Connect.

        Raises:
            RequestFailed: there is no connection.
        """
        await self._channels.open()
        # Without (de)serialisers the bytes of the messages pass as they are.
        self._stubs = cycle([channel.unary_stream(_METHOD) for channel in self._channels.channels])

    async def request(self, prepared: bytes) -> AsyncGenerator[Received, None]:
        """Send it over the next connection in turn; give its messages."""
        metadata = self._channels.metadata
        call = next(self._stubs)(prepared, timeout=self._options.timeout_s, metadata=metadata)
        is_complete = False
        async with aclosing(messages(call)) as answer:
            async for data in answer:
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
        if not is_complete:
            raise RequestFailed("OK incomplete", "the answer ended without its usage")

    async def close(self) -> None:
        """Cancel what runs and disconnect."""
        await self._channels.close()

    def _infos(self) -> tuple[ModelInfo, ServerInfo]:
        with self._client() as client:
            model = client.model_info(self._options.model, timeout=_CALL_S)
            return model, client.server_info(timeout=_CALL_S)

    def _client(self) -> Client:
        return Client(self._options.address, retries=0, **self._options.connection)
