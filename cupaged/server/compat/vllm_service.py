"""`vllm.grpc.engine.VllmEngine`: the interface of the SMG gateway, token ids in and out.

A request becomes the same request of the engine as one of `cupaged.v1`, and fails with the same
statuses. What the service has and cupaged has not is UNIMPLEMENTED.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import time
import uuid
import zipfile
from datetime import UTC, datetime
from typing import Any

from cupaged._version import __version__
from cupaged.errors import LoadingError
from cupaged.server.compat import ServiceParts
from cupaged.server.compat.interface import Interface
from cupaged.server.compat.vllm_answers import VllmAnswers, VllmWholeAnswers
from cupaged.server.compat.vllm_requests import asked_of, paths_for
from cupaged.server.event_stream import EventStream
from cupaged.server.model_text import ModelText
from cupaged.server.output_stream import OutputStream
from cupaged.server.rpc import REQUEST_ID_KEY, Call
from cupaged.server.tokenizer_files import tokenizer_files
from cupaged.v1 import model_pb2

SERVICE = "vllm.grpc.engine.VllmEngine"
CHUNK_BYTES = 1 << 18
_TEMPLATE = "chat_template.jinja"
# The gateway looks at this path before it calls GetTokenizer, and takes one that does not exist for
# a name on the hub. Its own copy of the model's folder would lack the template that is served.
_NO_TOKENIZER = "/dev/null"
_TELLABLE_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def service(parts: ServiceParts) -> VllmEngineService:
    """The service of a front end."""
    return VllmEngineService(parts)


class VllmEngineService:
    """Answers with one model. Methods have the names and messages of the .proto file."""

    def __init__(self, parts: ServiceParts) -> None:
        self._interface = Interface("vllm", SERVICE)
        self._message = self._interface.message
        self._intake = parts.intake
        self._model = parts.intake.model
        self._client = parts.intake.client
        self._loads = parts.loads
        self._started = time.monotonic()
        self._last_request = time.time()

    @property
    def descriptor(self) -> Any:
        """Of the service."""
        return self._interface.service

    def close(self) -> None:
        """Nothing here has no end of its own."""

    async def Generate(self, request: Any, call: Call) -> None:
        """Answer as the tokens come, or at the end, as the request says."""
        self._last_request = time.time()
        observation = self._intake.observe(call, f"{SERVICE}/Generate", stream=request.stream)
        stream: OutputStream | None = None
        try:
            call.field_path = paths_for(request.WhichOneof("input"))
            request_id = request.request_id or call.metadata(REQUEST_ID_KEY) or str(uuid.uuid4())
            prepared = await self._intake.prepare(
                request_id, "", lambda: asked_of(request), call, observation
            )
            stream, text = self._intake.submit(prepared, observation)
            kind = VllmAnswers if request.stream else VllmWholeAnswers
            first = await stream.next()
            await call.context.send_initial_metadata(((REQUEST_ID_KEY, call.request_id),))
            answers = kind(self._message, text)
            events = EventStream(call.context, stream, text, answers, observation.meter)
            await events.run(first, prepared.form)
            observation.finished(text)
        except asyncio.CancelledError:
            observation.dropped()
            raise
        finally:
            if stream is not None:
                stream.close()

    async def Abort(self, request: Any, call: Call) -> Any:
        """End requests of any front end; unknown and finished ids are passed over."""
        await self._intake.abort(request.request_ids)
        return self._message("AbortResponse")()

    async def HealthCheck(self, request: Any, call: Call) -> Any:
        """Whether requests are taken, and why not."""
        if self._intake.is_ready:
            return self._message("HealthCheckResponse")(healthy=True, message="ready")
        why = self._client.state.error() or "the server is not ready"
        return self._message("HealthCheckResponse")(healthy=False, message=str(why))

    async def GetModelInfo(self, request: Any, call: Call) -> Any:
        """Describe the model; LOADING while little is known of it."""
        info = self._model.info
        if info is None:
            raise LoadingError("the model is still being loaded")
        config, defaults = info.config, info.generation_defaults
        told = {name: defaults[name] for name in _TELLABLE_DEFAULTS if name in defaults}
        return self._message("GetModelInfoResponse")(
            model_path=info.model,
            tokenizer_path=_NO_TOKENIZER,
            is_generation=True,
            max_context_length=config.max_model_len,
            vocab_size=config.vocab_size,
            served_model_name=self._model.name,
            architectures=[info.architecture],
            eos_token_ids=info.eos_token_ids,
            bos_token_id=self._model.tokenizer.bos_token_id,
            max_req_input_len=config.max_model_len - 1,
            default_sampling_params_json=json.dumps(told) if told else "",
        )

    async def GetServerInfo(self, request: Any, call: Call) -> Any:
        """Describe the server, whatever its state."""
        load, info = self._load(), self._model.info
        response = self._message("GetServerInfoResponse")(
            active_requests=load.num_running + load.num_waiting,
            last_receive_timestamp=self._last_request,
            uptime_seconds=time.monotonic() - self._started,
            server_type="cupaged",
            data_parallel_size=1,
        )
        if info is not None:
            response.block_size = info.config.block_size
            response.model_dtype = info.dtype
            response.max_num_seqs = info.config.max_num_seqs
        return response

    async def GetLoads(self, request: Any, call: Call) -> Any:
        """How busy the engine is, whatever its state; there is one rank."""
        now = datetime.now(UTC)
        response = self._message("GetLoadsResponse")(
            timestamp=now.isoformat(), version=__version__, dp_rank_count=1
        )
        if request.dp_rank == 0:
            response.loads.append(self._scheduler_load())
        return response

    async def GetTokenizer(self, request: Any, call: Call) -> None:
        """The tokenizer's files as a zip file, in chunks; the last one has its digest."""
        content = await asyncio.to_thread(tokenizer_zip, self._model.text)
        digest = hashlib.sha256(content).hexdigest()
        for start in range(0, len(content), CHUNK_BYTES):
            is_last = start + CHUNK_BYTES >= len(content)
            data = content[start : start + CHUNK_BYTES]
            chunk = self._message("GetTokenizerChunk")(data=data, sha256=digest if is_last else "")
            await call.write(chunk)

    def _load(self) -> model_pb2.Load:
        info = self._model.info
        return self._loads.load(self._client.state, None if info is None else info.config)

    def _scheduler_load(self) -> Any:
        load, stats, info = self._load(), self._client.stats, self._model.info
        block_size = 0 if info is None else info.config.block_size
        answer = self._message("SchedulerLoad")(
            num_running_reqs=load.num_running,
            num_waiting_reqs=load.num_waiting,
            num_total_reqs=load.num_running + load.num_waiting,
            num_used_tokens=load.num_used_kv_blocks * block_size,
            max_total_num_tokens=load.num_kv_blocks * block_size,
            token_usage=load.kv_cache_usage,
            gen_throughput=load.generation_tokens_per_second,
            max_running_requests=load.max_num_seqs,
        )
        if load.max_num_seqs:
            answer.utilization = min(1.0, load.num_running / load.max_num_seqs)
        if stats is not None and stats.prefix_cache_queries_total:
            hits, queries = stats.prefix_cache_hits_total, stats.prefix_cache_queries_total
            answer.cache_hit_rate = hits / queries
        return answer


def tokenizer_zip(text: ModelText) -> bytes:
    """The files of a tokenizer and the template that is served; equal files give equal bytes.

    Raises:
        TokenizerError: a file cannot be read.
    """
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        files = dict(tokenizer_files(text))
        if text.template_source is not None:  # it goes before one in a configuration
            files[_TEMPLATE] = text.template_source.encode()
        for name, content in files.items():
            member = zipfile.ZipInfo(name)  # of 1980: when it was packed is of no account
            archive.writestr(member, content, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()
