"""Requests that are large where nobody needs it: refused by name, and nobody else has to wait."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from cupaged.config import EngineConfig
from cupaged.engine.core import EngineCore
from cupaged.engine.runner import NullRunner, StepOutput
from cupaged.errors import ChatTemplateError, PromptError, SlowConsumerError
from cupaged.loading.tokenizer import Tokenizer
from cupaged.outputs import TokenLogprobs
from cupaged.server import responses, served_model
from cupaged.server.conversions import MAX_DETOKENIZE_IDS, MAX_MESSAGES
from cupaged.server.engine_client import EngineClient
from cupaged.server.error_status import status_of
from cupaged.server.front_end import FrontEndOptions
from cupaged.server.grpc_server import GrpcOptions
from cupaged.server.output_stream import OutputStream
from cupaged.server.request_parsing import parse
from cupaged.server.service_errors import MalformedRequestError
from cupaged.server.wire import FrameReader, Message, encode_frame, error_from_wire
from cupaged.v1 import generation_pb2 as pb
from tests.server.asking import (
    Told,
    failure,
    health,
    joined,
    options,
    output,
    read,
    request,
    stopping,
    stream_request,
    tokens,
)
from tests.server.local_server import SECONDS, LocalServer
from tests.server.serving_loop import ServingLoop, serve, stats_of

Code = grpc.StatusCode
MAX_HEADER_BYTES = 8192  # of all trailing metadata: what gRPC's clients always take
TOO_LARGE: list[tuple[str, str, dict[str, Any]]] = [
    ("sampling.allowed_token_ids", "510", options(allowed_token_ids=[5] * 510)),
    ("sampling.trace_decode_token_ids", "1025", options(trace_decode_token_ids=[5] * 1025)),
    ("sampling.logit_bias", "510", options(logit_bias=dict.fromkeys(range(510), 1.0))),
    ("sampling.bad_words[1]", "4097", options(bad_words=["a", "b" * 4097])),
    ("stopping.stop_token_ids", "510", stopping(stop_token_ids=[5] * 510)),
    ("stopping.stop[0]", "4097", stopping(stop=["x" * 4097])),
]


@pytest.mark.parametrize(("path", "number", "fields"), TOO_LARGE)
def test_lists_and_strings(
    ask: Callable[..., Told], path: str, number: str, fields: dict[str, Any]
) -> None:
    status = ask(**fields)
    assert status.code is Code.INVALID_ARGUMENT
    [(field, description)] = status.violations
    assert field == path
    assert description.endswith(f"got {number}")


def test_the_longest_lists_and_strings_are_served(server: LocalServer) -> None:
    stop = ["x" * 4096]
    for fields in (
        options(temperature=0, allowed_token_ids=[*range(3, 509)], bad_words=["b " * 2048]),
        stopping(max_new_tokens=2, stop=stop, stop_token_ids=[*range(3, 509)]),
    ):
        answer = server.generation.Generate(request(**fields), timeout=SECONDS)
        assert answer.samples[0].completion_tokens > 0


def test_many_messages_and_ids(server: LocalServer, ask: Callable[..., Told]) -> None:
    """Each of them takes a hundred times the memory that it has on the wire."""
    chat = pb.Chat(messages=[pb.ChatMessage(role="user")] * (MAX_MESSAGES + 1))
    status = ask(None, chat=chat)
    assert (status.code, status.reason) == (Code.INVALID_ARGUMENT, "INVALID_PROMPT")
    many = "must be at most 65536 messages, got 65537"
    assert status.violations == [("chat.messages", many)]
    asked = pb.DetokenizeRequest(token_ids=[70] * (MAX_DETOKENIZE_IDS + 1))
    status = failure(lambda: server.generation.Detokenize(asked, timeout=SECONDS))
    assert status.code is Code.INVALID_ARGUMENT
    many = "must be a list of at most 1048576 ids, got 1048577"
    assert status.violations == [("token_ids", many)]


def test_names(server: LocalServer, ask: Callable[..., Told]) -> None:
    status = ask(model="x" * 20_000)
    assert (status.code, status.reason) == (Code.NOT_FOUND, "MODEL_NOT_FOUND")
    assert status.resource == ("cupaged.v1.ModelInfo", "x" * 253 + "...")
    check = health_pb2.HealthCheckRequest(service="x" * 20_000)
    status = failure(lambda: health(server.channel).Check(check, timeout=SECONDS))
    assert status.code is Code.NOT_FOUND
    assert len(status.message) < 200


@pytest.mark.parametrize("letter", ["x", "é", "\U0001f680"])
@pytest.mark.parametrize("number", [999, 50_000])
def test_statuses_fit_into_headers(letter: str, number: int) -> None:
    status = status_of(ChatTemplateError(letter * number), field_path=lambda name: "chat")
    in_header = sum(1 if byte < 0x80 else 3 for byte in status.details.encode())
    details = sum(len(value) for _, value in status.trailing_metadata)
    assert in_header + details * 4 / 3 < MAX_HEADER_BYTES
    assert status.details.startswith(letter * 200)
    assert status.details.endswith("...") or status.details == letter * number


def test_garbage_of_many_fields_is_not_searched() -> None:
    """The text behind 20,000 unknown fields is not UTF-8; behind ten of them it would be named."""
    bad = request("XY").SerializeToString().replace(b"XY", b"\xc3\x28")
    unknown = b"\xa0\x06\x01"  # field 100
    with pytest.raises(PromptError, match="text must be text in UTF-8"):
        parse(pb.GenerateRequest, unknown * 10 + bad)
    with pytest.raises(MalformedRequestError, match="a message cupaged"):
        parse(pb.GenerateRequest, unknown * 20_000 + bad)


def test_texts_that_no_context_holds(server: LocalServer) -> None:
    long = "x" * (1024 * 1024 + 1)
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content=long)])
    generation = server.generation
    for reason, call in (
        (
            "CONTEXT_LENGTH_EXCEEDED",
            lambda: generation.Tokenize(pb.TokenizeRequest(text=long), timeout=SECONDS),
        ),
        (
            "CHAT_TEMPLATE",
            lambda: generation.Tokenize(pb.TokenizeRequest(chat=chat), timeout=SECONDS),
        ),
    ):
        status = failure(call)
        assert (status.code, status.reason) == (Code.INVALID_ARGUMENT, reason)


def test_long_texts_let_other_threads_run(tiny_model: str) -> None:
    tokenizer = Tokenizer.from_folder(tiny_model)
    text = "Größe <|im_start|> of the memory 東京 \n\n  x " * 10_000
    for work in (lambda: tokenizer.encode(text), lambda: tokenizer.decode([70, 71] * 500_000)):
        worker = threading.Thread(target=work)
        worker.start()
        looks = 0
        while worker.is_alive():
            worker.join(0.001)
            looks += 1
        assert looks > 10, "it held the interpreter all the time"


def test_long_texts_become_what_short_ones_do(tiny_model: str) -> None:
    tokenizer = Tokenizer.from_folder(tiny_model)
    part = "Größe <|im_start|> of the memory 東京\n"  # no token crosses the end of a line here
    ids = tokenizer.encode(part)
    assert tokenizer.encode(part * 200) == ids * 200
    assert tokenizer.decode(ids * 400) == tokenizer.decode(ids) * 400


@pytest.fixture(scope="module")
def telling(tiny_model: str) -> Any:
    """A server that gives the log probabilities of the whole vocabulary."""
    with LocalServer(tiny_model, engine={"max_logprobs": 509}) as running:
        yield running


def test_log_probabilities_of_an_answer_come_in_pieces(telling: LocalServer) -> None:
    asked = {**output(logprobs=-1), "stopping": tokens(60)}
    events = read(telling, stream_request(stream=pb.StreamOptions(interval_tokens=1000), **asked))
    [sample] = joined(events)
    for event in events:
        told = event.delta.logprobs
        assert sum(1 + len(p.top) for p in told) <= responses._MAX_LOGPROBS
        assert len(told) == len(event.delta.token_ids)
    whole = telling.generation.Generate(request(**asked), timeout=SECONDS).samples[0]
    assert sample["token_ids"] == [*whole.token_ids]
    assert sample["text"] == whole.text
    assert [p.token for p in sample["logprobs"]] == [p.token for p in whole.logprobs]


def test_log_probabilities_of_a_long_prompt(
    telling: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_model, "_MAX_PROMPT_LOGPROBS", 10_000)
    ids = pb.TokenIds(ids=[5] * 100)

    def ask(number: int) -> pb.GenerateRequest:
        return request(None, token_ids=ids, **output(prompt_logprobs=number))

    status = failure(lambda: telling.generation.Generate(ask(-1), timeout=SECONDS))
    assert status.code is Code.INVALID_ARGUMENT
    assert status.violations == [
        ("output.prompt_logprobs", "must be at most 99 for a prompt of 100 tokens, got -1")
    ]
    answer = telling.generation.Generate(ask(99), timeout=SECONDS)
    assert len(answer.prompt_logprobs) == 100
    monkeypatch.setattr(served_model, "_MAX_PROMPT_LOGPROBS", 1)
    assert telling.generation.Generate(ask(20), timeout=SECONDS).samples


def test_unread_log_probabilities_count() -> None:
    async def body() -> None:
        due: list[OutputStream] = []
        stream = OutputStream(
            "a", 1, max_pending_tokens=10, send_abort=lambda: None,
            send_end=lambda index, reason: None, forget=lambda: None, due=due,
        )  # fmt: skip
        stream.push(0, [1], {"logprobs": [[[*range(64)], [-1.0] * 64, [1] * 64]]})
        assert stream.num_pending_tokens == 3
        stream.push(0, [1], {"logprobs": [[[*range(640)], [-1.0] * 640, [1] * 640]]})
        with pytest.raises(SlowConsumerError):
            await stream.next()

    asyncio.run(body())


class TellingRunner(NullRunner):
    """Tells 50 log probabilities of every token."""

    def collect(self, handle: int) -> StepOutput:
        """Add them."""
        done = super().collect(handle)
        told = TokenLogprobs([*range(50)], [-4.0] * 50, [1] * 50)
        return replace(done, logprobs=[[told] for _ in done.token_ids])


def test_a_front_end_that_cannot_keep_up_loses_one_request(tmp_path: Path) -> None:
    """The request with the log probabilities ends, and not the connection with all requests."""
    config = EngineConfig(
        vocab_size=50, num_blocks=4000, max_model_len=60_000, max_num_seqs=4, max_logprobs=50
    )

    async def body(loop: ServingLoop, client: EngineClient) -> None:
        slow = socket.socket(socket.AF_UNIX)
        slow.connect(str(loop.path))
        params = {"max_tokens": 60_000, "logprobs": 50}
        slow.sendall(encode_frame(["hello", 1, "slow"]))
        slow.sendall(
            encode_frame(
                ["add", 1, ["heavy", [1, 2], params, [], 0, 0, [], None, None, None], None]
            )
        )
        while not (stats := await stats_of(client)).finished_total.get("abort"):
            assert stats.generation_tokens_total < 59_000, "it was served to the end"
        assert stats.num_used_blocks == 0
        reader, messages = FrameReader(), list[Message]()

        async def hear(kind: str) -> Message:
            while not (found := [m for m in messages if m[0] == kind]):
                data = await asyncio.to_thread(slow.recv, 2**16)
                assert data, "the connection was closed"
                messages.extend(reader.feed(data))
            return found[0]

        slow.settimeout(SECONDS)
        _, handle, form = await hear("failed")
        assert handle == 1
        assert isinstance(error_from_wire(form), SlowConsumerError)
        messages.clear()
        one = ["next", [1, 2], {"max_tokens": 1}, [], 0, 0, [], None, None, None]
        slow.sendall(encode_frame(["add", 2, one, None]))
        _, [[handle, _, generated, _]] = await hear("step")
        assert (handle, generated) == (2, [7])
        slow.close()

    serve(EngineCore(config, TellingRunner(7)), tmp_path, body, max_buffered_bytes=200_000)


def test_an_answer_that_is_too_large_is_counted_as_what_it_is(tiny_model: str) -> None:
    options = FrontEndOptions(grpc=GrpcOptions(max_message_bytes=1024))
    with LocalServer(tiny_model, options) as small:
        message = request(**output(logprobs=20), stopping=tokens(50))
        status = failure(lambda: small.generation.Generate(message, timeout=SECONDS))
        assert status.code is Code.RESOURCE_EXHAUSTED
        assert "answer larger than max" in status.message

        def count(name: str, **labels: str) -> float | None:
            labels["model_name"] = small.settings.model_names[0]
            return small.registry.get_sample_value(f"cupaged_request_{name}_total", labels)

        assert count("failed", code="RESOURCE_EXHAUSTED", reason="") == 1
        assert count("success", finished_reason="length") == 0
