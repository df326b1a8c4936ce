"""`run-batch`: lines in, records out, in order, whatever some of them are."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from cupaged.cli import batch_run
from cupaged.engine.runner import ModelRunner
from tests.e2e.cli import SHORT, Inline, command, environment, shell

HELLO = [{"role": "user", "content": "hello"}]


class Batch:
    """Runs lines through files."""

    def __init__(self, cupaged: Inline, model: str, folder: Path) -> None:
        self.cupaged = cupaged
        self.model = model
        self.source = folder / "in.jsonl"
        self.target = folder / "out.jsonl"

    def __call__(
        self, lines: Iterable[Any], *arguments: str, code: int = 0
    ) -> list[dict[str, Any]]:
        texts = [x if isinstance(x, bytes) else json.dumps(x).encode() for x in lines]
        self.source.write_bytes(b"\n".join(texts))
        files = ("-i", str(self.source), "-o", str(self.target))
        done = self.cupaged("run-batch", self.model, *files, *SHORT, *arguments)
        assert (done.code, done.out) == (code, ""), done.err
        self.told = done.err
        assert not self.target.with_name("out.jsonl.partial").exists()
        return [json.loads(line) for line in self.target.read_text("utf-8").splitlines()]


@pytest.fixture
def batch(cupaged: Inline, cli_model: str, tmp_path: Path) -> Batch:
    return Batch(cupaged, cli_model, tmp_path)


def chat_line(custom_id: str = "a", **body: Any) -> dict[str, Any]:
    fields = {"model": "any", "messages": HELLO, "temperature": 0, **body}
    return {
        "custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": fields,
    }  # fmt: skip


def completion_line(**body: Any) -> dict[str, Any]:
    fields = {"model": "any", "prompt": "the cat", "temperature": 0, **body}
    return {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": fields}


def test_plain_lines_are_answered_as_the_other_verbs_do(
    batch: Batch, cupaged: Inline, cli_model: str
) -> None:
    token_ids = json.loads(cupaged("generate", cli_model, "-p", "the cat", *SHORT, "--json").out)[
        "token_ids"
    ]
    prompt, messages, ids, many = batch(
        [
            {"prompt": "the cat", "id": "first"},
            {"messages": HELLO, "id": 2},
            {"prompt_token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 2}},
            {"prompt": "x", "sampling_params": {"n": 3, "temperature": 5, "seed": 1, "stop": None}},
        ]
    )
    assert (prompt["line"], prompt["id"]) == (1, "first")
    assert prompt["outputs"][0]["token_ids"] == token_ids
    said = cupaged("chat", cli_model, *SHORT, "-q", "hello").out
    assert messages["id"] == 2 and messages["outputs"][0]["text"] + "\n" == said
    assert "id" not in ids and ids["num_prompt_tokens"] == 3
    assert len(ids["outputs"][0]["token_ids"]) == 2
    assert [c["index"] for c in many["outputs"]] == [0, 1, 2]
    assert len({tuple(c["token_ids"]) for c in many["outputs"]}) == 3
    assert "4 answered, 0 failed, 32 tokens" in batch.told


@pytest.mark.parametrize(
    ("line", "kind", "message"),
    [
        (b"not json", "PromptError", "line must be a JSON object (Expecting value"),
        (b"[1]", "PromptError", "line must be a JSON object, got [1]"),
        (b'{"prompt": "\xff"}', "StreamError", "the line: is not UTF-8: byte 0xff at position 12"),
        (b"[" * 100000, "PromptError", "line must be a JSON object"),
        (b'{"prompt": "' + b"x" * 5000 + b'"}', "PromptError", "length of the line in bytes must"),
        ({}, "PromptError", "an object with one of prompt, messages, prompt_token_ids"),
        ({"prompt": "a", "messages": HELLO}, "PromptError", "an object with one of"),
        ({"promt": "a"}, "InvalidParameterError", "must be known, as 'prompt' is, got 'promt'"),
        ({"prompt": ""}, "PromptError", "a text of at least one token"),
        ({"prompt": "\ud800"}, "PromptError", "text that UTF-8 can encode"),
        ({"prompt": 5}, "PromptError", "prompt must be a string, got 5"),
        ({"prompt_token_ids": [1, 10**6]}, "PromptError", "must be in [0, 509), got 1000000"),
        ({"prompt": "a b " * 900}, "ContextLengthError", "length in tokens must be at most 1023"),
        ({"messages": []}, "PromptError", "messages must be"),
        ({"messages": "hi"}, "PromptError", "messages must be a list"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "NotSupportedError",
            "content of type 'image_url' is not supported; only text is",
        ),
        ({"prompt": "a", "sampling_params": 3}, "InvalidParameterError", "must be an object"),
        (
            {"prompt": "a", "sampling_params": {"top_pp": 1}},
            "InvalidParameterError",
            "must be known, as 'top_p' is",
        ),
        (
            {"prompt": "a", "sampling_params": {"logit_bias": {"x": 1}}},
            "InvalidParameterError",
            "logit_bias must be an object of token ids",
        ),
        ({"prompt": "a", "priority": "high"}, "InvalidParameterError", "priority must be"),
        ({"prompt": "a", "sampling_params": {"n": 65}}, "InvalidParameterError", "max_num_seqs=64"),
    ],
)
def test_a_line_that_fails_gets_an_error_and_the_others_are_served(
    batch: Batch, monkeypatch: pytest.MonkeyPatch, line: Any, kind: str, message: str
) -> None:
    monkeypatch.setattr(
        batch_run, "MAX_LINE_BYTES", 4000 if b"xxx" in str(line).encode() else 10**6
    )
    before, bad, after = batch([{"prompt": "the cat"}, line, {"prompt": "the cat"}], code=1)
    assert bad["line"] == 2 and bad["error"]["type"] == kind
    assert message in bad["error"]["message"] and len(bad["error"]["message"]) < 400
    assert before["outputs"] == after["outputs"] and (before["line"], after["line"]) == (1, 3)
    assert "2 answered, 1 failed" in batch.told


def test_blank_lines_have_no_answer_and_numbers_count_them(batch: Batch) -> None:
    found = batch([b"\xef\xbb\xbf", b'{"prompt": "a"}', b"  ", b'{"prompt": "b"}', b""], code=1)
    assert [r["line"] for r in found][1:] == [2, 4]  # a line of a mark alone is no JSON
    assert batch([b'\xef\xbb\xbf{"prompt": "a"}'])[0]["line"] == 1
    assert batch([]) == []


def test_options_are_defaults_for_lines_that_have_none(batch: Batch) -> None:
    lines = [{"prompt": "a"}, {"prompt": "a", "sampling_params": {"max_tokens": 2, "n": 1}}]
    flagged, own = batch(lines, "-n", "2", "--logprobs", "0")
    assert len(flagged["outputs"]) == 2 and "logprobs" in flagged["outputs"][0]
    assert [len(c["token_ids"]) for c in own["outputs"]] == [2]


def test_openai_chat_lines(batch: Batch, cupaged: Inline, cli_model: str) -> None:
    said = cupaged("chat", cli_model, *SHORT, "-q", "hello").out.removesuffix("\n")
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello"}], "name": None}]
    plain, rich = batch(
        [chat_line(), chat_line("b", messages=parts, logprobs=True, top_logprobs=2, n=2)]
    )
    assert (plain["id"], plain["custom_id"], plain["error"]) == ("batch_req_1", "a", None)
    assert plain["response"]["status_code"] == 200
    body = plain["response"]["body"]
    assert body["object"] == "chat.completion" and body["model"] == cli_model
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": said},
            "logprobs": None,
            "finish_reason": "length",
        }
    ]
    usage = body["usage"]
    assert usage["completion_tokens"] == 6
    assert usage["total_tokens"] == usage["prompt_tokens"] + 6
    choices = rich["response"]["body"]["choices"]
    assert [c["index"] for c in choices] == [0, 1]
    assert {c["message"]["content"] for c in choices} == {said}
    for position in choices[0]["logprobs"]["content"]:
        assert len(position["top_logprobs"]) == 2
        assert position["top_logprobs"][0]["logprob"] == position["logprob"]  # greedy
        assert bytes(position["bytes"]).decode() == position["token"]


def test_openai_chat_shows_a_token_that_is_not_among_the_likeliest(batch: Batch) -> None:
    (record,) = batch(
        [chat_line(logprobs=True, top_logprobs=1, trace_decode_token_ids=[9], max_tokens=1)]
    )
    (position,) = record["response"]["body"]["choices"][0]["logprobs"]["content"]
    assert len(position["top_logprobs"]) == 1
    assert position["top_logprobs"][0]["token"] != position["token"]


def test_openai_completion_lines(batch: Batch) -> None:
    one, several, default = batch(
        [
            completion_line(logprobs=1, max_tokens=3, stream=False, echo=False, best_of=None),
            completion_line(prompt=["the cat", [5, 6]], n=2, max_tokens=3),
            completion_line(ignore_eos=True),
        ],
        "--min-tokens", "0",
    )  # fmt: skip
    (choice,) = one["response"]["body"]["choices"]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["text_offset"][1] == len(logprobs["tokens"][0])
    assert [max(top.values()) for top in logprobs["top_logprobs"]] == logprobs["token_logprobs"]
    body = several["response"]["body"]
    assert [c["index"] for c in body["choices"]] == [0, 1, 2, 3]
    assert body["choices"][0]["text"] == body["choices"][1]["text"] == choice["text"]
    assert body["usage"]["completion_tokens"] == 12
    # The API's own default is 16 tokens; `--max-tokens 6` of this test goes before it.
    assert default["response"]["body"]["usage"]["completion_tokens"] == 6


def test_openai_defaults_without_options(cupaged: Inline, cli_model: str, tmp_path: Path) -> None:
    file = tmp_path / "in"
    file.write_text(json.dumps(completion_line(ignore_eos=True, seed=3)))
    done = cupaged("run-batch", cli_model, "-i", str(file))
    usage = json.loads(done.out)["response"]["body"]["usage"]
    assert usage["completion_tokens"] == 16


@pytest.mark.parametrize(
    ("line", "kind", "message"),
    [
        ({"custom_id": "a"}, "NotSupportedError", "url None is not supported; known: /v1/chat"),
        ({**chat_line(), "url": "/v1/embeddings"}, "NotSupportedError", "url '/v1/embeddings'"),
        ({**chat_line(), "url": ["x"]}, "NotSupportedError", "url ['x'] is not supported"),
        ({**chat_line(), "method": "GET"}, "InvalidParameterError", "method must be 'POST'"),
        ({**chat_line(), "custom_id": 3}, "InvalidParameterError", "custom_id must be a string"),
        ({**chat_line(), "body": []}, "InvalidParameterError", "body must be an object"),
        ({**chat_line(), "extra": 1}, "InvalidParameterError", "a key of line must be one of"),
        (chat_line(stream=True), "NotSupportedError", "stream=True is not supported"),
        (chat_line(tools=[{}]), "NotSupportedError", "tools=[{}] is not supported"),
        (chat_line(top_logprobs=1), "InvalidParameterError", "given together with logprobs=true"),
        (chat_line(logprobs=1), "InvalidParameterError", "logprobs must be true or false"),
        (chat_line(wibble=1), "InvalidParameterError", "a key of sampling_params must be"),
        (chat_line(temperature=-1), "InvalidParameterError", "temperature must be"),
        (chat_line(messages=None), "PromptError", "messages must be a list"),
        (completion_line(prompt=None), "PromptError", "prompt must be a text, a list of"),
        (completion_line(prompt=[]), "PromptError", "at least one token"),
        (completion_line(prompt=["a", ""]), "PromptError", "at least one token"),
    ],
)
def test_openai_lines_that_fail(batch: Batch, line: Any, kind: str, message: str) -> None:
    bad, good = batch([line, chat_line("good")], code=1)
    assert bad["id"] == "batch_req_1" and bad["custom_id"] == line["custom_id"]
    assert bad["response"] == {"status_code": 400, "request_id": "batch_req_1", "body": None}
    assert bad["error"]["code"] == kind and message in bad["error"]["message"]
    assert good["error"] is None


def test_a_step_that_fails_costs_only_its_lines(
    batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, steps = ModelRunner.submit, iter(range(10**6))

    def failing(self: ModelRunner, plan: Any) -> int:
        if next(steps) in (3, 4, 5):  # two lines together, and each alone
            raise RuntimeError("the roof fell in")
        return submit(self, plan)

    monkeypatch.setattr(ModelRunner, "submit", failing)
    lost, plain, last = batch(
        [chat_line(), {"prompt": "a"}, {"prompt": "b"}], "--max-num-seqs", "2", code=1
    )
    assert lost["response"]["status_code"] == 500
    assert "the roof fell in" in plain["error"]["message"]
    assert len(last["outputs"][0]["token_ids"]) == 6  # it was waiting


def test_a_queue_that_is_full_is_waited_for(batch: Batch) -> None:
    lines = [{"prompt": f"number {i}", "id": i} for i in range(40)]
    limits = ("--max-num-seqs", "2", "--max-num-queued-reqs", "1")
    found = batch(lines, *limits)
    assert [r["id"] for r in found] == list(range(40))
    # One line with more prompts than may wait can never be served whole.
    (record,) = batch([completion_line(prompt=["a", "b", "c", "d"])], *limits, code=1)
    assert record["error"]["code"] == "QueueFullError"


def test_order_holds_and_memory_is_bounded(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    from cupaged.cli import run_batch

    monkeypatch.setattr(run_batch, "_MIN_WINDOW", 1)
    most = 0
    step = batch_run.BatchRun._step

    def counted(self: batch_run.BatchRun) -> None:
        nonlocal most
        most = max(most, len(self._lines))
        step(self)

    monkeypatch.setattr(batch_run.BatchRun, "_step", counted)
    lines = [
        {"prompt": "x", "id": i, "sampling_params": {"max_tokens": 1 + 7 * (i % 5)}}
        for i in range(60)
    ]
    found = batch(lines, "--max-num-seqs", "3")
    assert [r["id"] for r in found] == list(range(60))
    assert most == 12  # four lines for each sequence


def test_standard_streams_serve_a_writer_that_waits(cli_model: str) -> None:
    running = subprocess.Popen(
        command("run-batch", cli_model, *SHORT), env=environment(),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert running.stdin and running.stdout
    for number in (1, 2):
        running.stdin.write(b'{"prompt": "hello"}\n')
        running.stdin.flush()
        assert json.loads(running.stdout.readline())["line"] == number
    time.sleep(0.1)  # it waits for a line now
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=20)
    assert (running.returncode, errors.strip()) == (130, b"interrupted")


def test_an_interrupted_run_leaves_what_it_has(cli_model: str, tmp_path: Path) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    first = {"prompt": "a", "sampling_params": {"max_tokens": 1}}
    lines = [first] + [{"prompt": "b", "sampling_params": {"ignore_eos": True}}] * 300
    source.write_text("\n".join(map(json.dumps, lines)))
    target.write_text("the old one")
    running = subprocess.Popen(
        command("run-batch", cli_model, "-i", str(source), "-o", str(target)),
        env=environment(), stderr=subprocess.PIPE,
    )  # fmt: skip
    partial = tmp_path / "out.partial"
    deadline = time.monotonic() + 20
    while not (partial.exists() and partial.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.02)
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=20)
    assert running.returncode == 130
    assert f"what was answered so far is in {partial}" in errors.decode()
    assert json.loads(partial.read_text().splitlines()[0])["line"] == 1
    assert target.read_text() == "the old one"


def test_outputs_that_cannot_be_written(
    batch: Batch, cupaged: Inline, cli_model: str, tmp_path: Path
) -> None:
    source = tmp_path / "in"
    source.write_text('{"prompt": "a"}\n')
    asked = ("run-batch", cli_model, "-i", str(source), *SHORT, "-o")
    done = cupaged(*asked, "/dev/full")
    assert done.code == 1 and Path("/dev/full").is_char_device()
    assert done.err == "cupaged: /dev/full: cannot be written: No space left on device\n"
    done = cupaged(*asked, str(tmp_path / "no" / "out"))
    assert done.code == 1 and done.err.endswith("cannot be written: No such file or directory\n")
    done = cupaged(
        "run-batch", cli_model, "-i", str(tmp_path / "none"), "-o", str(tmp_path / "out")
    )
    assert done.code == 1 and done.err.endswith("none: cannot be read: No such file or directory\n")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]  # nothing was left behind
    full = shell(f'"$@" run-batch {cli_model} -i {source} --max-tokens 2 >/dev/full')
    assert full.returncode == 1 and b"standard output: No space left" in full.stderr


def test_a_link_is_followed_and_kept(batch: Batch, tmp_path: Path) -> None:
    (tmp_path / "real.jsonl").write_text("old")
    batch.target.symlink_to("real.jsonl")
    assert len(batch([{"prompt": "a"}])) == 1
    assert batch.target.is_symlink() and "outputs" in (tmp_path / "real.jsonl").read_text()
