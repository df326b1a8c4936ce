"""`cupaged bench serve --backend openai` on a server that answers what is written here."""

from __future__ import annotations

import asyncio
import json
import ssl
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cupaged.benchmarks.backend import BackendOptions, RequestFailed, make_backend
from cupaged.benchmarks.datasets import DatasetOptions, Sample
from cupaged.benchmarks.load import LoadRun, generate_load
from cupaged.benchmarks.openai_backend import CompletionsBackend
from cupaged.benchmarks.serve import ServeBenchmark
from cupaged.benchmarks.triton_backend import TritonBackend
from cupaged.cli.main import main
from cupaged.errors import ConfigError
from tests.server.local_server import wait_until
from tests.server.openai_server import (
    CLOSE,
    DONE,
    HANG,
    MODELS,
    RESET,
    Asked,
    OpenAIServer,
    Pieces,
    chunk,
    deltas,
    event,
    head,
    stream,
    texts,
    usage,
    whole,
)

CERTS = Path(__file__).parent / "certs"
Captured = pytest.CaptureFixture[str]


def answering(answer: Callable[[Asked], Pieces], models: Any = MODELS) -> Callable[[Asked], Pieces]:
    """The list of models beside the answers."""
    return lambda asked: [whole(200, models)] if asked.method == "GET" else answer(asked)


def by_prompt(**answers: Pieces) -> Callable[[Asked], Pieces]:
    """An answer a prompt."""
    return answering(lambda asked: answers[asked.body["prompt"]])


def prompts(folder: Path, *words: str) -> tuple[str, ...]:
    """A file of requests in this order."""
    path = folder / "prompts.jsonl"
    lines = [json.dumps({"prompt": word, "output_tokens": 8}) + "\n" for word in words]
    path.write_text("".join(lines))
    return ("--dataset-name", "custom", "--dataset-path", str(path), "--disable-shuffle")


def bench(
    server: OpenAIServer, folder: Path, *arguments: str, backend: str = "openai", code: int = 0
) -> dict[str, Any]:
    """The saved result."""
    path = folder / "result.json"
    save = ("--save-result", "--save-detailed", "--result-filename", str(path))
    address = () if "--address" in arguments else ("--address", server.address)
    assert main(["bench", "serve", "--backend", backend, *address, *save, *arguments]) == code
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def test_a_run_of_made_up_prompts(tmp_path: Path, tiny_model: str, capsys: Captured) -> None:
    answer = stream(*texts("a", "bb", "", "c"), usage(21, 9))
    with OpenAIServer(answering(lambda asked: answer)) as server:
        result = bench(
            server, tmp_path, "--num-prompts", "3", "--tokenizer", tiny_model,
            "--random-input-len", "20", "--random-output-len", "9", "--temperature", "0",
            "--top-k", "3", "--request-id-prefix", "mine-", "--max-concurrency", "1",
        )  # fmt: skip
    assert (result["completed"], result["failed"], result["backend"]) == (3, 0, "openai")
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (63, 27)
    # 9 tokens over 1, 2 and 1 of 4 characters; the event without text is no message.
    assert result["message_tokens"] == [[2, 5, 2]] * 3
    assert [len(gaps) for gaps in result["itls"]] == [2] * 3
    assert (result["tokens_counted_by"], result["ended_early"]) == ("server", 0)
    assert (result["model_id"], result["server"]) == ("team/fake", {"server": "fake"})
    models, *asked = server.requests
    assert (models.method, models.path) == ("GET", "/v1/models")
    assert [each.headers["x-request-id"] for each in asked] == ["mine-0", "mine-1", "mine-2"]
    for each in asked:
        assert (each.method, each.path) == ("POST", "/v1/completions")
        prompt = each.body.pop("prompt")
        assert isinstance(prompt, str) and prompt
        assert each.body == {
            "model": "team/fake", "max_tokens": 9, "stream": True,
            "stream_options": {"include_usage": True}, "temperature": 0.0, "top_k": 3,
            "ignore_eos": True,
        }  # fmt: skip
    assert server.num_connections == 2  # one to look at the models, one for all requests
    assert f"{'Tokens counted by:':40} server" in capsys.readouterr().out.splitlines()


