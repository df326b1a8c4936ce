"""A server for tests of `cupaged bench serve`: it answers with as many tokens as it is asked for.

By real gRPC. It knows no model: a text has a token a word.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from cupaged.v1 import generation_pb2 as pb
from cupaged.v1 import model_pb2
from tests.server.loop_thread import LoopThread

VOCAB_SIZE, MAX_MODEL_LEN, EOS = 500, 256, 7


class BenchServer(LoopThread):
    """Answers calls until the block of its context is left.

    Args:
        tokens_a_message: how many tokens come together, but for the first, which comes alone.
        fails: of a request, the status it gets in place of its last message: code and reason, or
            an end such as FINISH_REASON_ABORT; None for none.
        loading: how many calls of GetModelInfo are refused with LOADING.
        stalls: after its first token an answer stands still until it is cancelled.
    """

    def __init__(
        self,
        *,
        tokens_a_message: int = 1,
        fails: Callable[[pb.GenerateStreamRequest], Any] = lambda request: None,
        loading: int = 0,
        stalls: bool = False,
    ) -> None:
        super().__init__()
        self.tokens_a_message = tokens_a_message
        self.fails = fails
        self.loading = loading
        self.stalls = stalls
        self.metadata: dict[str, str] = {}
        self.remaining_s: float | None = None
        self.idle = threading.Event()
        self.requests: list[pb.GenerateStreamRequest] = []
        self.peers: set[str] = set()
        self.running = self.most_running = 0

    async def serve(self) -> None:
        """By gRPC."""
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        server.add_generic_rpc_handlers(
            [
                _handlers(
                    "GenerationService",
                    Tokenize=(self._tokenize, pb.TokenizeRequest),
                    GenerateStream=(self._stream, pb.GenerateStreamRequest),
                ),
                _handlers(
                    "ModelService",
                    GetModelInfo=(self._model, model_pb2.GetModelInfoRequest),
                    GetServerInfo=(_server_info, model_pb2.GetServerInfoRequest),
                ),
            ]
        )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        self.is_ready(f"127.0.0.1:{port}")
        await self.until_the_end()
        await server.stop(None)

    async def _stream(
        self, request: pb.GenerateStreamRequest, context: Any
    ) -> AsyncIterator[pb.GenerateStreamResponse]:
        self.requests.append(request)
        self.peers.add(context.peer())
        self.metadata = {str(key): str(value) for key, value in context.invocation_metadata()}
        self.remaining_s = context.time_remaining()
        self.idle.clear()
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            async for message in self._messages(request, context):
                yield message
        finally:
            self.running -= 1
            if not self.running:
                self.idle.set()

    async def _messages(
        self, request: pb.GenerateStreamRequest, context: Any
    ) -> AsyncIterator[pb.GenerateStreamResponse]:
        num_prompt, total = _num_tokens(request), request.stopping.max_new_tokens
        started = pb.Started(request_id=request.request_id, prompt_tokens=num_prompt)
        yield pb.GenerateStreamResponse(started=started)
        sent = 0
        while sent < total:
            size = min(self.tokens_a_message if sent else 1, total - sent)
            ids = range(sent, sent + size)
            yield pb.GenerateStreamResponse(delta=pb.Delta(text=" w" * size, token_ids=ids))
            sent += size
            if self.stalls:
                await self.until_the_end()
            await asyncio.sleep(0)  # as many requests as there are take turns
        failure = self.fails(request)
        if isinstance(failure, tuple):
            await context.abort_with_status(status(*failure))
        end = pb.FINISH_REASON_LENGTH if failure is None else failure
        yield pb.GenerateStreamResponse(
            finished=pb.Finished(reason=end, completion_tokens=total),
            usage=pb.Usage(prompt_tokens=num_prompt, completion_tokens=total),
        )

    async def _tokenize(self, request: pb.TokenizeRequest, context: Any) -> Any:
        return pb.TokenizeResponse(token_ids=range(len(request.text.split())))

    async def _model(self, request: model_pb2.GetModelInfoRequest, context: Any) -> Any:
        if self.loading:
            self.loading -= 1
            await context.abort_with_status(status(grpc.StatusCode.UNAVAILABLE, "LOADING"))
        return model_pb2.GetModelInfoResponse(
            model=model_pb2.ModelInfo(
                name="team/fake", max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB_SIZE,
                eos_token_ids=[EOS], has_chat_template=True, max_num_seqs=4, dtype="float32",
                kv_cache=model_pb2.KvCacheInfo(num_blocks=8, block_size=16),
            )
        )  # fmt: skip


def status(code: grpc.StatusCode, reason: str) -> Any:
    """A failure as the server writes it."""
    info = any_pb2.Any()
    info.Pack(error_details_pb2.ErrorInfo(domain="cupaged", reason=reason))
    failure = status_pb2.Status(code=code.value[0], message="as planned", details=[info])
    return rpc_status.to_status(failure)


async def _server_info(request: model_pb2.GetServerInfoRequest, context: Any) -> Any:
    build = model_pb2.BuildInfo(python_version="3.14", platform="x", packages={"grpcio": "1.99"})
    return model_pb2.GetServerInfoResponse(version="9.9", device="cpu", build=build)


def _num_tokens(request: pb.GenerateStreamRequest) -> int:
    if request.HasField("token_ids"):
        return len(request.token_ids.ids)
    if request.HasField("chat"):
        return sum(len(message.content.split()) for message in request.chat.messages)
    return len(request.text.split())


def _handlers(service: str, **methods: tuple[Any, Any]) -> grpc.GenericRpcHandler:
    handlers = {}
    for name, (act, request) in methods.items():
        make: Any = grpc.unary_unary_rpc_method_handler
        if name == "GenerateStream":
            make = grpc.unary_stream_rpc_method_handler
        handlers[name] = make(act, request.FromString, lambda message: message.SerializeToString())
    return grpc.method_handlers_generic_handler(f"cupaged.v1.{service}", handlers)
