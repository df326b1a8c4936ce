"""The table of errors, row by row, against a running server: code, reason, details, and no harm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.duration_pb2 import Duration

from cupaged.server.front_end import FrontEndOptions
from cupaged.server.grpc_server import GrpcOptions
from cupaged.v1 import generation_pb2 as pb
from cupaged.v1 import model_pb2 as mpb
from tests.server.asking import (
    Started,
    Told,
    asker,
    check_answers,
    failure,
    options,
    output,
    stream_request,
    tokens,
    waiting,
)
from tests.server.local_server import SECONDS, LocalServer
from tests.tiny_models import TINIER, _write_safetensors, hf_weights, write_hf_folder

Code = grpc.StatusCode


def test_unknown_models(server: LocalServer, ask: Callable[..., Told]) -> None:
    name = "other/model"
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="x")])
    calls: list[Callable[[], Any]] = [
        lambda: server.generation.Tokenize(pb.TokenizeRequest(model=name, text="x")),
        lambda: server.generation.Detokenize(pb.DetokenizeRequest(model=name)),
        lambda: server.generation.ApplyChatTemplate(
            pb.ApplyChatTemplateRequest(model=name, chat=chat)
        ),
        lambda: server.models.GetModelInfo(mpb.GetModelInfoRequest(model=name)),
        lambda: server.models.GetLoad(mpb.GetLoadRequest(model=name)),
        lambda: server.models.WatchLoad(mpb.WatchLoadRequest(model=name)),
        lambda: server.models.GetTokenizer(mpb.GetTokenizerRequest(model=name)),
    ]
    for status in [ask(model=name), *map(failure, calls)]:
        assert (status.code, status.reason) == (Code.NOT_FOUND, "MODEL_NOT_FOUND")
        assert status.resource == ("cupaged.v1.ModelInfo", name)
        assert status.message == "model must be one of 'tiny', or empty, got 'other/model'"


def test_duplicate_ids(paced: LocalServer) -> None:
    with Started(paced, request_id="same"):
        for method in ("Generate", "GenerateStream"):
            status = asker(paced, method)(request_id="same")
            assert (status.code, status.reason) == (Code.ALREADY_EXISTS, "REQUEST_ID_IN_USE")
            assert status.resource == ("cupaged.v1.GenerateRequest", "same")
            assert status.retry_s is None
            assert status.metadata["x-request-id"] == "same"
    paced.wait_idle()
    with Started(paced, request_id="same"):  # the id is free again
        pass
    paced.wait_idle()


def check_retry(status: Told) -> None:
    """RetryInfo and the metadata that gRPC's own retries read say the same."""
    assert status.retry_s is not None and 0.1 <= status.retry_s <= 30
    assert int(status.metadata["grpc-retry-pushback-ms"]) == round(status.retry_s * 1000)


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
def test_queue_full(paced: LocalServer, method: str) -> None:
    with Started(paced):
        call = waiting(paced)
        status = asker(paced, method)()
        assert (status.code, status.reason) == (Code.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        check_retry(status)
        assert "at most 1 may" in status.message
        call.cancel()
    check_answers(paced)


def test_queue_full_of_tokens(tiny_model: str) -> None:
    engine = {"max_num_seqs": 1, "max_num_queued_tokens": 40}
    with (
        LocalServer(tiny_model, runner="null", null_steps_per_s=100.0, engine=engine) as server,
        Started(server),
    ):
        call = waiting(server, text="", token_ids=pb.TokenIds(ids=[5] * 30))
        ask = asker(server, "Generate")
        status = ask(None, token_ids=pb.TokenIds(ids=[5] * 11))
        assert (status.code, status.reason) == (Code.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        check_retry(status)
        assert "at most 40 may" in status.message
        call.cancel()


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
def test_queue_timeout(paced: LocalServer, method: str) -> None:
    with Started(paced):
        status = asker(paced, method)(queue_timeout=Duration(nanos=50_000_000))
        assert (status.code, status.reason) == (Code.RESOURCE_EXHAUSTED, "QUEUE_TIMEOUT")
        check_retry(status)
    paced.wait_idle()


def test_messages_that_are_too_large(tiny_model: str) -> None:
    small = FrontEndOptions(grpc=GrpcOptions(max_message_bytes=20_000))
    with LocalServer(tiny_model, small) as server:
        other = server.generation.GenerateStream(stream_request(stopping=tokens(200)))
        next(other)
        status = asker(server, "Generate")("x" * 30_000)
        assert (status.code, status.reason) == (Code.RESOURCE_EXHAUSTED, None)
        assert "larger than max" in status.message
        assert sum(len(m.delta.token_ids) for m in other) == 200  # nobody else is harmed
        # An answer that is too large: the log probabilities of the prompt.
        ids = pb.TokenIds(ids=[5] * 900)
        status = asker(server, "Generate")(None, token_ids=ids, **output(prompt_logprobs=20))
        assert status.code is Code.RESOURCE_EXHAUSTED
        check_answers(server)


def test_nan_logits(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "nan", TINIER)
    weights = hf_weights(TINIER)
    weights["model.norm.weight"][:] = np.nan
    _write_safetensors(folder / "model.safetensors", weights, "float32")
    with LocalServer(str(folder)) as server:
        for method in ("Generate", "GenerateStream"):
            for n in (1, 3):
                status = asker(server, method)(**options(temperature=0, n=n))
                assert (status.code, status.reason) == (Code.INTERNAL, "NUMERICAL")
                assert status.debug is None
        server.wait_idle()


@pytest.fixture
def broken_prompt(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A bug of ours: preparing any request raises what nobody expects."""

    def fail(*arguments: object) -> None:
        raise RuntimeError("a planted bug")

    monkeypatch.setattr("cupaged.server.served_model.checked_salt", fail)
    yield


@pytest.mark.usefixtures("broken_prompt")
def test_bugs(server: LocalServer, ask: Callable[..., Told]) -> None:
    status = ask()
    assert (status.code, status.reason) == (Code.INTERNAL, "INTERNAL")
    assert status.message == "internal error: see the server's log"
    assert status.debug is None


@pytest.mark.usefixtures("broken_prompt")
def test_bugs_with_a_stack(tiny_model: str) -> None:
    open_minded = FrontEndOptions(grpc=GrpcOptions(debug_errors=True))
    with LocalServer(tiny_model, open_minded) as server:
        status = asker(server, "GenerateStream")()
        assert (status.code, status.reason) == (Code.INTERNAL, "INTERNAL")
        assert status.debug is not None and "a planted bug" in status.debug


def test_steps_that_fail(tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalServer(tiny_model) as server:
        assert server.engine is not None
        runner: Any = server.engine.core._runner
        submit = runner.submit

        def fail_once(plan: Any) -> Any:
            monkeypatch.undo()
            raise RuntimeError("a planted failure")

        monkeypatch.setattr(runner, "submit", fail_once)
        status = asker(server, "GenerateStream")()
        assert (status.code, status.reason) == (Code.INTERNAL, "ENGINE_FAILED")
        assert "a planted failure" in status.message
        assert runner.submit == submit
        check_answers(server)


def test_not_built(server: LocalServer, ask: Callable[..., Told]) -> None:
    status = ask(**output(spaces_between_special_tokens=False))
    assert (status.code, status.reason) == (Code.UNIMPLEMENTED, "NOT_SUPPORTED")
    channel: Any = server.channel
    call = channel.unary_unary("/cupaged.v1.GenerationService/Dream")
    status = failure(lambda: call(b"", timeout=SECONDS))
    assert (status.code, status.reason) == (Code.UNIMPLEMENTED, None)


# ---- the engine's state ------------------------------------------------------------------------


def test_loading(tiny_model: str) -> None:
    with LocalServer(tiny_model, starts_engine=False) as server:
        for method in ("Generate", "GenerateStream"):
            status = asker(server, method)()
            assert (status.code, status.reason) == (Code.UNAVAILABLE, "LOADING")
            check_retry(status)
        server.start_engine()
        check_answers(server)


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
@pytest.mark.parametrize("restarting", [False, True])
def test_a_dead_engine(tiny_model: str, method: str, restarting: bool) -> None:
    with LocalServer(tiny_model, runner="null", null_steps_per_s=100.0) as server:
        running = Started(server)
        server.stop_engine()
        server.call(lambda: server.client.set_state("dead", "killed by SIGKILL", restarting))
        statuses = [failure(lambda: running.call), asker(server, method)()]
        for status in statuses:
            code = Code.UNAVAILABLE if restarting else Code.INTERNAL
            assert (status.code, status.reason) == (code, "ENGINE_DEAD")
            assert "killed by SIGKILL" in status.message
            if restarting:
                check_retry(status)
            else:
                assert status.retry_s is None
        server.start_engine()
        check_answers(server)