def test_each_kind_of_failure_is_counted(tmp_path: Path, capsys: Captured) -> None:
    busy = {"error": {"message": "too many", "type": "requests", "code": "rate_limit_exceeded"}}
    begun = [head(), chunk(texts("a", "b")[0])]
    answers: dict[str, Pieces] = {
        "good": stream(*texts("a", "b"), usage(1, 2)),
        "busy": [whole(429, busy)],
        "broken": [whole(500, b"Internal\nServer Error", "text/plain")],
        "detail": [whole(404, {"detail": "no such thing"})],
        "midway": [*begun, chunk(event({"error": {"message": "died", "type": "engine"}}))],
        "abort": stream(*texts("a", "b", end="abort")),
        "reset": [*begun, RESET],
        "cut": [*begun, CLOSE],
        "silent": [CLOSE],
        "unfinished": [*begun, chunk(b"")],
        "nothing": stream(event({"choices": []})),
        "uncounted": stream(*texts("a", "b", end=None)),
        "page": [whole(200, b"<html>", "text/html")],
        "garbage": [*begun, chunk(event(b"{"))],
        "list": [*begun, chunk(event([1]))],
        "odd": [*begun, chunk(event({"choices": [5]}))],
        "number": [*begun, chunk(event({"choices": [{"text": 5}]}))],
        "http": [b"SSH-2.0-x\r\n\r\n"],
        "chunks": [head(), b"zz\r\n"],
    }
    words = [*answers, "busy"]
    with OpenAIServer(by_prompt(**answers)) as server:
        result = bench(server, tmp_path, *prompts(tmp_path, *words))
    assert (result["completed"], result["failed"]) == (2, len(words) - 2)
    assert result["failed_by_code"] == {
        "HTTP 429 rate_limit_exceeded": 2,
        "HTTP 500": 1,
        "HTTP 404": 1,
        "HTTP 200 engine": 1,
        "HTTP 200 abort": 1,
        "HTTP 200 incomplete": 2,
        "connection lost": 1,
        "connection closed": 2,
        "protocol error": 7,
    }
    errors = dict(zip(words, result["errors"], strict=True))
    assert errors["good"] == errors["uncounted"] == ""
    assert errors["busy"] == "HTTP 429 rate_limit_exceeded: too many"
    assert errors["broken"] == "HTTP 500: Internal Server Error"
    assert errors["detail"] == "HTTP 404: no such thing"
    assert errors["midway"] == "HTTP 200 engine: died"
    assert errors["page"] == "protocol error: the answer is no event stream, but 'text/html'"
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (1, 4)
    assert "failed: HTTP 500: Internal Server Error" in capsys.readouterr().err


def test_cut_anywhere_an_answer_is_the_same(tmp_path: Path) -> None:
    events = [b": hello\n\n", *texts("\u00e9", "b\r\nc", "d"), usage(3, 5), DONE]
    data = b"".join(events).replace(b"\n", b"\r\n")
    cut = [data[i : i + 1] for i in range(len(data))]
    # Bytes of the body, and apart from them bytes of the chunks.
    raw = b"".join(map(chunk, [data[:40], data[40:41], data[41:], b""]))
    answers: dict[str, Pieces] = {
        "body": [head(), *map(chunk, cut), chunk(b"")],
        "chunks": [head(), *(raw[i : i + 7] for i in range(0, len(raw), 7))],
        "once": [head() + chunk(data) + chunk(b"")],
        "length": [whole(200, data, "text/event-stream")],
        "close": [b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + data, CLOSE],
    }
    with OpenAIServer(by_prompt(**answers)) as server:
        result = bench(server, tmp_path, *prompts(tmp_path, *answers), "--max-concurrency", "1")
    assert result["errors"] == [""] * 5
    assert result["message_tokens"] == [[1, 3, 1]] * 5  # 5 tokens over 1, 4 and 1 characters
    assert result["input_lens"] == [3] * 5


