"""Generate and GenerateStream against the engine in one process: the same texts and numbers."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from cupaged.llm import LLM
from cupaged.sampling_params import SamplingParams
from cupaged.server.conversions import parameters_of, sampling_params
from cupaged.server.field_paths import PARAMETER_PATHS
from cupaged.v1 import generation_pb2 as pb
from tests.server.asking import (
    GREEDY,
    PROMPT,
    joined,
    offline,
    read,
    request,
    stream_request,
    tokens,
)
from tests.server.local_server import SECONDS, LocalServer

CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"stopping": tokens(40)}, {"max_tokens": 40}),
    (
        {"sampling": pb.SamplingOptions(temperature=0.8, seed=7, n=3), "stopping": tokens(20)},
        {"temperature": 0.8, "seed": 7, "n": 3, "max_tokens": 20},
    ),
    (
        {
            "sampling": pb.SamplingOptions(
                temperature=1, top_p=0.9, top_k=20, min_p=0.01, seed=2**63 + 5,
                presence_penalty=0.5, frequency_penalty=-0.5, repetition_penalty=1.1,
                logit_bias={50: -3.0}, bad_words=["ing"],
            ),
            "stopping": tokens(25, min_new_tokens=5),
        },
        {
            "temperature": 1, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "seed": 2**63 + 5,
            "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.1,
            "logit_bias": {50: -3.0}, "bad_words": ["ing"], "max_tokens": 25, "min_tokens": 5,
        },
    ),
    (
        {"sampling": pb.SamplingOptions(temperature=1, seed=3, allowed_token_ids=[40, 41, 300])},
        {"temperature": 1, "seed": 3, "allowed_token_ids": [40, 41, 300]},
    ),
    (
        {"sampling": pb.SamplingOptions(temperature=0, trace_decode_token_ids=[60, 61, 2])},
        {"trace_decode_token_ids": [60, 61, 2]},
    ),
    ({"output": pb.OutputOptions(skip_special_tokens=False)}, {"skip_special_tokens": False}),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "changes"), CASES)
def test_answers_are_those_of_the_engine(
    server: LocalServer, llm: LLM, fields: dict[str, Any], changes: dict[str, Any]
) -> None:
    expected = offline(llm, PROMPT, **changes)
    n = len(expected.outputs)
    answer = server.generation.Generate(request(**fields), timeout=SECONDS)
    events = read(server, stream_request(**fields))
    for sample, streamed, output in zip(
        answer.samples, joined(events, n), expected.outputs, strict=True
    ):
        assert (sample.index, sample.text) == (output.index, output.text)
        assert [*sample.token_ids] == output.token_ids
        assert (streamed["text"], streamed["token_ids"]) == (output.text, output.token_ids)
        assert sample.finish_reason == streamed["end"].reason == pb.FINISH_REASON_LENGTH
        assert sample.completion_tokens == streamed["end"].completion_tokens
        assert sample.completion_tokens == len(output.token_ids)
        assert not sample.HasField("match") and not sample.HasField("cumulative_logprob")
    for usage in (answer.usage, events[-1].usage):
        assert usage.prompt_tokens == len(expected.prompt_token_ids)
        assert usage.completion_tokens == sum(len(o.token_ids) for o in expected.outputs)
        assert usage.cached_tokens == usage.num_preemptions == 0
        spent = [getattr(usage, f"{name}_time") for name in ("queue", "prefill", "decode")]
        assert all(0 <= t.ToTimedelta().total_seconds() < SECONDS for t in spent)
        first = usage.time_to_first_token.ToNanoseconds()
        assert abs(first - sum(t.ToNanoseconds() for t in spent[:2])) < 10
    server.wait_idle()


def test_every_parameter_reaches_the_engine() -> None:
    given = pb.GenerateRequest(
        sampling=pb.SamplingOptions(
            temperature=0.5, top_p=0.25, top_k=-1, min_p=0.125, presence_penalty=1,
            frequency_penalty=-1, repetition_penalty=2, seed=9, n=2, logit_bias={4: 1.5},
            allowed_token_ids=[1, 2], bad_words=["x"], trace_decode_token_ids=[3],
        ),
        stopping=pb.StoppingOptions(
            max_new_tokens=12, min_new_tokens=2, stop=["a", "b"], stop_token_ids=[7],
            ignore_eos=True, include_stop_str_in_output=True,
        ),
        output=pb.OutputOptions(
            detokenize=True, logprobs=0, prompt_logprobs=-1, skip_special_tokens=False,
            spaces_between_special_tokens=True,
        ),
    )  # fmt: skip
    params = sampling_params(parameters_of(given), {"temperature": 0.9, "top_k": 7})
    assert params == SamplingParams(
        temperature=0.5, top_p=0.25, top_k=0, min_p=0.125, presence_penalty=1,
        frequency_penalty=-1, repetition_penalty=2, seed=9, n=2, logit_bias={4: 1.5},
        allowed_token_ids=(1, 2), bad_words=("x",), trace_decode_token_ids=(3,), max_tokens=12,
        min_tokens=2, stop=("a", "b"), stop_token_ids=(7,), ignore_eos=True,
        include_stop_str_in_output=True, logprobs=0, prompt_logprobs=-1, skip_special_tokens=False,
    )  # fmt: skip
    for path in PARAMETER_PATHS.values():
        group, _, name = path.partition(".")
        assert name in {f.name for f, _ in getattr(given, group).ListFields()}, path


def test_what_is_absent_is_as_the_model_says() -> None:
    params = sampling_params({}, {"temperature": 0.5, "max_tokens": 9})
    assert params == SamplingParams(temperature=0.5, max_tokens=9)
    assert sampling_params({}, {}) == SamplingParams(max_tokens=None)


def test_the_table_of_names_is_the_clients() -> None:
    from cupaged.client.requests import FIELDS

    names = {*SamplingParams.field_names()} - {"structured_outputs"}
    assert set(PARAMETER_PATHS) == names
    assert {n: FIELDS[n].path for n in names & set(FIELDS)} == {
        n: PARAMETER_PATHS[n] for n in names & set(FIELDS)
    }


# ---- prompts -----------------------------------------------------------------------------------


def test_prompts_of_ids_and_chats(server: LocalServer, llm: LLM) -> None:
    ids = [5, 300, 77]
    given = pb.TokenIds(ids=ids)
    answer = server.generation.Generate(request(None, token_ids=given), timeout=SECONDS)
    assert [*answer.samples[0].token_ids] == offline(llm, ids).outputs[0].token_ids
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}]
    chat = pb.Chat(messages=[pb.ChatMessage(**m) for m in messages])
    answer = server.generation.Generate(
        request(None, chat=chat, output=pb.OutputOptions(echo=True)), timeout=SECONDS
    )
    prompt = llm.render_chat(messages)
    assert [*answer.prompt.token_ids] == prompt["prompt_token_ids"]
    assert answer.prompt.text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert [*answer.samples[0].token_ids] == offline(llm, prompt).outputs[0].token_ids
    chat.add_generation_prompt = False
    rendered = server.generation.ApplyChatTemplate(pb.ApplyChatTemplateRequest(chat=chat))
    assert rendered.text.endswith("Hello<|im_end|>\n")
    expected = llm.render_chat(messages, add_generation_prompt=False)
    assert [*rendered.token_ids] == expected["prompt_token_ids"]


def test_long_prompts_are_tokenised_the_same(server: LocalServer, llm: LLM) -> None:
    text = "<|im_end|> memory" * 300  # more than is done in the loop
    answer = server.generation.Generate(request(text), timeout=SECONDS)
    assert answer.usage.prompt_tokens < 1000 and len(text) > 4096
    assert [*answer.samples[0].token_ids] == offline(llm, text).outputs[0].token_ids


def test_echo(server: LocalServer) -> None:
    echo = pb.OutputOptions(echo=True)
    answer = server.generation.Generate(request(output=echo), timeout=SECONDS)
    assert (answer.prompt.text, len(answer.prompt.token_ids)) == (
        PROMPT, answer.usage.prompt_tokens,
    )  # fmt: skip
    started = read(server, stream_request(output=echo))[0].started
    assert (started.prompt, started.model) == (answer.prompt, "tiny")
    ids = pb.TokenIds(ids=[5, 6])
    answer = server.generation.Generate(request(None, token_ids=ids, output=echo))
    assert (answer.prompt.text, [*answer.prompt.token_ids]) == ("", [5, 6])


# ---- text and ends -----------------------------------------------------------------------------


def whole_text(server: LocalServer, number: int) -> str:
    answer = server.generation.Generate(request(stopping=tokens(number)), timeout=SECONDS)
    return str(answer.samples[0].text)


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings(server: LocalServer, llm: LLM, include: bool) -> None:
    text = whole_text(server, 60)
    stop = text[20:23]  # within and across tokens
    wanted = {"stop": [stop, "never there"], "include_stop_str_in_output": include}
    expected = offline(llm, PROMPT, max_tokens=60, **wanted).outputs[0]
    assert expected.finish_reason == "stop" and expected.stop_reason == stop
    fields = {"stopping": tokens(60, **wanted)}
    for _ in range(3):  # whatever the outputs are coalesced to
        sample = server.generation.Generate(request(**fields), timeout=SECONDS).samples[0]
        [streamed] = joined(read(server, stream_request(**fields)))
        assert sample.text == streamed["text"] == expected.text
        assert [*sample.token_ids] == streamed["token_ids"] == expected.token_ids
        for match in (sample.match, streamed["end"].match):
            assert match.stop_string == stop
        assert sample.finish_reason == streamed["end"].reason == pb.FINISH_REASON_STOP
    server.wait_idle()


def test_stop_tokens_and_eos(server: LocalServer, llm: LLM) -> None:
    third = offline(llm, PROMPT).outputs[0].token_ids[2]
    fields = {"stopping": tokens(6, stop_token_ids=[third])}
    sample = server.generation.Generate(request(**fields), timeout=SECONDS).samples[0]
    [streamed] = joined(read(server, stream_request(**fields)))
    assert sample.match.stop_token_id == streamed["end"].match.stop_token_id == third
    assert [*sample.token_ids] == streamed["token_ids"]
    assert sample.text == streamed["text"] == offline(
        llm, PROMPT, stop_token_ids=[third]
    ).outputs[0].text  # fmt: skip
    forced = pb.SamplingOptions(temperature=0, trace_decode_token_ids=[60, 2])  # 2 is EOS
    stopping = pb.StoppingOptions(max_new_tokens=9)
    [streamed] = joined(read(server, stream_request(sampling=forced, stopping=stopping)))
    assert streamed["token_ids"] == [60, 2]
    assert streamed["end"].reason == pb.FINISH_REASON_STOP
    assert not streamed["end"].HasField("match")


def test_text_is_whole_characters(server: LocalServer) -> None:
    """The euro sign comes as three tokens of one byte; no message has a part of it."""
    ids = server.generation.Tokenize(pb.TokenizeRequest(text="a€b\U0001f680")).token_ids
    assert len(ids) > 5
    forced = pb.SamplingOptions(temperature=0, trace_decode_token_ids=ids)
    fields = {"sampling": forced, "stopping": tokens(len(ids))}
    events = read(server, stream_request(**fields))
    pieces = [e.delta.text for e in events if e.HasField("delta")]
    assert "".join(pieces) == "a€b\U0001f680"
    assert not any("\ufffd" in piece for piece in pieces)
    assert joined(events)[0]["token_ids"] == [*ids]


def test_without_text_or_token_ids(server: LocalServer) -> None:
    plain = server.generation.Generate(request(), timeout=SECONDS).samples[0]
    for output in (pb.OutputOptions(detokenize=False), pb.OutputOptions(token_ids=False)):
        sample = server.generation.Generate(request(output=output), timeout=SECONDS).samples[0]
        [streamed] = joined(read(server, stream_request(output=output)))
        text = plain.text if output.detokenize or not output.HasField("detokenize") else ""
        ids = [*plain.token_ids] if not output.HasField("token_ids") else []
        assert (sample.text, [*sample.token_ids]) == (text, ids)
        assert (streamed["text"], streamed["token_ids"]) == (text, ids)
        assert sample.completion_tokens == streamed["end"].completion_tokens == 6


# ---- ids and metadata --------------------------------------------------------------------------


def test_request_ids(server: LocalServer) -> None:
    generation = server.generation
    for message, metadata, expected in (
        (request(request_id="mine"), (), "mine"),
        (request(), (("x-request-id", "theirs"),), "theirs"),
        (request(request_id="mine"), (("x-request-id", "theirs"),), "mine"),
    ):
        answer, call = generation.Generate.with_call(message, metadata=metadata, timeout=SECONDS)
        assert answer.request_id == expected
        assert dict(call.initial_metadata())["x-request-id"] == expected
    answer = generation.Generate(request(), timeout=SECONDS)
    assert str(uuid.UUID(answer.request_id)) == answer.request_id
    stream = generation.GenerateStream(stream_request(request_id="s"), timeout=SECONDS)
    assert next(stream).started.request_id == "s"
    assert dict(stream.initial_metadata())["x-request-id"] == "s"
    list(stream)


# ---- tokenizers --------------------------------------------------------------------------------


def test_tokenize_and_detokenize(server: LocalServer, llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    for text in ("", PROMPT, "naïve 東京 " * 2000):
        answer = server.generation.Tokenize(pb.TokenizeRequest(text=text), timeout=SECONDS)
        assert [*answer.token_ids] == tokenizer.encode(text)
        assert answer.max_model_len == 1024
        back = server.generation.Detokenize(pb.DetokenizeRequest(token_ids=answer.token_ids))
        assert back.text == text
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="x")])
    rendered = server.generation.ApplyChatTemplate(pb.ApplyChatTemplateRequest(chat=chat))
    answer = server.generation.Tokenize(pb.TokenizeRequest(chat=chat))
    assert [*answer.token_ids] == [*rendered.token_ids]
    special = pb.DetokenizeRequest(token_ids=[1, 70, 2], skip_special_tokens=False)
    assert server.generation.Detokenize(special).text.startswith("<|im_start|>")
    assert server.generation.Detokenize(pb.DetokenizeRequest()).text == ""


# ---- when messages are sent --------------------------------------------------------------------


@pytest.fixture(scope="module")
def steady(tiny_model: str) -> Iterator[LocalServer]:
    """200 steps a second, each of one token a request."""
    with LocalServer(tiny_model, runner="null", null_steps_per_s=200.0) as running:
        yield running


def sizes(events: list[pb.GenerateStreamResponse]) -> list[int]:
    return [len(e.delta.token_ids) for e in events if e.HasField("delta")]


def test_intervals(steady: LocalServer) -> None:
    """How exactly is a matter of `test_event_stream`; a slow machine may send more at a time."""
    assert sum(sizes(read(steady, stream_request(stopping=tokens(50))))) == 50
    stream = pb.StreamOptions(interval_tokens=16)
    found = sizes(read(steady, stream_request(stream=stream, stopping=tokens(50))))
    assert sum(found) == 50
    assert all(size >= 16 for size in found[1:-1])
    stream = pb.StreamOptions(interval=Duration(nanos=60_000_000))  # 12 steps
    found = sizes(read(steady, stream_request(stream=stream, stopping=tokens(60))))
    assert sum(found) == 60
    assert len(found) < 30  # 60 without the interval


def test_an_interval_delays_no_end(steady: LocalServer) -> None:
    """The stop string is found while tokens wait, and ends the wait."""
    stream = pb.StreamOptions(interval=Duration(seconds=60))
    stopping = tokens(500, stop=["aaaaaaa"], include_stop_str_in_output=True)
    events = read(steady, stream_request(stream=stream, stopping=stopping))
    [sample] = joined(events)
    assert sample["text"] == "a" * 7
    assert sum(sizes(events)) == 7 and len(sizes(events)) <= 2
    steady.wait_idle()


def test_samples_take_turns(steady: LocalServer) -> None:
    sampling = pb.SamplingOptions(n=4)
    events = read(steady, stream_request(sampling=sampling, stopping=tokens(30)))
    for sample in joined(events, 4):
        assert sample["text"] == "a" * 30
    assert events[-1].usage.completion_tokens == 120
    assert GREEDY.temperature == 0
