"""A server for tests of the client: it answers with scripted messages and errors, by real gRPC.

It knows no model. What it answers without a script is `generation`: the words of the prompt.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from dataclasses import dataclass, field
from typing import Any, Self

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2
from grpc_status import rpc_status

from cupaged.v1 import generation_pb2 as pb
from cupaged.v1 import model_pb2

Act = Callable[[Any, grpc.ServicerContext], Any]
WAIT_S = 20  # far longer than anything takes; a test that comes to it has failed


@dataclass(slots=True)
class Seen:
    """A call as it arrived. `ended` is set when it has ended, however it did."""

    method: str
    request: Any
    metadata: dict[str, str]
    remaining_s: float | None
    ended: threading.Event = field(default_factory=threading.Event)


class FakeServer:
    """Answers calls; `script` has what the next ones get instead of an answer.

    `health_script` is that of Health/Check, which tests call in between.

    An act is a function of request and context: it returns the answer, or iterates over messages,
    or aborts the context.
    """

    def __init__(
        self,
        credentials: grpc.ServerCredentials | None = None,
        address: str = "127.0.0.1:0",
    ) -> None:
        self.script: deque[Act] = deque()
        self.health_script: deque[Act] = deque()
        self.seen: list[Seen] = []
        self.health: dict[str, int] = {"": health_pb2.HealthCheckResponse.SERVING}
        self._changed = threading.Condition()
        self._server = grpc.server(
            futures.ThreadPoolExecutor(16), options=[("grpc.so_reuseport", 0)]
        )
        self._server.add_generic_rpc_handlers(self._handlers())
        if credentials is None:
            self.port = self._server.add_insecure_port(address)
        else:
            self.port = self._server.add_secure_port(address, credentials)
        self._server.start()

    @property
    def address(self) -> str:
        """For a client."""
        return f"127.0.0.1:{self.port}"

    def set_health(self, status: int, service: str = "") -> None:
        """Change the health; watchers are told."""
        with self._changed:
            self.health[service] = status
            self._changed.notify_all()

    def stop(self) -> None:
        """Cancel what runs and end."""
        self._server.stop(None).wait(WAIT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _handlers(self) -> list[grpc.GenericRpcHandler]:
        services: dict[str, dict[str, grpc.RpcMethodHandler[Any, Any]]] = {}
        health = "grpc.health.v1.Health"
        own = {
            f"{health}/Check": (health_pb2.HealthCheckRequest, self._check),
            f"{health}/Watch": (health_pb2.HealthCheckRequest, self._watch),
        }
        for path, (request, act) in {**_METHODS, **own}.items():
            service, _, method = path.partition("/")
            make: Any = grpc.unary_unary_rpc_method_handler
            if method in ("GenerateStream", "WatchLoad", "Watch"):
                make = grpc.unary_stream_rpc_method_handler
            services.setdefault(service, {})[method] = make(
                self._noting(method, act),
                request.FromString,
                lambda message: message.SerializeToString(),
            )
        return [grpc.method_handlers_generic_handler(*pair) for pair in services.items()]

    def _noting(self, method: str, act: Act) -> Act:
        def handle(request: Any, context: grpc.ServicerContext) -> Any:
            metadata = {str(k): str(v) for k, v in context.invocation_metadata()}
            seen = Seen(method, request, metadata, context.time_remaining())
            _when_over(context, seen.ended.set)
            self.seen.append(seen)
            script = self.health_script if method == "Check" else self.script
            return (script.popleft() if script else act)(request, context)

        return handle

    def _check(self, request: Any, context: grpc.ServicerContext) -> Any:
        return health_pb2.HealthCheckResponse(status=self.health[request.service])

    def _watch(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        told: int | None = None
        _when_over(context, self._wake)
        while context.is_active():
            with self._changed:
                status = self.health[request.service]
                if status == told:
                    self._changed.wait(WAIT_S)
                    continue
            told = status
            yield health_pb2.HealthCheckResponse(status=status)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()


def _when_over(context: grpc.ServicerContext, call: Callable[[], None]) -> None:
    """Call a function when an RPC has ended, also if it has by now."""
    if not context.add_callback(call):
        call()


def fails(
    code: grpc.StatusCode,
    message: str,
    reason: str = "",
    *details: Message,
    pushback_ms: str | None = None,
) -> Act:
    """An act: a failure with details, as the server writes them."""

    def act(request: Any, context: grpc.ServicerContext) -> Any:
        if pushback_ms is not None:
            context.set_trailing_metadata((("grpc-retry-pushback-ms", pushback_ms),))
        if not reason and not details:
            context.abort(code, message)
        info = error_details_pb2.ErrorInfo(domain="cupaged", reason=reason)
        packed = []
        for detail in (info, *details):
            entry = any_pb2.Any()
            entry.Pack(detail)
            packed.append(entry)
        number = code.value[0]
        status = status_pb2.Status(code=number, message=message, details=packed)
        context.abort_with_status(rpc_status.to_status(status))

    return act


def retry_info(seconds: float) -> error_details_pb2.RetryInfo:
    """A detail: come back after that time."""
    info: error_details_pb2.RetryInfo = error_details_pb2.RetryInfo()
    info.retry_delay.FromNanoseconds(round(seconds * 1e9))
    return info


QUEUE_FULL = (grpc.StatusCode.RESOURCE_EXHAUSTED, "32 requests wait already", "QUEUE_FULL")


def words_of(request: Any) -> list[str]:
    """The answer to a request: its own words, or `w<id>` for token ids."""
    kind = request.WhichOneof("input")
    if kind == "text":
        return str(request.text).split()
    if kind == "chat":
        return [word for message in request.chat.messages for word in message.content.split()]
    return [f"w{token}" for token in request.token_ids.ids]


def usage(words: Sequence[str], samples: int = 1) -> pb.Usage:
    """A prompt and an answer of that many words."""
    used = pb.Usage(prompt_tokens=len(words), completion_tokens=len(words) * samples)
    used.time_to_first_token.FromMilliseconds(250)
    return used


def messages(request: Any, words: Sequence[str]) -> Iterator[pb.GenerateStreamResponse]:
    """A whole stream: each sample has the words, one a message."""
    name, num = request.request_id, request.sampling.n or 1
    started = pb.Started(request_id=name, model="fake", prompt_tokens=len(words))
    yield pb.GenerateStreamResponse(started=started)
    for i, word in enumerate(words):
        for index in range(num):
            delta = pb.Delta(index=index, text=f"{word} ", token_ids=[i])
            yield pb.GenerateStreamResponse(delta=delta)
    for index in range(num):
        end = pb.Finished(index=index, reason=pb.FINISH_REASON_STOP, completion_tokens=len(words))
        last = usage(words, num) if index == num - 1 else None
        yield pb.GenerateStreamResponse(finished=end, usage=last)


def stream(request: Any, context: grpc.ServicerContext) -> Iterator[pb.GenerateStreamResponse]:
    """An act: the whole stream."""
    yield from messages(request, words_of(request))


def stalls_after(count: int) -> Act:
    """An act: that many messages, then silence until the client has gone."""

    def act(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        gone = threading.Event()
        _when_over(context, gone.set)
        for number, message in enumerate(messages(request, words_of(request))):
            if number == count:
                break
            yield message
        gone.wait(WAIT_S)

    return act


def fails_after(count: int, failure: Act) -> Act:
    """An act: that many messages, then a failure."""

    def act(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        for number, message in enumerate(messages(request, words_of(request))):
            if number == count:
                break
            yield message
        failure(request, context)

    return act


def stalls(request: Any, context: grpc.ServicerContext) -> None:
    """An act for a call that is no stream: silence until the client has gone."""
    gone = threading.Event()
    _when_over(context, gone.set)
    gone.wait(WAIT_S)


def _generate(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Any:
    words, num = words_of(request), request.sampling.n or 1
    return pb.GenerateResponse(
        request_id=request.request_id,
        model="fake",
        usage=usage(words, num),
        samples=[
            pb.Sample(
                index=index, text=" ".join(words), token_ids=range(len(words)),
                finish_reason=pb.FINISH_REASON_LENGTH, completion_tokens=len(words),
            )
            for index in range(num)
        ],
    )  # fmt: skip


def _tokenize(request: pb.TokenizeRequest, context: grpc.ServicerContext) -> Any:
    return pb.TokenizeResponse(token_ids=range(len(words_of(request))), max_model_len=64)


def _detokenize(request: pb.DetokenizeRequest, context: grpc.ServicerContext) -> Any:
    return pb.DetokenizeResponse(text=" ".join(f"w{token}" for token in request.token_ids))


def _render(request: pb.ApplyChatTemplateRequest, context: grpc.ServicerContext) -> Any:
    said = request.chat.messages
    words = [word for message in said for word in message.content.split()]
    text = "|".join(f"{message.role}:{message.content}" for message in said)
    return pb.ApplyChatTemplateResponse(text=text, token_ids=range(len(words)))


def _abort(request: pb.AbortRequest, context: grpc.ServicerContext) -> Any:
    return pb.AbortResponse(aborted_request_ids=request.request_ids[:1])


def model(name: str) -> model_pb2.ModelInfo:
    """A described model; its authors recommend a temperature."""
    return model_pb2.ModelInfo(
        name=name, aliases=["other"], max_model_len=64, vocab_size=100, eos_token_ids=[2],
        has_chat_template=True,
        default_sampling=pb.SamplingOptions(temperature=0.5, top_k=7, bad_words=["x"]),
        default_max_new_tokens=9, max_num_seqs=4, dtype="float32",
        kv_cache=model_pb2.KvCacheInfo(num_blocks=8, block_size=16),
    )  # fmt: skip


def _info(request: model_pb2.GetModelInfoRequest, context: grpc.ServicerContext) -> Any:
    return model_pb2.GetModelInfoResponse(model=model(request.model or "fake"))


def _list(request: model_pb2.ListModelsRequest, context: grpc.ServicerContext) -> Any:
    """Two pages."""
    if request.page_token:
        return model_pb2.ListModelsResponse(models=[model("second")])
    return model_pb2.ListModelsResponse(models=[model("first")], next_page_token="2")


def _server(request: model_pb2.GetServerInfoRequest, context: grpc.ServicerContext) -> Any:
    return model_pb2.GetServerInfoResponse(
        version="9.9", features=["prefix_cache"], api_packages=["cupaged.v1"], device="cpu",
        build=model_pb2.BuildInfo(python_version="3.14", packages={"grpcio": "1.99"}),
    )  # fmt: skip


def load(num_running: int) -> model_pb2.Load:
    """A snapshot of a server that is ready."""
    return model_pb2.Load(
        state=model_pb2.ENGINE_STATE_READY, num_running=num_running, num_waiting=2,
        max_num_seqs=64, max_num_queued_reqs=256, num_kv_blocks=100, num_used_kv_blocks=25,
        kv_cache_usage=0.25, generation_tokens_per_second=123.4, finished_total={"stop": 3},
    )  # fmt: skip


def _load(request: model_pb2.GetLoadRequest, context: grpc.ServicerContext) -> Any:
    return model_pb2.GetLoadResponse(load=load(1))


def _loads(request: model_pb2.WatchLoadRequest, context: grpc.ServicerContext) -> Iterator[Any]:
    gone = threading.Event()
    _when_over(context, gone.set)
    num_running = 0
    while not gone.is_set():
        num_running += 1
        yield model_pb2.WatchLoadResponse(load=load(num_running))
        gone.wait(request.interval.ToTimedelta().total_seconds())


_GENERATION = "cupaged.v1.GenerationService"
_MODEL = "cupaged.v1.ModelService"
_METHODS: dict[str, tuple[Any, Act]] = {
    f"{_GENERATION}/Generate": (pb.GenerateRequest, _generate),
    f"{_GENERATION}/GenerateStream": (pb.GenerateStreamRequest, stream),
    f"{_GENERATION}/Tokenize": (pb.TokenizeRequest, _tokenize),
    f"{_GENERATION}/Detokenize": (pb.DetokenizeRequest, _detokenize),
    f"{_GENERATION}/ApplyChatTemplate": (pb.ApplyChatTemplateRequest, _render),
    f"{_GENERATION}/Abort": (pb.AbortRequest, _abort),
    f"{_MODEL}/GetModelInfo": (model_pb2.GetModelInfoRequest, _info),
    f"{_MODEL}/ListModels": (model_pb2.ListModelsRequest, _list),
    f"{_MODEL}/GetServerInfo": (model_pb2.GetServerInfoRequest, _server),
    f"{_MODEL}/GetLoad": (model_pb2.GetLoadRequest, _load),
    f"{_MODEL}/WatchLoad": (model_pb2.WatchLoadRequest, _loads),
}