def test_without_usage_tokens_are_counted_here(
    tmp_path: Path, tiny_model: str, capsys: Captured
) -> None:
    answers = {"The memory of a process": stream(*texts("The mem", "ory of a pro", "cess"))}
    file = prompts(tmp_path, *answers)
    with OpenAIServer(by_prompt(**answers)) as server:
        messages = bench(server, tmp_path, *file)
        assert "each message was counted as one" in capsys.readouterr().err
        counted = bench(server, tmp_path, *file, "--tokenizer", tiny_model)
        assert "each message was counted as one" not in capsys.readouterr().err
    assert (messages["tokens_counted_by"], messages["output_lens"]) == ("messages", [3])
    assert (messages["total_input_tokens"], messages["message_tokens"]) == (0, [[1, 1, 1]])
    # The answer is the prompt, so both have as many tokens: those of the tokenizer's file.
    from tokenizers import Tokenizer

    known = Tokenizer.from_file(f"{tiny_model}/tokenizer.json")
    number = len(known.encode("The memory of a process", add_special_tokens=False).ids)
    assert number > 3
    assert counted["tokens_counted_by"] == "tokenizer"
    assert (counted["input_lens"], counted["output_lens"]) == ([number], [number])
    assert sum(counted["message_tokens"][0]) == number
    assert counted["ended_early"] == 0


def test_chats(tmp_path: Path) -> None:
    parts = ({"role": "assistant", "content": ""}, {"reasoning_content": "hm"}, {"content": "yes"})
    answer = stream(*deltas(*parts, {}), usage(9, 4))
    with OpenAIServer(answering(lambda asked: answer)) as server:
        result = bench(server, tmp_path, *prompts(tmp_path, "hello"), backend="openai-chat")
    assert [len(gaps) for gaps in result["itls"]] == [1]  # neither the role nor the end is a token
    assert (result["message_tokens"], result["output_lens"]) == ([[2, 2]], [4])
    (asked,) = server.requests[1:]
    assert asked.path == "/v1/chat/completions"
    assert asked.body == {
        "model": "team/fake", "messages": [{"role": "user", "content": "hello"}],
        "max_completion_tokens": 8, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip


def test_answers_that_stop_although_they_were_to_go_on(tmp_path: Path, capsys: Captured) -> None:
    answers = {"a": stream(*texts("x"), usage(1, 8)), "b": stream(*texts("x"), usage(1, 7))}
    with OpenAIServer(by_prompt(**answers)) as server:
        result = bench(server, tmp_path, *prompts(tmp_path, "a", "b"), "--ignore-eos")
    assert result["ended_early"] == 1
    assert "1 answers ended before their whole length" in capsys.readouterr().err


def test_addresses_tokens_and_certificates(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "token").write_text("secret\n")
    file = prompts(tmp_path, "x")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(CERTS / "server.pem", CERTS / "server.key")
    answer = answering(lambda asked: stream(*texts("a"), usage(1, 1)))
    with OpenAIServer(answer) as server, OpenAIServer(answer, tls) as secure:
        for path, expected in (
            ("", "/v1/completions"), ("/", "/v1/completions"), ("/v1", "/v1/completions"),
            ("/v1/", "/v1/completions"), ("/a/b", "/a/b/v1/completions"),
            ("/a/v1", "/a/v1/completions"),
        ):  # fmt: skip
            address = f"http://{server.address}{path}"
            bench(server, tmp_path, *file, "--address", address)
            assert server.requests[-1].path == expected
            assert server.requests[-2].path == expected.replace("completions", "models")
        assert "authorization" not in server.requests[-1].headers
        bench(server, tmp_path, *file, "--token-file", str(tmp_path / "token"))
        assert {r.headers["authorization"] for r in server.requests[-2:]} == {"Bearer secret"}
        bench(secure, tmp_path, *file, "--ca-file", str(CERTS / "root.pem"))
        assert secure.requests[-1].path == "/v1/completions"
        code = ["bench", "serve", "--backend", "openai", *file]
        assert main([*code, "--address", f"https://{secure.address}"]) == 1
        assert "TLS failed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("models", "arguments", "message"),
    [
        (whole(200, {"data": []}), (), "the server has no model that is ready"),
        (whole(200, {"data": [{"id": "a"}, {"id": "b"}]}), (), "must be one of 'a', 'b', got ''"),
        (whole(200, MODELS), ("--model", "c"), "--model must be one of 'team/fake', got 'c'"),
        (whole(401, {"error": {"message": "no key"}}), (), "/v1/models: HTTP 401: no key"),
        (whole(404, b""), (), "/v1/models: HTTP 404: no reason given"),
        (whole(503, b""), (), "/v1/models: HTTP 503: no reason given"),
        (whole(200, b"hello"), (), "/v1/models is no list of models: is it OpenAI's API?"),
        (whole(200, [1]), (), "/v1/models is no list of models"),
        (b"\0\0\x18\4\0", ("--ready-check-timeout-sec", "60"), "no HTTP answer"),
    ],
)
def test_servers_that_cannot_be_measured(
    tmp_path: Path, models: bytes, arguments: tuple[str, ...], message: str, capsys: Captured
) -> None:
    with OpenAIServer(lambda asked: [models, CLOSE]) as server:
        command = ["bench", "serve", "--backend", "openai", "--address", server.address]
        assert main([*command, *prompts(tmp_path, "x"), *arguments]) == 1
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and not captured.out
    assert len(server.requests) == 1


