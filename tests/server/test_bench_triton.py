"""`cupaged bench serve --backend triton` on a server that plays Triton, and on our own."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import grpc
import pytest

from cupaged.cli.main import main
from tests.server.bench_server import BenchServer
from tests.server.local_server import LocalServer
from tests.server.test_bench_openai import prompts
from tests.server.triton_server import OLD_INPUTS, TritonServer

Captured = pytest.CaptureFixture[str]


def bench(
    server: TritonServer | LocalServer, folder: Path, *arguments: str, code: int = 0
) -> dict[str, Any]:
    """The saved result."""
    path = folder / "result.json"
    save = ("--save-result", "--save-detailed", "--result-filename", str(path))
    command = ["bench", "serve", "--backend", "triton", "--address", server.address]
    assert main([*command, *save, *arguments]) == code
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def part(text: str, number: int, end: str = "None") -> dict[str, Any]:
    """An answer of the stream to a prompt of 7 tokens."""
    counts = {"num_input_tokens": 7, "num_output_tokens": number}
    return {"text_output": text, "finish_reason": end, **counts}


def inputs_of(request: Any) -> dict[str, Any]:
    """Tensors of a request: texts, or truth values; all have one element."""
    found: dict[str, Any] = {}
    for tensor, data in zip(request.inputs, request.raw_input_contents, strict=True):
        found[tensor.name] = bool(data[0])
        if tensor.datatype == "BYTES":
            assert struct.unpack("<I", data[:4]) == (len(data) - 4,)
            found[tensor.name] = data[4:].decode()
    return found


def prompt_of(request: Any) -> str:
    return str(inputs_of(request)["text_input"])


def test_requests_and_counts(tmp_path: Path, capsys: Captured) -> None:
    answer = [part("a", 1), part("", 1), part("bc", 3, "length"), {}]
    with TritonServer(lambda request: answer) as server:
        result = bench(
            server, tmp_path, *prompts(tmp_path, "p", "q"), "--request-id-prefix", "mine-",
            "--top-k", "3", "--max-concurrency", "1",
        )  # fmt: skip
    assert (result["completed"], result["model_id"], result["backend"]) == (2, "m", "triton")
    assert (result["input_lens"], result["output_lens"]) == ([7, 7], [5, 5])
    assert result["message_tokens"] == [[1, 1, 3]] * 2  # the last answer holds nothing
    assert (result["tokens_counted_by"], result["server"]["version"]) == ("server", "2.73.0")
    assert [(r.id, r.model_name) for r in server.requests] == [("mine-0", "m"), ("mine-1", "m")]
    inputs = inputs_of(server.requests[1])
    assert json.loads(inputs.pop("sampling_parameters")) == {"top_k": 3, "max_tokens": 8}
    assert inputs == {
        "text_input": "q", "stream": True, "exclude_input_in_output": True,
        "return_finish_reason": True, "return_num_input_tokens": True,
        "return_num_output_tokens": True,
    }  # fmt: skip
    assert {tuple(tensor.shape) for tensor in server.requests[1].inputs} == {(1,)}


def test_a_release_that_counts_nothing(tmp_path: Path, capsys: Captured) -> None:
    answer = [{"text_output": "a"}, {"text_output": "b\u00e9"}]
    with TritonServer(lambda request: answer, inputs=OLD_INPUTS, dimensions=2) as server:
        result = bench(server, tmp_path, *prompts(tmp_path, "p"))
    assert (result["tokens_counted_by"], result["message_tokens"]) == ("messages", [[1, 1]])
    assert [tensor.name for tensor in server.requests[0].inputs] == [
        "text_input", "sampling_parameters", "stream", "exclude_input_in_output",
    ]  # fmt: skip
    assert {tuple(tensor.shape) for tensor in server.requests[0].inputs} == {(1, 1)}


def test_a_model_with_whole_answers(tmp_path: Path, capsys: Captured) -> None:
    answers: dict[str, Any] = {
        "p": [part("abc", 8, "length")],
        "q": [grpc.StatusCode.RESOURCE_EXHAUSTED],
    }
    with TritonServer(lambda request: answers[prompt_of(request)], decoupled=False) as server:
        result = bench(server, tmp_path, *prompts(tmp_path, "p", "q"))
    assert (result["completed"], result["output_lens"]) == (1, [8, 0])
    assert result["failed_by_code"] == {"RESOURCE_EXHAUSTED": 1}
    assert result["message_tokens"] == [[8], []] and result["itls"] == [[], []]
    assert inputs_of(server.requests[0])["stream"] is False


def test_each_kind_of_failure_is_counted(tmp_path: Path, capsys: Captured) -> None:
    answers: dict[str, Any] = {
        "good": [part("a", 2, "stop")],
        "error": [part("a", 1), "it\nbroke"],
        "code": [part("a", 1), grpc.StatusCode.INTERNAL],
        "abort": [part("a", 1, "abort")],
        "nothing": [{}],
        "silent": [],
        "uncounted": [{"text_output": "a"}],
    }
    words = [*answers, "code"]
    with TritonServer(lambda request: answers[prompt_of(request)]) as server:
        result = bench(server, tmp_path, *prompts(tmp_path, *words), "--connections", "3")
    assert (result["completed"], result["failed"]) == (1, 7)
    assert result["failed_by_code"] == {
        "OK error": 1, "INTERNAL": 2, "OK abort": 1, "OK incomplete": 2, "protocol error": 1,
    }  # fmt: skip
    errors = dict(zip(words, result["errors"], strict=True))
    assert errors["error"] == "OK error: it broke"
    assert errors["code"] == "INTERNAL: as planned"
    assert errors["uncounted"] == "protocol error: an answer without num_output_tokens"


@pytest.mark.parametrize(
    ("server", "arguments", "message"),
    [
        ({"models": ()}, (), "the server has no model that is ready"),
        ({"models": ("a", "b")}, (), "--model must be one of 'a', 'b', got ''"),
        ({}, ("--model", "b"), "'b' is not ready there"),
        ({"not_ready": 9}, (), "the server is not ready"),
        ({"inputs": ("text_input", "max_tokens")}, (),
         "'m' has no input sampling_parameters: it is no model of Triton's vLLM backend; its "
         "inputs are text_input, max_tokens"),
    ],
)  # fmt: skip
def test_servers_that_cannot_be_measured(
    tmp_path: Path,
    server: dict[str, Any],
    arguments: tuple[str, ...],
    message: str,
    capsys: Captured,
) -> None:
    with TritonServer(lambda request: [], **server) as running:
        command = ["bench", "serve", "--backend", "triton", "--address", running.address]
        assert main([*command, *prompts(tmp_path, "x"), *arguments]) == 1
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and not captured.out


def test_a_server_that_loads_is_waited_for(tmp_path: Path) -> None:
    with TritonServer(lambda request: [part("a", 1, "stop")], not_ready=2) as server:
        wait = ("--ready-check-timeout-sec", "20")
        assert bench(server, tmp_path, *prompts(tmp_path, "x"), *wait)["completed"] == 1


def test_our_own_server(
    server: LocalServer, tiny_model: str, tmp_path: Path, capsys: Captured
) -> None:
    lengths = ("--random-input-len", "20", "--random-output-len", "9")
    common = ("--num-prompts", "6", *lengths, "--num-warmups", "1", "--seed", "3")
    result = bench(server, tmp_path, *common, "--tokenizer", tiny_model, "--connections", "2")
    assert (result["completed"], result["model_id"]) == (6, "tiny")
    assert (result["input_lens"], result["output_lens"]) == ([20] * 6, [9] * 6)
    assert [sum(counts) for counts in result["message_tokens"]] == [9] * 6
    assert result["server"]["name"] == "cupaged" and result["server"]["decoupled"] is True
    assert (result["tokens_counted_by"], result["ended_early"]) == ("server", 0)
    server.wait_idle()


def test_our_own_server_refuses_what_is_out_of_range(
    server: LocalServer, tmp_path: Path, capsys: Captured
) -> None:
    bad = ("--temperature", "-1")
    result = bench(server, tmp_path, *prompts(tmp_path, "a page"), *bad, code=1)
    (error,) = result["errors"]
    assert error == "OK error: temperature must be a finite number >= 0, got -1.0"


def test_a_server_of_another_protocol(tmp_path: Path, capsys: Captured) -> None:
    with TritonServer(lambda request: []) as triton:
        assert main(["bench", "serve", "--address", triton.address, "--num-prompts", "1"]) == 1
        assert "UNIMPLEMENTED" in capsys.readouterr().err
    with BenchServer() as ours:
        command = ["bench", "serve", "--backend", "triton", "--address", ours.address]
        assert main([*command, *prompts(tmp_path, "x")]) == 1
        assert "UNIMPLEMENTED" in capsys.readouterr().err
