"""`inference.GRPCInferenceService`: the KServe v2 protocol with its streaming extension.

Clients of Triton's vLLM backend find their tensors here, and those of its TensorRT-LLM backend most
of theirs. RPCs that are not here (shared memory, loading models, tracing) are UNIMPLEMENTED.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import grpc

from cupaged._version import __version__
from cupaged.engine.text_shell import TextRequest
from cupaged.errors import CupagedError, InvalidParameterError
from cupaged.server.compat import ServiceParts
from cupaged.server.compat.interface import Interface
from cupaged.server.compat.kserve_answers import InferAnswers, error_answer
from cupaged.server.compat.kserve_model import NAME, ModelDescription
from cupaged.server.compat.kserve_request import InferRequest, field_path, read_request
from cupaged.server.compat.kserve_statistics import Statistics
from cupaged.server.compat.kserve_stream import InferStream
from cupaged.server.conversions import Asked
from cupaged.server.observation import Observation
from cupaged.server.output_stream import OutputStream
from cupaged.server.request_intake import read_whole, take_outputs
from cupaged.server.rpc import REQUEST_ID_KEY, Call

SERVICE = "inference.GRPCInferenceService"
_EXTENSIONS = ("model_configuration", "model_repository", "parameters", "statistics")


def service(parts: ServiceParts) -> KServeService:
    """The service of a front end."""
    return KServeService(parts)


class KServeService:
    """Answers with one model. Methods have the names and messages of the .proto file."""

    def __init__(self, parts: ServiceParts) -> None:
        self._interface = Interface("kserve", SERVICE)
        self._message = self._interface.message
        self._intake = parts.intake
        self._model = ModelDescription(self._interface, self._intake)
        self._statistics = Statistics(parts.statistics_file)
        self._streams: set[InferStream] = set()

    @property
    def descriptor(self) -> Any:
        """Of the service."""
        return self._interface.service

    def close(self) -> None:
        """End the streams, which clients keep open, after the requests that run."""
        for stream in self._streams:
            stream.close()

    async def ServerLive(self, request: Any, call: Call) -> Any:
        """This process answers, so it is."""
        return self._message("ServerLiveResponse")(live=True)

    async def ServerReady(self, request: Any, call: Call) -> Any:
        """Whether requests are taken now."""
        return self._message("ServerReadyResponse")(ready=self._intake.is_ready)

    async def ModelReady(self, request: Any, call: Call) -> Any:
        """The same for a model; an unknown one is never ready."""
        ready = self._model.has(request.name, request.version) and self._intake.is_ready
        return self._message("ModelReadyResponse")(ready=ready)

    async def ServerMetadata(self, request: Any, call: Call) -> Any:
        """What this server is."""
        return self._message("ServerMetadataResponse")(
            name=NAME, version=__version__, extensions=_EXTENSIONS
        )

    async def ModelMetadata(self, request: Any, call: Call) -> Any:
        """The tensors."""
        return self._model.metadata(request.name, request.version)

    async def ModelConfig(self, request: Any, call: Call) -> Any:
        """The tensors, and that requests may have many answers."""
        return self._model.config(request.name, request.version)

    async def ModelStatistics(self, request: Any, call: Call) -> Any:
        """What became of the requests that came by this service, to whichever front end."""
        names = [*self._intake.model.names]
        if request.name or request.version:
            names = [self._model.check(request.name, request.version)]
        return self._statistics.message(self._interface, names)

    async def RepositoryIndex(self, request: Any, call: Call) -> Any:
        """The names of the model."""
        if request.repository_name:
            raise InvalidParameterError("repository_name", request.repository_name, "empty")
        return self._model.index(only_ready=request.ready)

    async def ModelInfer(self, request: Any, call: Call) -> Any:
        """Answer when the last sample has ended."""
        observation = self._intake.observe(call, f"{SERVICE}/ModelInfer", stream=False)
        stream: OutputStream | None = None
        try:
            stream, text, answers = await self._begin(request, call, observation, streams=False)
            await read_whole(stream, text)
            response = answers.whole()
            await call.check_size(response.ByteSize())
            await call.context.send_initial_metadata(((REQUEST_ID_KEY, call.request_id),))
            self._finished(observation, text, response.ByteSize())
            return response
        except asyncio.CancelledError:
            observation.dropped()
            raise
        finally:
            self._close(stream, observation)

    async def ModelStreamInfer(self, requests: AsyncIterator[tuple[Any, Call]], call: Call) -> None:
        """Answer any number of requests, each when its tokens come."""
        stream = InferStream(call, self._answer)
        self._streams.add(stream)
        try:
            await stream.run(requests)
        finally:
            self._streams.discard(stream)

    async def _answer(self, request: Any, call: Call, to: InferStream) -> None:
        """Answer one request of a stream; whatever is wrong with it is told there."""
        observation = self._intake.observe(call, f"{SERVICE}/ModelStreamInfer", stream=True)
        stream: OutputStream | None = None
        try:
            stream, text, answers = await self._begin(request, call, observation, streams=True)
            stream.on_failure = to.request_failed
            while not text.finished:
                moved = take_outputs(await stream.next(), stream, text)
                message = answers.part(moved)
                if message is not None:
                    data = message.SerializeToString()
                    await call.check_size(len(data))
                    observation.meter.wrote(len(data))
                    await to.write(data)
            self._finished(observation, text)
        except asyncio.CancelledError:
            if isinstance(to.failure, CupagedError):  # what became of the stream
                call.failed(to.failure)
            observation.dropped()
            raise
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            status = call.failed(error)
            name = request.model_name or self._intake.model.name
            answer = error_answer(self._interface, name, request.id, status.details)
            await to.write(answer.SerializeToString())
        finally:
            self._close(stream, observation)

    async def _begin(
        self, request: Any, call: Call, observation: Observation, *, streams: bool
    ) -> tuple[OutputStream, TextRequest, InferAnswers]:
        """Hand a request to the engine. Its id is for the client alone, who may use it again."""
        call.field_path = field_path
        wanted: list[InferRequest] = []

        def ask() -> Asked:
            read = read_request(request)
            if read.stream and not streams:
                raise InvalidParameterError("stream", True, "false, or sent by ModelStreamInfer")
            wanted.append(read)
            return read.asked

        name = self._model.check(request.model_name, request.model_version)
        prepared = await self._intake.prepare(str(uuid.uuid4()), name, ask, call, observation)
        stream, text = self._intake.submit(prepared, observation)
        tokenizer = self._intake.model.tokenizer
        answers = InferAnswers(self._interface, name, request, wanted[0], text, tokenizer)
        return stream, text, answers

    def _finished(self, observation: Observation, text: TextRequest, num_bytes: int = 0) -> None:
        observation.finished(text, num_bytes)
        now = time.perf_counter()
        self._statistics.succeeded(now - observation.arrival_time, text.metrics(now))

    def _close(self, stream: OutputStream | None, observation: Observation) -> None:
        if stream is not None:
            stream.close()
        if not observation.is_answered:
            self._statistics.failed(time.perf_counter() - observation.arrival_time)
