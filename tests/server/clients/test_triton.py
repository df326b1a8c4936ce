"""Unmodified tritonclient, blocking and asyncio, as processes of an environment of their own."""

from __future__ import annotations

import subprocess
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from cupaged.llm import LLM
from cupaged.server.auth import Tokens
from cupaged.server.front_end import FrontEndOptions
from tests.environments import environment
from tests.server.asking import PROMPT, offline
from tests.server.clients.scripts import SECONDS, told_by
from tests.server.local_server import LocalServer
from tests.server.make_protos import COMPATIBLE
from tests.server.test_readme import blocks

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).with_name("triton_script.py")
PACKAGES = ("tritonclient[grpc]==2.73.0",)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an environment with the client."""
    return environment(tmp_path_factory.mktemp("triton") / "environment", *PACKAGES)


def script(python: Path, server: LocalServer, task: str) -> AbstractContextManager[Any]:
    """What the client tells; its process lives as long as the context."""
    return told_by(python, SCRIPT, server.address, task)


def whole(llm: LLM, text: str = PROMPT) -> str:
    """The answer of the engine in this process."""
    return offline(llm, text).outputs[0].text


def test_names_and_numbers_are_those_of_the_clients_stubs(python: Path) -> None:
    stubs = ("tritonclient.grpc.service_pb2", "tritonclient.grpc.model_config_pb2")
    ours = (str(COMPATIBLE / "kserve.binpb"), "inference.GRPCInferenceService")
    command = [str(python), str(SCRIPT.with_name("published_fields.py")), *ours, *stubs]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert (done.returncode, done.stdout) == (0, "112\n"), done.stderr


def test_state_metadata_and_statistics(python: Path, tiny_model: str) -> None:
    with LocalServer(tiny_model) as server, script(python, server, "describe") as told:
        assert told["live"] and told["ready"] and told["models"] == [True, False]
        assert told["server"] == "cupaged" and told["decoupled"] is True
        assert told["index"] == [{"name": "tiny", "version": "1", "state": "READY"}]
        assert told["inputs"]["text_input"] == "BYTES" and told["inputs"]["stream"] == "BOOL"
        assert told["successes"] == "1"
        assert told["unknown"] == {
            "status": "StatusCode.NOT_FOUND",
            "message": "model must be one of 'tiny', or empty, got 'other'",
        }


def test_whole_answers(python: Path, server: LocalServer, llm: LLM) -> None:
    reference = offline(llm, PROMPT, logprobs=0)
    expected: dict[str, Any] = {
        "version": "1",
        "text_output": [PROMPT + reference.outputs[0].text],
        "finish_reason": ["length"],
        "num_input_tokens": [len(reference.prompt_token_ids)],
        "num_output_tokens": [6],
        "cumulative_logprob": [pytest.approx(reference.outputs[0].cumulative_logprob, rel=1e-5)],
        "final": None,
    }
    with script(python, server, "unary") as (first, second, third, fourth, fifth):
        assert first == {**expected, "id": "7"}
        assert second == fourth == {**expected, "id": ""}
        assert third["text_output"] == expected["text_output"] * 2
        assert "finish_reason" not in third
        assert fifth["text_output"] == expected["text_output"]
    server.wait_idle()
    with script(python, server, "aio_unary") as answers:
        assert answers == [{**expected, "id": str(i)} for i in range(3)]
    server.wait_idle()


@pytest.mark.parametrize("task", ["stream", "aio_stream"])
def test_two_requests_and_an_error_on_one_stream(
    python: Path, server: LocalServer, llm: LLM, task: str
) -> None:
    with script(python, server, task) as told:
        errors = [answer for answer in told if "status" in answer]
        message = "text_input must be a text of at least one token, got ''"
        assert errors == [{"status": None, "message": message}]
        for request_id, text in (("a", PROMPT), ("b", PROMPT + " x")):
            parts = [answer for answer in told if answer.get("id") == request_id]
            assert "".join(p["text_output"][0] for p in parts) == whole(llm, text)
            assert [p["final"] for p in parts] == [False] * (len(parts) - 1) + [True]
            assert sum(p["num_output_tokens"][0] for p in parts) == 6
            reasons = [p["finish_reason"][0] for p in parts]  # a late reader gets few parts
            assert reasons == ["None"] * (len(parts) - 1) + ["length"]
        after = [answer for answer in told if answer.get("id") == "d"]  # not streamed
        assert [a["text_output"] for a in after] == [[PROMPT + whole(llm)]] * (task == "stream")
    server.wait_idle()


def test_a_bad_request(python: Path, server: LocalServer) -> None:
    with script(python, server, "refused") as told:
        assert told == {
            "status": "StatusCode.INVALID_ARGUMENT",
            "message": "temperature must be a finite number >= 0, got -1",
        }


@pytest.mark.parametrize(("task", "ids"), [("cancel", ["a", "b"]), ("aio_cancel", ["a"])])
def test_cancelled_streams_end_in_the_engine(
    python: Path, endless: LocalServer, task: str, ids: list[str]
) -> None:
    before = endless.num_aborted()
    with script(python, endless, task) as told:
        assert told["ids"] == ids
        endless.wait_idle()  # while the client's process still lives
        assert endless.num_aborted() == before + len(ids)


@pytest.mark.parametrize("task", ["timeout", "aio_timeout"])
def test_deadlines_end_requests_in_the_engine(
    python: Path, endless: LocalServer, task: str
) -> None:
    before = endless.num_aborted()
    with script(python, endless, task) as told:
        assert {answer["status"] for answer in told} == {"StatusCode.DEADLINE_EXCEEDED"}
        endless.wait_idle()
        assert endless.num_aborted() == before + len(told)


def test_tokens_come_as_headers(python: Path, tiny_model: str) -> None:
    options = FrontEndOptions(tokens=Tokens(secret="word"))
    with LocalServer(tiny_model, options) as server, script(python, server, "token") as told:
        assert told[0]["status"] == "StatusCode.UNAUTHENTICATED"
        assert told[1] is True


def test_the_example_of_the_readme(python: Path, server: LocalServer) -> None:
    code = next(code for code in blocks("python") if "tritonclient" in code)
    code = code.replace("127.0.0.1:50051", server.address)
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0 and done.stdout.startswith("The sea is"), done.stderr
