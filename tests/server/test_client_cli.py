"""`cupaged client generate` and `chat`, against a scripted server."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2

from cupaged.cli.main import build_parser
from cupaged.v1 import generation_pb2 as pb
from cupaged.v1 import model_pb2
from tests.e2e.cli import Done, Inline, Terminal, command, environment
from tests.server.fake_service import (
    QUEUE_FULL,
    WAIT_S,
    FakeServer,
    fails,
    fails_after,
    model,
    retry_info,
    stalls_after,
)

Code = grpc.StatusCode
VERBS = ("generate", "chat", "health", "load")


@pytest.fixture
def cupaged(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> Inline:
    """The command, in this process."""
    monkeypatch.setenv("GRPC_VERBOSITY", "NONE")
    monkeypatch.delenv("CUPAGED_API_KEY", raising=False)
    return Inline(monkeypatch, capfdbinary)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


class Client:
    """`cupaged client VERB ...` for one server."""

    def __init__(self, cupaged: Inline, server: FakeServer) -> None:
        self._cupaged = cupaged
        self._server = server

    def __call__(self, verb: str, *arguments: str, stdin: str = "") -> Done:
        address = ("--address", self._server.address)
        return self._cupaged("client", verb, *address, *arguments, stdin=stdin)


@pytest.fixture
def client(cupaged: Inline, server: FakeServer) -> Client:
    return Client(cupaged, server)


def requests(server: FakeServer) -> list[Any]:
    """What was to be generated."""
    return [seen.request for seen in server.seen if seen.method == "GenerateStream"]


@pytest.mark.parametrize("verb", VERBS)
def test_help_fits_a_terminal_and_its_example_parses(
    cupaged: Inline, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    done = cupaged("client", verb, "--help")
    assert (done.code, done.err) == (0, "")
    assert max(map(len, done.out.splitlines())) <= 80
    words = shlex.split(done.out.splitlines()[-1])
    assert words[:3] == ["cupaged", "client", verb]
    _, unknown = build_parser().parse_known_args(words[1:])
    assert not unknown


def test_no_command_or_a_wrong_one(cupaged: Inline) -> None:
    assert cupaged("client").code == 2
    done = cupaged("client", "helth")
    assert (done.code, done.out) == (2, "") and "perhaps health" in done.err


def test_generate_prints_the_answer(client: Client, server: FakeServer, tmp_path: Path) -> None:
    assert client("generate", "-p", "one two") == Done(0, "one two \n", "")
    assert client("generate", stdin="three\n") == Done(0, "three \n", "")
    assert client("generate", "--prompt-file", "-", stdin="four") == Done(0, "four \n", "")
    (tmp_path / "prompt").write_text("five\n", encoding="utf-8")
    assert client("generate", "-f", str(tmp_path / "prompt")) == Done(0, "five \n", "")
    assert client("generate", "--prompt-token-ids", "6,7") == Done(0, "w6 w7 \n", "")
    texts = [request.text for request in requests(server)]
    assert texts == ["one two", "three", "four", "five", ""]
    assert list(requests(server)[-1].token_ids.ids) == [6, 7]


def test_generate_prints_several_answers_under_headings(client: Client) -> None:
    done = client("generate", "-p", "a b", "-n", "2")
    assert done == Done(0, "--- 1 (stop)\na b \n--- 2 (stop)\na b \n", "")


def test_generate_prints_events_as_json(client: Client, server: FakeServer) -> None:
    done = client("generate", "-p", "a", "--json", "--logprobs", "1")
    started, delta, finished, usage = map(json.loads, done.out.splitlines())
    assert started.pop("request_id") == requests(server)[0].request_id
    assert started == {
        "event": "started", "model": "fake", "num_prompt_tokens": 1, "num_cached_tokens": None,
    }  # fmt: skip
    assert delta == {"event": "delta", "index": 0, "text": "a ", "token_ids": [0]}
    assert finished == {
        "event": "finished", "index": 0, "finish_reason": "stop", "stop_reason": None,
        "num_tokens": 1,
    }  # fmt: skip
    assert usage["event"] == "usage" and usage["time_to_first_token_s"] == 0.25
    assert requests(server)[0].output.logprobs == 1


def test_log_probabilities_as_json(client: Client, server: FakeServer) -> None:
    position = pb.PositionLogprobs(
        token=pb.TokenLogprob(token_id=7, logprob=-1.5, rank=1, text=b"x")
    )
    messages = [
        pb.GenerateStreamResponse(
            prompt_logprobs=pb.PromptLogprobs(positions=[pb.PositionLogprobs(), position])
        ),
        pb.GenerateStreamResponse(delta=pb.Delta(token_ids=[7], logprobs=[position])),
        pb.GenerateStreamResponse(
            finished=pb.Finished(reason=pb.FINISH_REASON_STOP, cumulative_logprob=float("-inf")),
            usage=pb.Usage(),
        ),
    ]
    server.script += [
        lambda request, context: model_pb2.GetModelInfoResponse(model=model("fake")),
        lambda request, context: iter(messages),
    ]
    done = client("generate", "-p", "a", "--json", "--prompt-logprobs", "0", "--logprobs", "0")
    prompt, delta, finished, _ = map(json.loads, done.out.splitlines())
    entry = {"7": {"logprob": -1.5, "rank": 1, "decoded_token": "x"}}
    assert prompt == {"event": "prompt_logprobs", "positions": [None, entry]}
    assert delta["logprobs"] == [entry] and finished["cumulative_logprob"] is None


def test_options_go_before_what_the_authors_recommend(client: Client, server: FakeServer) -> None:
    client("generate", "-p", "a")
    client(
        "generate", "-p", "a", "--temperature", "1", "--max-tokens", "3", "--stop", "x",
        "--model", "other", "--logit-bias", '{"5": -1}', "--ignore-eos",
    )  # fmt: skip
    recommended, given = requests(server)
    assert (recommended.sampling.temperature, recommended.sampling.top_k) == (0.5, 7)
    assert recommended.stopping.max_new_tokens == 9
    assert (given.sampling.temperature, given.sampling.top_k) == (1.0, 7)
    assert (given.stopping.max_new_tokens, list(given.stopping.stop)) == (3, ["x"])
    assert (given.model, dict(given.sampling.logit_bias)) == ("other", {5: -1.0})
    assert given.stopping.ignore_eos


def test_without_a_recommendation_it_is_greedy_and_unlimited(
    client: Client, server: FakeServer
) -> None:
    plain = model_pb2.ModelInfo(name="fake")
    server.script.append(lambda r, c: model_pb2.GetModelInfoResponse(model=plain))
    client("generate", "-p", "a")
    (request,) = requests(server)
    assert request.sampling.HasField("temperature") and request.sampling.temperature == 0
    assert not request.stopping.HasField("max_new_tokens")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--top-p", "3"], "top_p must be a number in [0, 1], got 3.0"),
        (["--logprobs", "1"], "logprobs must be given together with --json, got 1"),
        (["--retries", "-1"], "retries must be in [0, 1000], got -1"),
        (["--timeout", "0"], "timeout must be None, or a number of seconds > 0, got 0.0"),
        (["--ca-file", "/no/such"], "ca_file must be a file that can be read (No such file"),
        (["--address", "http://x"], "address must be host:port, grpc://host:port"),
        (["--prompt-file", "x"], "argument -f/--prompt-file: not allowed with argument -p"),
        (["--adress", "x"], "unknown option --adress; perhaps --address"),
    ],
)
def test_what_is_refused_before_anything_is_sent(
    client: Client, server: FakeServer, arguments: list[str], message: str
) -> None:
    done = client("generate", "-p", "a", *arguments)
    assert (done.code, done.out) == (2, "")
    assert message in done.err and len(done.err.splitlines()) == 1
    assert server.seen == []


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_answer_that_the_server_cut_is_a_failure(
    client: Client, server: FakeServer, reason: str
) -> None:
    number = pb.FINISH_REASON_ABORT if reason == "abort" else pb.FINISH_REASON_ERROR
    end = pb.GenerateStreamResponse(finished=pb.Finished(reason=number), usage=pb.Usage())
    server.script += [
        lambda request, context: model_pb2.GetModelInfoResponse(model=model("fake")),
        lambda request, context: iter([end]),
    ]
    done = client("generate", "-p", "a")
    assert done.code == 1 and done.err.startswith("cupaged: the ")
    assert ("aborted" in done.err) is (reason == "abort")


def test_a_failed_call_is_one_line_with_what_to_do(client: Client, server: FakeServer) -> None:
    bad = error_details_pb2.BadRequest()
    bad.field_violations.add(field="sampling.n", description="must be at most 4, got 9")
    for failure, line in (
        (fails(Code.INVALID_ARGUMENT, "refused", "INVALID_PARAMETER", bad),
         "refused (INVALID_PARAMETER); sampling.n: must be at most 4, got 9"),
        (fails(Code.UNAUTHENTICATED, "no token", "TOKEN_MISSING"),
         "no token (TOKEN_MISSING); give the token by a file or in CUPAGED_API_KEY"),
        (fails(*QUEUE_FULL, retry_info(100)),
         "32 requests wait already (QUEUE_FULL); try again later, or allow more retries"),
        (fails(Code.NOT_FOUND, "no model x", "MODEL_NOT_FOUND"),
         "no model x (MODEL_NOT_FOUND); leave the model out, or take a name that the server "
         "lists"),
    ):  # fmt: skip
        server.script.append(failure)
        assert client("generate", "-p", "a") == Done(1, "", f"cupaged: {line}\n")


def test_a_server_that_is_not_there(cupaged: Inline) -> None:
    with FakeServer() as server:
        address = server.address
    for verb in ("generate", "chat"):
        done = cupaged("client", verb, "-a", address, "--retries", "0", stdin="hello")
        assert done == Done(
            1, "", f"cupaged: {address}: cannot be reached: Connection refused; "
            "is `cupaged serve` running there, and does it use TLS?\n",
        )  # fmt: skip


def test_a_reader_that_goes_away_ends_the_request(server: FakeServer) -> None:
    prompt = "word " * 5000
    line = command("client", "generate", "-a", server.address, "-p", prompt)
    running = subprocess.Popen(
        line, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert running.stdout is not None and running.stderr is not None
    running.stdout.read(1)
    running.stdout.close()
    assert running.wait(timeout=WAIT_S) == 1 and running.stderr.read() == b""
    running.stderr.close()
    assert all(seen.ended.wait(WAIT_S) for seen in server.seen)


def test_chat_answers_each_line_and_keeps_the_history(client: Client, server: FakeServer) -> None:
    done = client("chat", "--system", "be kind", stdin="hello\n/regen\n/reset\nagain\n")
    # The fake makes a token a word of all messages, and the answer of these tokens.
    assert done == Done(0, "w0 w1 w2 \nw0 w1 w2 \nw0 w1 w2 \n", "")
    chats = [seen.request.chat for seen in server.seen if seen.method == "ApplyChatTemplate"]
    last = [(message.role, message.content) for message in chats[-1].messages]
    assert last == [("system", "be kind"), ("user", "again")]
    assert [list(request.token_ids.ids) for request in requests(server)] == [[0, 1, 2]] * 3


def test_chat_with_history(client: Client, server: FakeServer) -> None:
    assert client("chat", stdin="a b\nc\n").out == "w0 w1 \nw0 w1 w2 w3 w4 \n"
    chat = server.seen[-2].request.chat
    assert [message.content for message in chat.messages] == ["a b", "w0 w1 ", "c"]


def test_chat_drops_the_oldest_turns_when_the_context_is_full(client: Client) -> None:
    """The context is 64 tokens, and nine are kept for the answer."""
    line = " ".join(["x"] * 20)
    done = client("chat", stdin=f"{line}\n{line}\n{line}\n")
    assert done.err == "the context is full: the oldest turn was dropped\n" * 2
    assert done.code == 0


def test_chat_tells_a_failed_line_and_goes_on(client: Client, server: FakeServer) -> None:
    info = model_pb2.GetModelInfoResponse(model=model("fake"))
    failure = fails(Code.INTERNAL, "no luck", "INTERNAL")
    server.script += [lambda request, context: info, failure]
    done = client("chat", stdin="lost\nhello\n")
    assert done.code == 1 and done.out == "w0 \n"
    assert done.err == "cupaged: no luck (INTERNAL); see the server's log\n"
    server.script += [lambda r, c: info, _rendered, fails_after(2, failure)]
    done = client("chat", stdin="a b c\nhello\n")
    assert (done.code, done.out) == (1, "w0 \nw0 \n")


def _rendered(request: pb.ApplyChatTemplateRequest, context: grpc.ServicerContext) -> Any:
    return pb.ApplyChatTemplateResponse(text="x", token_ids=[0, 1, 2])


def test_chat_needs_a_template(client: Client, server: FakeServer) -> None:
    bare = model_pb2.ModelInfo(name="bare")
    server.script.append(lambda r, c: model_pb2.GetModelInfoResponse(model=bare))
    done = client("chat", stdin="hello\n")
    expected = "cupaged: bare has no chat template; `cupaged client generate` needs none\n"
    assert done == Done(1, "", expected)


def test_ctrl_c_stops_an_answer_and_the_conversation_goes_on(server: FakeServer) -> None:
    info = model_pb2.GetModelInfoResponse(model=model("fake"))
    server.script += [lambda r, c: info, _rendered, stalls_after(2)]
    terminal = Terminal(*command("client", "chat", "-a", server.address))
    terminal.wait_for_prompt()
    terminal.type("a b c\r")
    terminal.wait_for("w0 ")
    terminal.type("\x03")
    terminal.wait_for("stopped after")
    assert server.seen[-1].ended.wait(WAIT_S)
    terminal.wait_for_prompt()
    terminal.type("d\r")
    terminal.wait_for(r"4 tokens, first 0.25 s, context 8/64|tokens")
    terminal.wait_for_prompt()
    terminal.type("\x04")
    assert terminal.end() == 0


def test_ctrl_c_ends_generate_and_its_request(server: FakeServer) -> None:
    info = model_pb2.GetModelInfoResponse(model=model("fake"))
    server.script += [lambda r, c: info, stalls_after(2)]
    terminal = Terminal(*command("client", "generate", "-a", server.address, "-p", "a b"))
    terminal.wait_for("a ")
    terminal.type("\x03")
    terminal.wait_for("interrupted")
    assert terminal.end() == 130
    assert server.seen[-1].ended.wait(WAIT_S)
