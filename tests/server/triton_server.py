"""A server of inference.GRPCInferenceService for tests, as Triton is with its vLLM backend."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from tests.server.kserve_messages import INTERFACE, message, packed
from tests.server.loop_thread import LoopThread

INPUTS = (
    "text_input", "stream", "sampling_parameters", "exclude_input_in_output",
    "return_finish_reason", "return_num_input_tokens", "return_num_output_tokens",
)  # fmt: skip
OLD_INPUTS = INPUTS[:4]  # of releases that count no tokens
Answers = Sequence[dict[str, Any] | str | grpc.StatusCode]


class TritonServer(LoopThread):
    """Answers calls until the block of its context is left.

    Args:
        answer: of a request, the outputs of each answer; a text is an error, a code ends the call.
        models: names of the repository.
        inputs: of each model.
        decoupled: requests have several answers.
        dimensions: of each input.
        not_ready: how many calls of ServerReady say so.
    """

    def __init__(
        self,
        answer: Callable[[Any], Answers],
        *,
        models: Sequence[str] = ("m",),
        inputs: Sequence[str] = INPUTS,
        decoupled: bool = True,
        dimensions: int = 1,
        not_ready: int = 0,
    ) -> None:
        super().__init__()
        self._answer = answer
        self._models = models
        self._inputs = inputs
        self._decoupled = decoupled
        self._dimensions = dimensions
        self._not_ready = not_ready
        self.requests: list[Any] = []

    async def serve(self) -> None:
        """By gRPC."""
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        handlers = {}
        for method in INTERFACE.service.methods:
            if (act := getattr(self, method.name, None)) is None:
                continue
            make: Any = grpc.unary_unary_rpc_method_handler
            if method.client_streaming:
                make = grpc.stream_stream_rpc_method_handler
            read = INTERFACE.message(method.input_type.name).FromString
            handlers[method.name] = make(act, read, lambda answer: answer.SerializeToString())
        name = INTERFACE.service.full_name
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(name, handlers)])
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        self.is_ready(f"127.0.0.1:{port}")
        await self.until_the_end()
        await server.stop(None)

    async def ServerReady(self, request: Any, context: Any) -> Any:
        self._not_ready -= 1
        return message("ServerReadyResponse", ready=self._not_ready < 0)

    async def ServerMetadata(self, request: Any, context: Any) -> Any:
        return message("ServerMetadataResponse", name="triton", version="2.73.0")

    async def RepositoryIndex(self, request: Any, context: Any) -> Any:
        make = INTERFACE.message("RepositoryIndexResponse.ModelIndex")
        models = [make(name=name, version="1", state="READY") for name in self._models]
        return message("RepositoryIndexResponse", models=models)

    async def ModelReady(self, request: Any, context: Any) -> Any:
        return message("ModelReadyResponse", ready=request.name in self._models)

    async def ModelMetadata(self, request: Any, context: Any) -> Any:
        make = INTERFACE.message("ModelMetadataResponse.TensorMetadata")
        shape = [1] * self._dimensions
        inputs = [make(name=name, datatype="X", shape=shape) for name in self._inputs]
        return message("ModelMetadataResponse", name=request.name, platform="vllm", inputs=inputs)

    async def ModelConfig(self, request: Any, context: Any) -> Any:
        policy = {"decoupled": self._decoupled}
        config = message("ModelConfig", model_transaction_policy=policy)
        return message("ModelConfigResponse", config=config)

    async def ModelInfer(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        (answer,) = self._answer(request)
        if isinstance(answer, grpc.StatusCode):
            await context.abort(answer, "as planned")
        assert isinstance(answer, dict)
        return _response(answer)

    async def ModelStreamInfer(self, requests: AsyncIterator[Any], context: Any) -> Any:
        async for request in requests:
            self.requests.append(request)
            for answer in self._answer(request):
                if isinstance(answer, grpc.StatusCode):
                    await context.abort(answer, "as planned")
                elif isinstance(answer, str):
                    yield message("ModelStreamInferResponse", error_message=answer)
                else:
                    yield message("ModelStreamInferResponse", infer_response=_response(answer))


def _response(outputs: dict[str, Any]) -> Any:
    """Texts are BYTES, numbers are UINT32."""
    response = message("ModelInferResponse")
    for name, value in outputs.items():
        datatype = "UINT32" if isinstance(value, int) else "BYTES"
        data = value if isinstance(value, int) else value.encode()
        response.outputs.add(name=name, datatype=datatype, shape=[1])
        response.raw_output_contents.append(packed(datatype, [data]))
    return response
