"""`cupaged.v1.ModelService`: what is served, what the server is, and how busy it is."""

from __future__ import annotations

import asyncio
import hashlib
import platform
import time
from collections.abc import Sequence
from importlib import metadata

from cupaged._version import __version__
from cupaged.errors import DrainingError, InvalidParameterError, LoadingError
from cupaged.server.conversions import seconds_of
from cupaged.server.engine_client import EngineClient
from cupaged.server.field_paths import PARAMETER_PATHS
from cupaged.server.load_tracker import LoadTracker
from cupaged.server.rpc import Call
from cupaged.server.served_model import ServedModel
from cupaged.server.tokenizer_files import tokenizer_files
from cupaged.server.wire_forms import EngineInfo
from cupaged.v1 import generation_pb2, model_pb2
from cupaged.v1 import model_pb2 as pb

CHUNK_BYTES = 1 << 20
_MIN_INTERVAL_S, _MAX_INTERVAL_S = 0.1, 3600.0
_PACKAGES = ("grpcio", "numpy", "protobuf", "tokenizers", "uvloop", "cupy-cuda12x", "cupy-cuda13x")


class ModelService:
    """Tells about one model and this server.

    Args:
        model: of this front end.
        client: of the engine.
        loads: kept up to date by the front end.
        features: what the server can do beyond the first version of the interface.
        compatible_packages: of the services beside those of cupaged.
        start_time_ns: when the server was started, in nanoseconds since 1970.
    """

    def __init__(
        self,
        model: ServedModel,
        client: EngineClient,
        loads: LoadTracker,
        *,
        features: tuple[str, ...] = (),
        compatible_packages: Sequence[str] = (),
        start_time_ns: int | None = None,
    ) -> None:
        self._model = model
        self._client = client
        self._loads = loads
        self._features = features
        self._packages = [generation_pb2.DESCRIPTOR.package, *compatible_packages]
        self._start_time_ns = time.time_ns() if start_time_ns is None else start_time_ns
        self._load_time_ns: int | None = None
        self._closing = asyncio.Event()

    def engine_ready(self) -> None:
        """The engine takes requests from now on."""
        self._load_time_ns = time.time_ns()

    def close(self) -> None:
        """End the streams that have no end of their own."""
        self._closing.set()

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, call: Call
    ) -> pb.GetModelInfoResponse:
        """Describe a model; LOADING while little is known of it."""
        self._model.check_name(request.model)
        return pb.GetModelInfoResponse(model=self._describe())

    async def ListModels(self, request: pb.ListModelsRequest, call: Call) -> pb.ListModelsResponse:
        """The one model, on the one page."""
        if request.page_size < 0:
            raise InvalidParameterError("page_size", request.page_size, ">= 0")
        if request.page_token:
            allowed = "empty, or a next_page_token of this server"
            raise InvalidParameterError("page_token", request.page_token, allowed)
        return pb.ListModelsResponse(models=[self._describe()])

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, call: Call
    ) -> pb.GetServerInfoResponse:
        """Describe the server, whatever its state."""
        info = self._client.info
        response = pb.GetServerInfoResponse(
            version=__version__,
            features=[*self._features, *_features(info)],
            build=pb.BuildInfo(
                python_version=platform.python_version(),
                platform=f"{platform.system()} {platform.machine()}",
                packages=_versions(),
            ),
            api_packages=self._packages,
            device="" if info is None else _device(info),
        )
        response.start_time.FromNanoseconds(self._start_time_ns)
        return response

    async def GetLoad(self, request: pb.GetLoadRequest, call: Call) -> pb.GetLoadResponse:
        """How busy the engine is, whatever its state."""
        self._model.check_name(request.model)
        return pb.GetLoadResponse(load=self._load())

    async def WatchLoad(self, request: pb.WatchLoadRequest, call: Call) -> None:
        """The same again and again; ends with DRAINING when the server does."""
        self._model.check_name(request.model)
        interval_s = 1.0
        if request.HasField("interval"):
            interval_s = seconds_of(request.interval, "interval")
            if not _MIN_INTERVAL_S <= interval_s <= _MAX_INTERVAL_S:
                allowed = f"in [{_MIN_INTERVAL_S:g}, {_MAX_INTERVAL_S:g}] seconds"
                raise InvalidParameterError("interval", interval_s, allowed)
        while True:
            await call.write(pb.WatchLoadResponse(load=self._load()))
            if self._closing.is_set():
                raise DrainingError("the server is ending")
            try:
                async with asyncio.timeout(interval_s):
                    await self._closing.wait()
            except TimeoutError:
                continue

    async def GetTokenizer(self, request: pb.GetTokenizerRequest, call: Call) -> None:
        """The files of the tokenizer, in chunks."""
        model = self._model
        model.check_name(request.model)
        files = tokenizer_files(model.text)
        while (file := await asyncio.to_thread(next, files, None)) is not None:
            name, content = file
            for start in range(0, len(content) or 1, CHUNK_BYTES):
                is_last = start + CHUNK_BYTES >= len(content)
                await call.write(
                    pb.GetTokenizerResponse(
                        file_name=name,
                        file_size_bytes=len(content),
                        data=content[start : start + CHUNK_BYTES],
                        sha256=hashlib.sha256(content).hexdigest() if is_last else "",
                    )
                )

    def _load(self) -> model_pb2.Load:
        info = self._client.info
        return self._loads.load(self._client.state, None if info is None else info.config)

    def _describe(self) -> pb.ModelInfo:
        info, model = self._client.info, self._model
        if info is None:
            raise LoadingError("the model is still being loaded")
        config = info.config
        described = pb.ModelInfo(
            name=model.name,
            aliases=model.names[1:],
            architecture=info.architecture,
            max_model_len=config.max_model_len,
            vocab_size=config.vocab_size,
            eos_token_ids=info.eos_token_ids,
            bos_token_id=model.tokenizer.bos_token_id,
            has_chat_template=model.text.template is not None,
            default_sampling=_sampling_defaults(info),
            default_max_new_tokens=info.generation_defaults.get("max_tokens"),
            max_logprobs=config.max_logprobs,
            max_num_seqs=config.max_num_seqs,
            num_parameters=info.num_parameters,
            dtype=info.dtype,
            kv_cache=pb.KvCacheInfo(num_blocks=config.num_blocks, block_size=config.block_size),
        )
        if self._load_time_ns is not None:
            described.load_time.FromNanoseconds(self._load_time_ns)
        return described


def _sampling_defaults(info: EngineInfo) -> generation_pb2.SamplingOptions:
    """What the generation configuration says of `SamplingOptions`."""
    options = generation_pb2.SamplingOptions()
    for name, value in info.generation_defaults.items():
        group, _, field = PARAMETER_PATHS[name].partition(".")
        if group == "sampling":
            setattr(options, field, value)
    return options


def _device(info: EngineInfo) -> str:
    """The name of a GPU, else the name of the device."""
    return info.device_description.split(",")[0] if info.device == "cuda" else info.device


def _versions() -> dict[str, str]:
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _features(info: EngineInfo | None) -> list[str]:
    """What the engine adds to the features, as soon as it is known."""
    if info is None or not info.config.enable_prefix_caching:
        return []
    return ["prefix_cache"]
