"""The table that maps parameters to fields, and what is refused before anything is sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupaged.client.requests import (
    FIELDS,
    STREAM_FIELDS,
    GenerateOptions,
    StreamOptions,
    detokenize_request,
    generation_request,
    tokenize_request,
)
from cupaged.errors import InvalidParameterError, NotSupportedError
from cupaged.sampling_params import SamplingParams
from cupaged.v1 import generation_pb2 as pb

# Every parameter with a value, and where it must arrive: the path of the field in the proto.
CASES: dict[str, tuple[Any, str]] = {
    "n": (3, "sampling.n"),
    "presence_penalty": (0.25, "sampling.presence_penalty"),
    "frequency_penalty": (-0.5, "sampling.frequency_penalty"),
    "repetition_penalty": (1.5, "sampling.repetition_penalty"),
    "temperature": (0.0, "sampling.temperature"),
    "top_p": (0.5, "sampling.top_p"),
    "top_k": (-1, "sampling.top_k"),
    "min_p": (0.125, "sampling.min_p"),
    "seed": (2**64 - 1, "sampling.seed"),
    "logit_bias": ({7: -1.5}, "sampling.logit_bias"),
    "allowed_token_ids": ([1, 2], "sampling.allowed_token_ids"),
    "bad_words": (["a", "Größe"], "sampling.bad_words"),
    "trace_decode_token_ids": ([9], "sampling.trace_decode_token_ids"),
    "max_tokens": (5, "stopping.max_new_tokens"),
    "min_tokens": (2, "stopping.min_new_tokens"),
    "stop": (["x", "y"], "stopping.stop"),
    "stop_token_ids": ([4], "stopping.stop_token_ids"),
    "ignore_eos": (True, "stopping.ignore_eos"),
    "include_stop_str_in_output": (True, "stopping.include_stop_str_in_output"),
    "logprobs": (0, "output.logprobs"),
    "prompt_logprobs": (-1, "output.prompt_logprobs"),
    "detokenize": (False, "output.detokenize"),
    "skip_special_tokens": (False, "output.skip_special_tokens"),
    "spaces_between_special_tokens": (True, "output.spaces_between_special_tokens"),
    "return_token_ids": (False, "output.token_ids"),
    "echo": (True, "output.echo"),
    "priority": (-3, "priority"),
    "cache_salt": ("salt", "cache_salt"),
}


def made(prompt: Any = "hello", **options: Any) -> pb.GenerateStreamRequest:
    return generation_request(pb.GenerateStreamRequest(), "", "id", options, prompt=prompt)


def value_at(message: Any, path: str) -> Any:
    """The value at a path; a field with presence must be set."""
    *parents, last = path.split(".")
    for parent in parents:
        message = getattr(message, parent)
    if message.DESCRIPTOR.fields_by_name[last].has_presence:
        assert message.HasField(last)
    return getattr(message, last)


@pytest.mark.parametrize("name", CASES)
def test_each_parameter_arrives_in_its_field_and_in_no_other(name: str) -> None:
    given, path = CASES[name]
    request = made(**{name: given})
    value = value_at(request, path)
    if isinstance(given, list):
        value = list(value)
    elif isinstance(given, dict):
        value = dict(value)
    assert value == given
    expected = made()
    message: Any = request
    *parents, last = path.split(".")
    for parent in parents:
        message = getattr(message, parent)
    message.ClearField(last)
    for parent in parents:
        getattr(expected, parent).SetInParent()
    assert request == expected


def test_every_sampling_parameter_has_a_field() -> None:
    assert set(SamplingParams.field_names()) - set(FIELDS) == {"structured_outputs"}


def test_the_typed_options_are_those_of_the_tables() -> None:
    assert set(GenerateOptions.__annotations__) == set(FIELDS)
    assert set(StreamOptions.__annotations__) == set(STREAM_FIELDS)
    assert set(FIELDS) == {*CASES, "queue_timeout_s"}


def test_every_field_of_the_proto_can_be_given() -> None:
    paths = {field.path for field in STREAM_FIELDS.values()}
    for name in ("sampling", "stopping", "output", "stream"):
        kind = pb.GenerateStreamRequest.DESCRIPTOR.fields_by_name[name].message_type
        assert kind is not None
        assert {f"{name}.{field.name}" for field in kind.fields} <= paths


def test_times_are_seconds() -> None:
    request = made(queue_timeout_s=1.5, stream_interval_s=0.25, stream_interval_tokens=4)
    assert (request.queue_timeout.seconds, request.queue_timeout.nanos) == (1, 500_000_000)
    assert (request.stream.interval.nanos, request.stream.interval_tokens) == (250_000_000, 4)


def test_what_is_none_is_left_to_the_server() -> None:
    assert made(**dict.fromkeys(STREAM_FIELDS), structured_outputs=None) == made()
    assert not made().HasField("sampling")


def test_a_seed_of_minus_one_is_none_and_one_stop_string_is_a_list() -> None:
    assert not made(seed=-1).sampling.HasField("seed")
    assert list(made(stop="end").stopping.stop) == ["end"]


def test_numbers_of_numpy_are_numbers() -> None:
    request = made(
        np.array([1, 2]), n=np.int64(3), temperature=np.float32(0.5), stop_token_ids=np.arange(2)
    )
    assert list(request.token_ids.ids) == [1, 2] and request.sampling.n == 3
    assert request.sampling.temperature == 0.5 and list(request.stopping.stop_token_ids) == [0, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": "hot"}, "temperature must be a number, got 'hot'"),
        ({"temperature": True}, "temperature must be a number, got True"),
        ({"n": 1.5}, "n must be an integer of 32 bits, got 1.5"),
        ({"top_k": 2**31}, "top_k must be an integer of 32 bits, got 2147483648"),
        ({"seed": -2}, r"seed must be an integer in \[-1, 2\*\*64\), got -2"),
        ({"stop": 3}, "stop must be a string, or a list of strings of UTF-8 text, got 3"),
        ({"stop": ["\ud800"]}, "stop must be a string, or a list of strings of UTF-8 text"),
        ({"bad_words": "one"}, "bad_words must be a list of strings of UTF-8 text, got 'one'"),
        ({"logit_bias": {"a": 1}}, "logit_bias must be a mapping of token ids to numbers"),
        ({"logit_bias": [1]}, "logit_bias must be a mapping of token ids to numbers"),
        ({"stop_token_ids": [-1]}, r"stop_token_ids must be a list of token ids, got \[-1\]"),
        ({"allowed_token_ids": []}, "allowed_token_ids must be a list of token ids, not empty"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False, got 1"),
        ({"queue_timeout_s": float("nan")}, "queue_timeout_s must be a number of seconds"),
        ({"queue_timeout_s": 1e30}, "queue_timeout_s must be a number of seconds"),
        ({"cache_salt": b"\xff"}, "cache_salt must be UTF-8 text"),
        ({"tempature": 1}, "option must be a name of GenerateOptions, perhaps temperature, got"),
    ],
)
def test_a_value_of_a_wrong_type_is_refused_by_its_name(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        made(**options)


def test_what_is_known_and_not_built() -> None:
    with pytest.raises(NotSupportedError, match="structured_outputs is not supported"):
        made(structured_outputs={"json": "{}"})


def test_a_stream_only_option_is_none_of_a_whole_answer() -> None:
    with pytest.raises(InvalidParameterError, match="option must be a name of GenerateOptions"):
        generation_request(pb.GenerateRequest(), "", "id", {"stream_interval_s": 1}, prompt="a")


def test_prompts() -> None:
    assert made("").WhichOneof("input") == "text"
    assert made([]).WhichOneof("input") == "token_ids"  # for the server to refuse
    assert list(made((3, 4)).token_ids.ids) == [3, 4]
    assert made({"prompt": "hi"}).text == "hi"
    both = {"prompt": "hi", "prompt_token_ids": [5]}
    assert list(made(both).token_ids.ids) == [5]


@pytest.mark.parametrize("prompt", [None, 5, b"x", [1, "a"], [2**32], [True], "\ud800", {}])
def test_what_is_no_prompt(prompt: Any) -> None:
    with pytest.raises(InvalidParameterError, match="prompt must be"):
        made(prompt)


@pytest.mark.parametrize(
    ("messages", "name"),
    [
        ("hello", "messages"),
        ({"role": "user", "content": "x"}, "messages"),
        ([{"role": "user"}], r"messages\[0\]"),
        ([{"role": "user", "content": "x", "name": "me"}], r"messages\[0\]"),
        ([{"role": "user", "content": "x"}, {"role": 1, "content": ""}], r"messages\[1\].role"),
        ([{"role": "user", "content": "\ud800"}], r"messages\[0\].content"),
    ],
)
def test_what_is_no_chat(messages: Any, name: str) -> None:
    with pytest.raises(InvalidParameterError, match=f"^{name} must be"):
        generation_request(pb.GenerateRequest(), "", "id", {}, messages=messages)
    with pytest.raises(InvalidParameterError):
        tokenize_request(messages, 5 if messages == "hello" else "", None)  # type: ignore[arg-type]


def test_tokenize_and_detokenize() -> None:
    request = tokenize_request("a", "m", False)
    assert (request.model, request.text) == ("m", "a")
    assert request.HasField("add_special_tokens") and not request.add_special_tokens
    chat = tokenize_request([{"role": "user", "content": "x"}], "", None)
    assert chat.chat.messages[0].content == "x" and not chat.HasField("add_special_tokens")
    back = detokenize_request([1, 2], "", False)
    assert list(back.token_ids) == [1, 2] and back.HasField("skip_special_tokens")
    with pytest.raises(InvalidParameterError, match="token_ids must be a list of token ids"):
        detokenize_request("12", "", True)  # type: ignore[arg-type]
