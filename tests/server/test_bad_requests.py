"""The table of errors, row by row, against a running server: what is INVALID_ARGUMENT."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from cupaged.v1 import generation_pb2 as pb
from tests.server.asking import (
    Told,
    asker,
    check_answers,
    failure,
    options,
    output,
    request,
    stopping,
    tokens,
)
from tests.server.local_server import SECONDS, LocalServer

Code = grpc.StatusCode


BAD_PARAMETERS: list[tuple[str, dict[str, Any]]] = [
    ("sampling.temperature", options(temperature=-0.1)),
    ("sampling.temperature", options(temperature=float("nan"))),
    ("sampling.temperature", options(temperature=float("inf"))),
    ("sampling.top_p", options(top_p=1.5)),
    ("sampling.top_k", options(top_k=-2)),
    ("sampling.min_p", options(min_p=-0.5)),
    ("sampling.presence_penalty", options(presence_penalty=2.5)),
    ("sampling.frequency_penalty", options(frequency_penalty=-3)),
    ("sampling.repetition_penalty", options(repetition_penalty=0)),
    ("sampling.n", options(n=0)),
    ("sampling.n", options(n=65)),  # more than max_num_seqs
    ("sampling.n", options(n=5000)),
    ("sampling.logit_bias[3]", options(logit_bias={3: 101.0})),
    ("sampling.logit_bias", options(logit_bias={509: 1.0})),
    ("sampling.allowed_token_ids[1]", options(allowed_token_ids=[5, 509])),
    ("sampling.bad_words", options(bad_words=[""])),
    ("sampling.trace_decode_token_ids[0]", options(trace_decode_token_ids=[509])),
    ("stopping.max_new_tokens", stopping(max_new_tokens=0)),
    ("stopping.max_new_tokens", stopping(max_new_tokens=-1)),
    ("stopping.min_new_tokens", stopping(min_new_tokens=-1)),
    ("stopping.min_new_tokens", stopping(min_new_tokens=3, max_new_tokens=2)),
    ("stopping.stop", stopping(stop=[""])),
    ("stopping.stop", stopping(stop=["x"] * 65)),
    ("stopping.stop_token_ids[2]", stopping(stop_token_ids=[1, 2, 70000])),
    ("output.logprobs", output(logprobs=-2)),
    ("output.logprobs", output(logprobs=21)),  # more than max_logprobs
    ("output.logprobs", output(logprobs=-1)),  # the whole vocabulary
    ("output.prompt_logprobs", output(prompt_logprobs=21)),
    ("output.detokenize", {**output(detokenize=False), **stopping(stop=["x"])}),
    ("priority", {"priority": 0}),
    ("queue_timeout", {"queue_timeout": Duration()}),
    ("queue_timeout", {"queue_timeout": Duration(seconds=-1)}),
    ("queue_timeout", {"queue_timeout": Duration(seconds=1, nanos=-1)}),
    ("cache_salt", {"cache_salt": "é" * 129}),
    ("request_id", {"request_id": "ein\u00e4"}),
    ("request_id", {"request_id": "x" * 257}),
    ("request_id", {"request_id": " x"}),
    ("request_id", {"request_id": "a\nb"}),
]


@pytest.mark.parametrize(("path", "fields"), BAD_PARAMETERS, ids=lambda v: v if v is str else None)
def test_bad_parameters(ask: Callable[..., Told], path: str, fields: dict[str, Any]) -> None:
    status = ask(**fields)
    assert (status.code, status.reason) == (Code.INVALID_ARGUMENT, "INVALID_PARAMETER")
    assert status.domain == "cupaged"
    [(field, description)] = status.violations
    assert field == path
    assert description.startswith("must be ") and ", got " in description
    assert status.message == f"{path} {description}"
    assert status.retry_s is None and status.resource is None and status.debug is None


@pytest.mark.parametrize(
    ("path", "stream"),
    [
        ("stream.interval_tokens", pb.StreamOptions(interval_tokens=-1)),
        ("stream.interval", pb.StreamOptions(interval=Duration(seconds=-1))),
        ("stream.interval", pb.StreamOptions(interval=Duration(seconds=61))),
    ],
)
def test_bad_stream_options(server: LocalServer, path: str, stream: pb.StreamOptions) -> None:
    status = asker(server, "GenerateStream")(stream=stream)
    assert (status.code, status.reason) == (Code.INVALID_ARGUMENT, "INVALID_PARAMETER")
    assert [field for field, _ in status.violations] == [path]


@pytest.mark.parametrize(
    ("path", "text", "fields"),
    [
        ("input", None, {}),
        ("text", "", {}),
        ("token_ids", None, {"token_ids": pb.TokenIds()}),
        ("token_ids.ids[1]", None, {"token_ids": pb.TokenIds(ids=[5, 509])}),
        ("token_ids.ids[0]", None, {"token_ids": pb.TokenIds(ids=[2**32 - 1])}),
        ("chat.messages", None, {"chat": pb.Chat()}),
        (
            "chat.messages[1].role",
            None,
            {
                "chat": pb.Chat(
                    messages=[
                        pb.ChatMessage(role="user", content="x"),
                        pb.ChatMessage(content="y"),
                    ]
                )
            },
        ),
    ],
)
def test_bad_prompts(
    ask: Callable[..., Told], path: str, text: str | None, fields: dict[str, Any]
) -> None:
    status = ask(text, **fields)
    assert (status.code, status.reason) == (Code.INVALID_ARGUMENT, "INVALID_PROMPT")
    assert [field for field, _ in status.violations] == [path]


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
@pytest.mark.parametrize(
    ("path", "make"),
    [
        ("text", lambda: request("XY")),
        ("request_id", lambda: request(request_id="XY")),
        ("stopping.stop[1]", lambda: request(**stopping(stop=["é", "aXYb"]))),
        (
            "chat.messages[2].content",
            lambda: request(
                None,
                chat=pb.Chat(
                    messages=[pb.ChatMessage(role="user", content=c) for c in ("a", "b", "XY")]
                ),
            ),
        ),
    ],
)
def test_text_that_is_not_utf8(
    server: LocalServer, method: str, path: str, make: Callable[[], pb.GenerateRequest]
) -> None:
    data = make().SerializeToString().replace(b"XY", b"\xc3\x28")
    status = send_bytes(server, method, data)
    assert (status.code, status.reason) == (Code.INVALID_ARGUMENT, "INVALID_PROMPT")
    [(field, description)] = status.violations
    assert field == path
    assert description.startswith("must be text in UTF-8, got b'")


@pytest.mark.parametrize("data", [b"\xff\xff", b"\x0a", b"\x1a\x05abc", b"\x07"])
@pytest.mark.parametrize("method", ["Generate", "GenerateStream", "Abort", "Tokenize"])
def test_garbage(server: LocalServer, method: str, data: bytes) -> None:
    status = send_bytes(server, method, data)
    assert (status.code, status.reason) == (Code.INVALID_ARGUMENT, "MALFORMED_REQUEST")
    assert [field for field, _ in status.violations] == ["request"]
    assert f"a message cupaged.v1.{method}Request" in status.message


def send_bytes(server: LocalServer, method: str, data: bytes) -> Told:
    channel: Any = server.channel
    kind = channel.unary_stream if method.endswith("Stream") else channel.unary_unary
    call = kind(f"/cupaged.v1.GenerationService/{method}")
    return failure(lambda: call(data, timeout=SECONDS))


def test_context_length(ask: Callable[..., Told]) -> None:
    ids = pb.TokenIds(ids=[5] * 1000)
    status = ask(None, token_ids=ids, **stopping(max_new_tokens=25))
    assert (status.code, status.reason) == (Code.INVALID_ARGUMENT, "CONTEXT_LENGTH_EXCEEDED")
    assert [field for field, _ in status.violations] == ["stopping.max_new_tokens"]
    limits = {"max_model_len": "1024", "prompt_tokens": "1000", "kv_cache_tokens": "65536"}
    assert status.facts == {**limits, "max_new_tokens": "25"}
    assert "at most 24 for a prompt of 1000 tokens" in status.message
    for number in (1024, 2_000_000):
        status = ask(None, token_ids=pb.TokenIds(ids=[5] * number))
        assert (status.code, status.reason) == (Code.INVALID_ARGUMENT, "CONTEXT_LENGTH_EXCEEDED")
        assert [field for field, _ in status.violations] == ["token_ids"]
        assert status.facts["prompt_tokens"] == str(number)
        assert status.facts["max_model_len"] == "1024"
    status = ask("a b " * 600)
    assert (status.code, status.reason) == (Code.INVALID_ARGUMENT, "CONTEXT_LENGTH_EXCEEDED")
    assert [field for field, _ in status.violations] == ["text"]
    status = ask("x" * (1024 * 1024 + 1))
    assert (status.code, status.reason) == (Code.INVALID_ARGUMENT, "CONTEXT_LENGTH_EXCEEDED")


def test_what_just_fits_is_served(server: LocalServer) -> None:
    ids = pb.TokenIds(ids=[5] * 1000)
    answer = server.generation.Generate(request(None, token_ids=ids, stopping=tokens(24)))
    assert answer.samples[0].completion_tokens == 24
    absent = pb.StoppingOptions(ignore_eos=True)
    answer = server.generation.Generate(request(None, token_ids=ids, stopping=absent))
    assert answer.samples[0].completion_tokens == 24  # the rest of the context
    assert answer.samples[0].finish_reason == pb.FINISH_REASON_LENGTH
    check_answers(server)


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
def test_kv_capacity(tiny_model: str, method: str) -> None:
    with LocalServer(tiny_model, engine={"num_gpu_blocks_override": 4}) as small:
        ask = asker(small, method)
        status = ask(None, token_ids=pb.TokenIds(ids=[5] * 60), **stopping(max_new_tokens=6))
        assert (status.code, status.reason) == (Code.INVALID_ARGUMENT, "KV_CAPACITY")
        assert [field for field, _ in status.violations] == ["stopping.max_new_tokens"]
        assert status.facts["kv_cache_tokens"] == "64"
        assert status.facts["prompt_tokens"] == "60"
        status = ask(None, token_ids=pb.TokenIds(ids=[5] * 65))
        assert (status.code, status.reason) == (Code.INVALID_ARGUMENT, "KV_CAPACITY")
        assert [field for field, _ in status.violations] == ["token_ids"]
        check_answers(small)


def test_chat_templates_that_refuse(tiny_model: str, server: LocalServer) -> None:
    template = "{% if messages[0].role != 'user' %}{{ raise_exception('users first') }}{% endif %}x"
    chat = pb.Chat(messages=[pb.ChatMessage(role="system", content="x")])
    with LocalServer(tiny_model, chat_template=template) as strict:
        status = asker(strict, "Generate")(None, chat=chat)
        assert (status.code, status.reason) == (Code.INVALID_ARGUMENT, "CHAT_TEMPLATE")
        assert status.violations == [("chat", status.message)]
        assert "users first" in status.message
