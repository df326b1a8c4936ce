"""Unmodified @grpc/grpc-js with @grpc/proto-loader, as processes of an environment of their own.

They load the .proto files and the descriptor set that `cupaged proto` writes.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from cupaged.cli.main import main
from cupaged.llm import LLM
from cupaged.server.auth import Tokens
from cupaged.server.front_end import FrontEndOptions
from tests.environments import node
from tests.server.asking import PROMPT, Started, offline, waiting
from tests.server.clients.scripts import told_by
from tests.server.local_server import LocalServer

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).with_name("grpc_js_script.js")
PACKAGES = ("@grpc/grpc-js@1.14.7", "@grpc/proto-loader@0.8.1")
Script = Callable[[LocalServer, str], AbstractContextManager[Any]]


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Script:
    """What the client tells of a task; its process lives as long as the context."""
    folder = tmp_path_factory.mktemp("node")
    program = node(folder, *PACKAGES)
    file = shutil.copy(SCRIPT, folder)
    protos, descriptors = folder / "protos", folder / "cupaged.binpb"
    assert main(["proto", "export", str(protos)]) == 0
    assert main(["proto", "descriptors", str(descriptors)]) == 0
    return lambda server, task: told_by(program, file, server.address, task, protos, descriptors)


def test_whole_answers(script: Script, server: LocalServer, llm: LLM) -> None:
    expected = offline(llm, PROMPT)
    (output,) = expected.outputs
    with script(server, "unary") as told:
        assert told["id"] == told["header"] == "mine"
        assert told["sample"]["text"] == output.text
        assert told["sample"]["token_ids"] == [*output.token_ids]
        assert told["sample"]["finish_reason"] == "FINISH_REASON_LENGTH"
        assert told["prompt_tokens"] == len(expected.prompt_token_ids)
        assert "Hello" in told["chat"] and told["model"] == "tiny"
        assert int(told["parameters"]) > 400_000


def test_a_stream(script: Script, server: LocalServer, llm: LLM) -> None:
    with script(server, "stream") as told:
        first, *deltas, last = told["kinds"]
        assert (first, set(deltas), last) == ("started", {"delta"}, "finished")
        assert told["text"] == offline(llm, PROMPT).outputs[0].text
        assert (told["error"], told["reason"]) == (None, "FINISH_REASON_LENGTH")
        assert told["tokens"] == 6


def test_requests_and_an_error_on_one_stream(script: Script, server: LocalServer, llm: LLM) -> None:
    with script(server, "infer") as told:
        assert told["error"] is None
        message = "temperature must be a finite number >= 0, got -1"
        errors = [(p["id"], p["error"]) for p in told["parts"] if p["error"]]
        assert errors == [("bad", message)]
        for key, text in (("a", PROMPT), ("b", PROMPT + " x"), ("d", PROMPT)):
            parts = [part for part in told["parts"] if part["id"] == key]
            assert "".join(p["text"] for p in parts) == offline(llm, text).outputs[0].text
            assert [p["final"] for p in parts] == [False] * (len(parts) - 1) + [True]


def test_details_of_errors(script: Script, server: LocalServer) -> None:
    with script(server, "refused") as (unary, streamed, unknown):
        assert unary == streamed
        description = "must be a finite number >= 0, got -1.0"
        assert (unary["code"], unary["message"]) == (3, f"sampling.temperature {description}")
        info = unary["details"]["google.rpc.ErrorInfo"]
        assert (info["domain"], info["reason"]) == ("cupaged", "INVALID_PARAMETER")
        (violation,) = unary["details"]["google.rpc.BadRequest"]["field_violations"]
        field = (violation["field"], violation["description"])
        assert field == ("sampling.temperature", description)
        assert unknown["code"] == 5
        resource = unknown["details"]["google.rpc.ResourceInfo"]
        assert resource["resource_name"] == "other"


def test_overload(script: Script, paced: LocalServer) -> None:
    with Started(paced):
        queued = waiting(paced)
        with script(paced, "overload") as told:
            assert told["code"] == 8
            assert told["details"]["google.rpc.ErrorInfo"]["reason"] == "QUEUE_FULL"
            delay = told["details"]["google.rpc.RetryInfo"]["retry_delay"]
            nanoseconds = int(delay.get("seconds", 0)) * 10**9 + int(delay.get("nanos", 0))
            assert told["pushback"] == [str(-(-nanoseconds // 10**6))] != ["0"]
        queued.cancel()


def test_cancelled_calls_end_in_the_engine(script: Script, endless: LocalServer) -> None:
    before = endless.num_aborted()
    with script(endless, "cancel") as told:
        assert told == {"cancelled": True, "ids": ["a", "b"]}
        endless.wait_idle()  # while the client's process still lives
        assert endless.num_aborted() == before + 4


def test_deadlines_end_requests_in_the_engine(script: Script, endless: LocalServer) -> None:
    before = endless.num_aborted()
    with script(endless, "deadline") as told:
        assert told["exceeded"] and told["deltas"] > 0
        endless.wait_idle()
        assert endless.num_aborted() == before + 2


def test_tokens_and_health(script: Script, tiny_model: str) -> None:
    options = FrontEndOptions(tokens=Tokens(secret="word"))
    with LocalServer(tiny_model, options) as server, script(server, "token") as told:
        for refused in told["without"]:
            reason = refused["details"]["google.rpc.ErrorInfo"]["reason"]
            assert (refused["code"], reason) == (16, "TOKEN_MISSING")
        assert (told["tokens"], told["live"], told["health"]) == (6, True, "SERVING")
