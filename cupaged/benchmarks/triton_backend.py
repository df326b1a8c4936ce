"""The backend `triton`: inference.GRPCInferenceService, with the tensors of Triton's vLLM backend.

A request is a ModelStreamInfer of its own, which the server ends after the last answer. A model
that is not decoupled, which has one answer a request, is asked by ModelInfer. What the model does
not have among its inputs is not sent: without `return_num_output_tokens`, as in old releases of
that backend, texts are what is told of an answer.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from itertools import cycle
from typing import Any

import grpc

from cupaged.benchmarks.backend import (
    NO_LIMIT,
    BackendOptions,
    Received,
    RequestFailed,
    ServerFacts,
    ServerNotReady,
    ServerUnusable,
    Usage,
    chosen_name,
)
from cupaged.benchmarks.datasets import ModelFacts, Sample
from cupaged.benchmarks.grpc_channels import GrpcChannels, messages, whole
from cupaged.benchmarks.readiness import when_ready
from cupaged.client.errors import UnreachableError, error_from_status
from cupaged.server.compat.interface import Interface

__all__ = ["TritonBackend"]

_SERVICE = "inference.GRPCInferenceService"
_CALL_S = 10.0  # for an answer that needs no model
_COUNTS = ("return_num_input_tokens", "return_num_output_tokens")
_NEEDED = ("text_input", "sampling_parameters")
_FAILED_ENDS = ("abort", "error")


class TritonBackend:
    """See `Backend`. `address` is what `cupaged.client.Client` takes."""

    def __init__(self, options: BackendOptions) -> None:
        self._options = options
        self._channels = GrpcChannels(options)
        self._interface = Interface("kserve", _SERVICE)
        self._request = self._interface.message("ModelInferRequest")
        self._whole = self._interface.message("ModelInferResponse")
        self._part = self._interface.message("ModelStreamInferResponse")
        self._model = options.model
        self._dimensions: dict[str, int] = {}  # of the inputs of the model
        self._counts = False  # the server tells how many tokens there are
        self._streams = True
        self._calls: Any = None

    def facts(self, wait_s: float) -> ServerFacts:
        """What the server tells of itself and the model's inputs.

        Raises:
            ClientError, ServerUnusable: not ready in time, or another failure, at once.
        """
        return when_ready(self._facts, wait_s, (ServerNotReady, UnreachableError))

    def prepare(self, sample: Sample, request_id: str) -> bytes:
        """The serialised request."""
        sampling = {**self._options.sampling, "max_tokens": sample.max_tokens}
        request = self._request(model_name=self._model, id=request_id)
        self._add(request, "text_input", "BYTES", _packed(str(sample.prompt)))
        self._add(request, "sampling_parameters", "BYTES", _packed(json.dumps(sampling)))
        for name, value in (
            ("stream", self._streams), ("exclude_input_in_output", True),
            ("return_finish_reason", True), *((name, self._counts) for name in _COUNTS),
        ):  # fmt: skip
            if name in self._dimensions:
                self._add(request, name, "BOOL", bytes([value]))
        data: bytes = request.SerializeToString()
        return data

    async def open(self) -> None:
        """Connect.

        Raises:
            RequestFailed: there is no connection.
        """
        await self._channels.open()
        # Without (de)serialisers the bytes of the messages pass as they are.
        channels: Any = self._channels.channels
        if self._streams:
            calls = [c.stream_stream(f"/{_SERVICE}/ModelStreamInfer") for c in channels]
        else:
            calls = [c.unary_unary(f"/{_SERVICE}/ModelInfer") for c in channels]
        self._calls = cycle(calls)

    async def request(self, prepared: bytes) -> AsyncGenerator[Received, None]:
        """Send it over the next connection in turn; give its messages."""
        timeout_s, metadata = self._options.timeout_s, self._channels.metadata
        start = next(self._calls)
        if self._streams:
            answer = messages(start(iter([prepared]), timeout=timeout_s, metadata=metadata))
        else:
            answer = whole(start(prepared, timeout=timeout_s, metadata=metadata))
        num_parts, usage = 0, Usage(0, 0)
        now = time.perf_counter()
        async with aclosing(answer) as received:
            async for data in received:
                now = time.perf_counter()
                outputs = self._outputs(data)
                if not outputs:
                    continue  # the end of an answer, told by a message of its own
                num_parts += 1
                end = _first(outputs, "finish_reason").decode("latin-1").lower()
                if end in _FAILED_ENDS:
                    raise RequestFailed(f"OK {end}", f"the server ended the answer: {end}")
                if self._counts:
                    num_new = _number(outputs, "num_output_tokens")
                    total = usage.completion_tokens + num_new
                    usage = Usage(_number(outputs, "num_input_tokens"), total)
                    yield Received(now, num_new)
                else:
                    text = _first(outputs, "text_output").decode("utf-8", "replace")
                    yield Received(now, 0, None, text)
        if not num_parts:
            raise RequestFailed("OK incomplete", "the answer ended without any output")
        yield Received(now, 0, usage if self._counts else None)

    async def close(self) -> None:
        """Cancel what runs and disconnect."""
        await self._channels.close()

    def _outputs(self, data: bytes) -> dict[str, bytes]:
        """Raw values of an answer by their names.

        Raises:
            RequestFailed: it tells of a failure.
        """
        if self._streams:
            message = self._part.FromString(data)
            if message.error_message:
                raise RequestFailed("OK error", " ".join(message.error_message.split()))
            response = message.infer_response
        else:
            response = self._whole.FromString(data)
        names = [output.name for output in response.outputs]
        if len(names) != len(response.raw_output_contents):
            raise RequestFailed("protocol error", "an answer whose values are not raw bytes")
        return dict(zip(names, response.raw_output_contents, strict=True))

    def _add(self, request: Any, name: str, datatype: str, data: bytes) -> None:
        """A tensor of one element, in as many dimensions as the model wants."""
        shape = [1] * self._dimensions.get(name, 1)
        request.inputs.add(name=name, datatype=datatype, shape=shape)
        request.raw_input_contents.append(data)

    def _facts(self) -> ServerFacts:
        connection = self._channels.connection
        credentials = connection.credentials()
        if credentials is None:
            channel = grpc.insecure_channel(connection.target, connection.options)
        else:
            channel = grpc.secure_channel(connection.target, credentials, connection.options)
        with channel:
            ask = _Asker(self._interface, channel, connection.metadata())
            if not ask("ServerReady").ready:
                raise ServerNotReady(f"{self._options.address}: the server is not ready")
            server = ask("ServerMetadata")
            if not self._model:
                index = ask("RepositoryIndex", ready=True)
                names = dict.fromkeys(m.name for m in index.models if m.state in ("", "READY"))
                self._model = chosen_name("", [*names])
            if not ask("ModelReady", name=self._model).ready:
                raise ServerNotReady(f"{self._options.address}: {self._model!r} is not ready there")
            model = ask("ModelMetadata", name=self._model)
            config = ask("ModelConfig", name=self._model).config
        self._dimensions = {tensor.name: len(tensor.shape) for tensor in model.inputs}
        for name in _NEEDED:
            if name not in self._dimensions:
                raise ServerUnusable(
                    f"{self._model!r} has no input {name}: it is no model of Triton's vLLM "
                    f"backend; its inputs are {', '.join(self._dimensions) or 'none'}"
                )
        self._counts = self._dimensions.keys() >= {*_COUNTS}
        self._streams = config.model_transaction_policy.decoupled
        facts = ModelFacts(self._model, vocab_size=0, max_model_len=NO_LIMIT)  # both are not told
        about = {
            "name": server.name, "version": server.version, "platform": model.platform,
            "decoupled": self._streams,
        }  # fmt: skip
        return ServerFacts(facts, about)


class _Asker:
    """Blocking calls by their names."""

    def __init__(self, interface: Interface, channel: Any, metadata: Any) -> None:
        self._interface, self._channel, self._metadata = interface, channel, metadata

    def __call__(self, name: str, /, **fields: Any) -> Any:
        """The answer.

        Raises:
            ClientError: there is none.
        """
        method = self._interface.service.methods_by_name[name]
        call = self._channel.unary_unary(
            f"/{_SERVICE}/{name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=self._interface.message(method.output_type.name).FromString,
        )
        request = self._interface.message(method.input_type.name)(**fields)
        try:
            return call(request, timeout=_CALL_S, metadata=self._metadata)
        except grpc.RpcError as error:
            told: Any = error
            trailer = told.trailing_metadata() or ()
            raise error_from_status(told.code(), told.details(), trailer) from None


def _packed(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<I", len(data)) + data


def _first(outputs: dict[str, bytes], name: str) -> bytes:
    """The first element of an output of BYTES; empty if there is no such output."""
    return outputs.get(name, b"")[4:]


def _number(outputs: dict[str, bytes], name: str) -> int:
    """The first element of an output of UINT32."""
    data = outputs.get(name, b"")
    if len(data) < 4:
        raise RequestFailed("protocol error", f"an answer without {name}")
    (number,) = struct.unpack_from("<I", data)
    return int(number)
