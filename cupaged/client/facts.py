"""What a server tells about itself: model, build, load, health; plain dataclasses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from google.protobuf import timestamp_pb2
from grpc_health.v1 import health_pb2

from cupaged.client.requests import FIELDS
from cupaged.v1 import generation_pb2, model_pb2

HealthStatus = Literal["SERVING", "NOT_SERVING", "SERVICE_UNKNOWN", "UNKNOWN"]
EngineState = Literal["loading", "ready", "draining", "dead", "unknown"]

_HEALTH: dict[int, HealthStatus] = {
    health_pb2.HealthCheckResponse.SERVING: "SERVING",
    health_pb2.HealthCheckResponse.NOT_SERVING: "NOT_SERVING",
    health_pb2.HealthCheckResponse.SERVICE_UNKNOWN: "SERVICE_UNKNOWN",
}
_STATES: dict[int, EngineState] = {
    model_pb2.ENGINE_STATE_LOADING: "loading",
    model_pb2.ENGINE_STATE_READY: "ready",
    model_pb2.ENGINE_STATE_DRAINING: "draining",
    model_pb2.ENGINE_STATE_DEAD: "dead",
}


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model that is served.

    `default_sampling` holds the numbers that the model's generation configuration recommends, by
    the names of `SamplingParams`; the server uses them where a request says nothing.
    `max_model_len` counts prompt and answer together. `kv_cache_bytes` is 0 where the server does
    not know.
    """

    name: str
    aliases: tuple[str, ...]
    architecture: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    has_chat_template: bool
    default_sampling: Mapping[str, Any] = field(hash=False)
    max_logprobs: int
    max_num_seqs: int
    num_parameters: int
    dtype: str
    num_kv_blocks: int
    block_size: int
    kv_cache_bytes: int
    load_time: datetime | None


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a server is: its version, what it can do beyond the first, and what it was built of."""

    version: str
    features: tuple[str, ...]
    api_packages: tuple[str, ...]
    device: str
    python_version: str
    platform: str
    packages: Mapping[str, str] = field(hash=False)
    start_time: datetime | None


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the engine is, over all front ends; `*_total` count since the engine started.

    `num_running` and `num_waiting` count sequences; a request has as many as it has samples. The
    limits of the queue are None where there is none. `kv_cache_usage` is in [0, 1].
    """

    state: EngineState
    state_reason: str
    snapshot_time: datetime | None
    num_running: int
    num_waiting: int
    num_preempted: int
    max_num_seqs: int
    max_num_queued_reqs: int | None
    max_num_queued_tokens: int | None
    num_queued_tokens: int
    num_kv_blocks: int
    num_used_kv_blocks: int
    num_shared_kv_blocks: int
    kv_cache_usage: float
    preemptions_total: int
    steps_total: int
    prompt_tokens_total: int
    generation_tokens_total: int
    finished_total: Mapping[str, int] = field(hash=False)
    prompt_tokens_per_second: float
    generation_tokens_per_second: float
    engine_restarts_total: int


def read_model_info(model: model_pb2.ModelInfo) -> ModelInfo:
    """A described model."""
    sampling = _recommended(model.default_sampling)
    if model.HasField("default_max_new_tokens"):
        sampling["max_tokens"] = model.default_max_new_tokens
    return ModelInfo(
        name=model.name,
        aliases=tuple(model.aliases),
        architecture=model.architecture,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        eos_token_ids=tuple(model.eos_token_ids),
        bos_token_id=model.bos_token_id if model.HasField("bos_token_id") else None,
        has_chat_template=model.has_chat_template,
        default_sampling=sampling,
        max_logprobs=model.max_logprobs,
        max_num_seqs=model.max_num_seqs,
        num_parameters=model.num_parameters,
        dtype=model.dtype,
        num_kv_blocks=model.kv_cache.num_blocks,
        block_size=model.kv_cache.block_size,
        kv_cache_bytes=model.kv_cache.size_bytes,
        load_time=_time(model.load_time),
    )


def read_server_info(info: model_pb2.GetServerInfoResponse) -> ServerInfo:
    """A described server."""
    return ServerInfo(
        version=info.version,
        features=tuple(info.features),
        api_packages=tuple(info.api_packages),
        device=info.device,
        python_version=info.build.python_version,
        platform=info.build.platform,
        packages=dict(info.build.packages),
        start_time=_time(info.start_time),
    )


def read_load(load: model_pb2.Load) -> Load:
    """A snapshot of the engine."""
    limits: dict[str, int | None] = {
        "max_num_queued_reqs": None,
        "max_num_queued_tokens": None,
    }
    if load.HasField("max_num_queued_reqs"):
        limits["max_num_queued_reqs"] = load.max_num_queued_reqs
    if load.HasField("max_num_queued_tokens"):
        limits["max_num_queued_tokens"] = load.max_num_queued_tokens
    return Load(
        state=_STATES.get(load.state, "unknown"),
        state_reason=load.state_reason,
        snapshot_time=_time(load.snapshot_time),
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_preempted=load.num_preempted,
        max_num_seqs=load.max_num_seqs,
        num_queued_tokens=load.num_queued_tokens,
        num_kv_blocks=load.num_kv_blocks,
        num_used_kv_blocks=load.num_used_kv_blocks,
        num_shared_kv_blocks=load.num_shared_kv_blocks,
        kv_cache_usage=load.kv_cache_usage,
        preemptions_total=load.preemptions_total,
        steps_total=load.steps_total,
        prompt_tokens_total=load.prompt_tokens_total,
        generation_tokens_total=load.generation_tokens_total,
        finished_total=dict(load.finished_total),
        prompt_tokens_per_second=load.prompt_tokens_per_second,
        generation_tokens_per_second=load.generation_tokens_per_second,
        engine_restarts_total=load.engine_restarts_total,
        **limits,
    )


def read_health(answer: health_pb2.HealthCheckResponse) -> HealthStatus:
    """What grpc.health.v1 says."""
    return _HEALTH.get(answer.status, "UNKNOWN")


def _recommended(sampling: generation_pb2.SamplingOptions) -> dict[str, Any]:
    """The scalars that are set, by the names of the parameters."""
    names = {f.path.removeprefix("sampling."): name for name, f in FIELDS.items()}
    return {
        names[known.name]: value
        for known, value in sampling.ListFields()
        if known.name in names and known.has_presence
    }


def _time(stamp: timestamp_pb2.Timestamp) -> datetime | None:
    """None where the message has none."""
    return stamp.ToDatetime(UTC) if stamp.ByteSize() else None