def test_a_server_that_loads_is_waited_for(tmp_path: Path) -> None:
    lists = iter([whole(503, b""), whole(200, {"data": []}), whole(200, MODELS)])
    answer = stream(*texts("a"), usage(1, 1))
    with OpenAIServer(lambda asked: [next(lists)] if asked.method == "GET" else answer) as server:
        wait = ("--ready-check-timeout-sec", "20")
        assert bench(server, tmp_path, *prompts(tmp_path, "x"), *wait)["completed"] == 1


def test_a_server_without_a_list_of_models(tmp_path: Path) -> None:
    answer = stream(*texts("a"), usage(1, 1))
    with OpenAIServer(lambda asked: [whole(404, b"")] if asked.body is None else answer) as server:
        result = bench(server, tmp_path, *prompts(tmp_path, "x"), "--model", "mine")
    assert (result["completed"], result["model_id"]) == (1, "mine")
    assert server.requests[-1].body["model"] == "mine"


def test_cancelling_a_run_closes_its_connections() -> None:
    async def cancelled(server: OpenAIServer) -> None:
        backend = CompletionsBackend(BackendOptions(server.address))
        requests = [backend.prepare(Sample("x", 9), str(i)) for i in range(3)]
        run = asyncio.create_task(generate_load(backend, requests, [0.0] * 3))
        await asyncio.to_thread(wait_until, lambda: len(server.requests) == 3)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        await asyncio.to_thread(wait_until, lambda: server.num_open == 0)

    with OpenAIServer(lambda asked: [head(), HANG]) as server:
        asyncio.run(cancelled(server))


def test_a_connection_that_was_closed_meanwhile_is_not_used_again() -> None:
    async def both(server: OpenAIServer) -> list[str]:
        backend = CompletionsBackend(BackendOptions(server.address))
        request = backend.prepare(Sample("x", 9), "1")
        first = await generate_load(backend, [request], [0.0])
        await asyncio.to_thread(wait_until, lambda: server.num_open == 0)
        second = await generate_load(backend, [request], [0.0])
        await backend.close()
        return [run.records[0].error for run in (first, second)]

    with OpenAIServer(lambda asked: [*stream(*texts("a"), usage(1, 1)), CLOSE]) as server:
        assert asyncio.run(both(server)) == ["", ""]
        assert server.num_connections == 2


@pytest.mark.parametrize("begun", [[], [head(), chunk(texts("a", "b")[0])]])
def test_an_answer_that_takes_too_long(tmp_path: Path, begun: list[bytes]) -> None:
    with OpenAIServer(answering(lambda asked: [*begun, HANG])) as server:
        late = bench(server, tmp_path, *prompts(tmp_path, "x"), "--timeout", "0.2", code=1)
    assert late["errors"] == ["timeout: no answer in time"]


def test_a_server_that_is_gone(tmp_path: Path) -> None:
    async def asked(address: str) -> LoadRun:
        backend = CompletionsBackend(BackendOptions(address))
        with pytest.raises(RequestFailed, match="connection refused"):
            await backend.open()
        return await generate_load(backend, [backend.prepare(Sample("x", 9), "1")], [0.0])

    with OpenAIServer(answering(lambda asked: [])) as server:
        address = server.address
    (record,) = asyncio.run(asked(address)).records
    assert record.error_code == "connection refused"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--tokenizer must be that of the model, for --dataset-name random with --backend"),
        (("--connections", "2"), "--connections must be left out with --backend openai"),
        (("--address", "ftp://x"), "--address must be HOST:PORT, http://HOST:PORT or https://"),
        (("--address", "x:99999"), "--address must be HOST:PORT"),
        (("--address", "x:0"), "--address must be HOST:PORT"),
        (("--address", "unix:/x"), "--address must be HOST:PORT"),
        (("--address", "http://[::1:80"), "--address must be HOST:PORT"),
        (("--address", f"http://{'x' * 64}:1"), "--address must be HOST:PORT"),
        (("--address", "http://x..y:1"), "--address must be HOST:PORT"),
        (("--address", "http://a b:1"), "--address must be HOST:PORT"),
        (("--address", "http://u:p@x:1"), "--address must be HOST:PORT"),
        (("--address", "http://x:1/?a=1"), "--address must be HOST:PORT"),
        (("--tokenizer", "/nowhere/at/all"), "/nowhere/at/all"),
        (("--address", "http://x:1", "--ca-file", str(CERTS / "root.pem")),
         "--address must be https:// where certificates are given"),
    ],
)  # fmt: skip
def test_wrong_options(
    tmp_path: Path, arguments: tuple[str, ...], message: str, capsys: Captured
) -> None:
    file = prompts(tmp_path, "x") if arguments else ()
    address = () if "--address" in arguments else ("--address", "127.0.0.1:1")
    command = ["bench", "serve", "--backend", "openai", *address, *file, *arguments]
    assert main(command) in (1, 2)
    captured = capsys.readouterr()
    assert message in captured.err and not captured.out


def test_options_that_do_not_fit_the_backend() -> None:
    server = BackendOptions("x")
    with pytest.raises(ConfigError, match="--tokenizer must be left out with --backend cupaged"):
        ServeBenchmark("cupaged", server, tokenizer="x")
    plain = DatasetOptions("custom", "file", skip_chat_template=True)
    with pytest.raises(ConfigError, match="--skip-chat-template must be left out with --backend"):
        ServeBenchmark("openai-chat", server, plain)
    ServeBenchmark("openai", server, plain)


def test_the_package_that_is_needed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_client", "openai_backend"):
        monkeypatch.delitem(sys.modules, f"cupaged.benchmarks.{name}")
    monkeypatch.setitem(sys.modules, "h11", None)
    allowed = r"used with the package h11: pip install 'cupaged\[bench\]', got 'openai'"
    with pytest.raises(ConfigError, match=f"--backend must be {allowed}"):
        make_backend("openai", BackendOptions("x"))
    assert isinstance(make_backend("triton", BackendOptions("x")), TritonBackend)
