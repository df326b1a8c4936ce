"""Frames, and what crosses in them: the same comes out, and nothing else is taken."""

from __future__ import annotations

import dataclasses
import struct
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupaged import errors
from cupaged.errors import (
    BadValueError,
    CupagedError,
    EngineDeadError,
    EngineError,
    InvalidParameterError,
    QueueFullError,
)
from cupaged.outputs import CoreOutput, EngineStats, TokenLogprobs
from cupaged.request import CoreRequest
from cupaged.sampling_params import BeamSearchParams, SamplingParams
from cupaged.server.wire import (
    FrameReader,
    WireError,
    encode_frame,
    error_from_wire,
    error_to_wire,
)
from cupaged.server.wire_forms import (
    EngineInfo,
    logprobs_from_wire,
    more_to_wire,
    request_from_wire,
    request_to_wire,
    stats_from_wire,
    stats_to_wire,
)
from tests.server.fake_engine import INFO


def crossed(value: Any) -> Any:
    """What the other process has of a value."""
    (message,) = FrameReader().feed(encode_frame(["it", value]))
    return message[1]


def test_the_bytes_of_a_frame() -> None:
    assert encode_frame(["a", 1]) == b"\x04\0\0\0" + b"\x92\xa1a\x01"


@given(
    st.lists(st.lists(st.integers(-(2**63), 2**64 - 1) | st.text() | st.none())),
    st.integers(1, 40),
)
def test_frames_in_any_pieces(bodies: list[list[Any]], size: int) -> None:
    messages = [["kind", *body] for body in bodies]
    data = b"".join(map(encode_frame, messages))
    reader = FrameReader()
    read = [m for i in range(0, len(data), size) for m in reader.feed(data[i : i + size])]
    assert read == messages
    assert reader.num_waiting_bytes == 0


def test_an_unfinished_frame_waits() -> None:
    frame = encode_frame(["kind", "text"])
    reader = FrameReader()
    assert reader.feed(frame[:-1]) == []
    assert reader.num_waiting_bytes == len(frame) - 1
    assert reader.feed(frame[-1:] + frame[:3]) == [["kind", "text"]]
    assert reader.num_waiting_bytes == 3


def framed(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (struct.pack("<I", 101), "a frame of 101 bytes; at most 100 are read"),
        (b"GET / HTTP/1.1\r\n\r\n", r"a frame of 542393671 bytes"),
        (framed(b""), "not msgpack"),
        (framed(b"\xc1"), "not msgpack"),
        (framed(b"\x92\x01"), "not msgpack"),  # cut
        (framed(b"\x01\x01"), "not msgpack"),  # two values
        (framed(b"\x81\x91\x01\x01"), "not msgpack"),  # a list as a key
        (framed(b"\xa1\xff"), "not msgpack"),  # not UTF-8
        (framed(b"\x91" * 99), "not msgpack"),
        (framed(b"\x01"), "not an array that begins with its kind"),
        (framed(b"\x90"), "not an array that begins with its kind"),
        (framed(b"\x91\x01"), "not an array that begins with its kind"),
    ],
)
def test_what_is_no_frame(data: bytes, message: str) -> None:
    with pytest.raises(WireError, match=message):
        FrameReader(max_frame_bytes=100).feed(data)


@given(st.binary(max_size=60))
def test_garbage_gives_messages_or_a_wire_error(data: bytes) -> None:
    try:
        messages = FrameReader(max_frame_bytes=50).feed(data)
    except WireError:
        return
    assert all(isinstance(m, list) and isinstance(m[0], str) for m in messages)


def test_a_message_that_is_too_long_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cupaged.server.wire.MAX_FRAME_BYTES", 10)
    with pytest.raises(WireError, match="a message of 13 bytes; at most 10 may be sent"):
        encode_frame(["0123456789", 1])


# ---- errors ------------------------------------------------------------------------------------


def every_error_class() -> list[type[CupagedError]]:
    found = [value for value in vars(errors).values() if isinstance(value, type)]
    return [c for c in found if issubclass(c, CupagedError)]


@pytest.mark.parametrize("cls", every_error_class())
def test_every_class_of_the_tree_crosses(cls: type[CupagedError]) -> None:
    error = cls("top_p", 7, "in [0, 1]") if issubclass(cls, BadValueError) else cls("a reason")
    back = error_from_wire(crossed(error_to_wire(error)))
    assert type(back) is cls
    assert str(back) == str(error)
    assert vars(back) == vars(error)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        -1.5,
        "text",
        2**63,
        10**5000,
        (1, 2),
        [[1]],
        {"a": 1},
        object,
        "x" * 2000,
        "é" * 130,
        b"\xff",
        "\ud800",
        list(range(9999)),
        float("inf"),
    ],
    ids=lambda value: f"{type(value).__name__}",
)
def test_the_value_of_an_error_is_told_the_same(value: object) -> None:
    error = InvalidParameterError("name", value, "something else")
    back = error_from_wire(crossed(error_to_wire(error)))
    again = error_from_wire(crossed(error_to_wire(back)))  # from engine to front end to supervisor
    assert str(back) == str(again) == str(error)


def test_plain_values_stay_values() -> None:
    back = error_from_wire(crossed(error_to_wire(InvalidParameterError("n", 2048, "less"))))
    assert isinstance(back, InvalidParameterError)
    assert (back.name, back.value, back.allowed) == ("n", 2048, "less")


def test_hints_of_errors_cross() -> None:
    full = error_from_wire(crossed(error_to_wire(QueueFullError("full", retry_after_s=2.5))))
    assert isinstance(full, QueueFullError)
    assert full.retry_after_s == 2.5
    dead = error_from_wire(crossed(error_to_wire(EngineDeadError("killed", restarting=True))))
    assert isinstance(dead, EngineDeadError)
    assert (dead.reason, dead.restarting) == ("killed", True)


@pytest.mark.parametrize(
    "form", [{"type": "ZeroDivisionError"}, {"type": "shown"}, {}, {"type": 3}]
)
def test_an_unknown_class_is_an_engine_error(form: dict[str, Any]) -> None:
    back = error_from_wire({**form, "message": "what it said"})
    assert type(back) is EngineError
    assert str(back) == "what it said"


def test_foreign_errors_cross_with_their_names() -> None:
    back = error_from_wire(crossed(error_to_wire(ZeroDivisionError("by nought"))))
    assert type(back) is EngineError
    assert str(back) == "ZeroDivisionError: by nought"


# ---- requests, outputs, facts ------------------------------------------------------------------

PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0, max_tokens=None, stop=["a", "b"], seed=2**64 - 1),
    SamplingParams(n=3, logit_bias={5: -1.5, 7: 100}, bad_words=["word"], stop_token_ids=[1, 2]),
    SamplingParams(logprobs=-1, prompt_logprobs=3, min_tokens=4, ignore_eos=True, top_k=-1),
    SamplingParams(allowed_token_ids=[3, 1], trace_decode_token_ids=[9], detokenize=False),
]


@pytest.mark.parametrize("params", PARAMS)
def test_a_request_crosses_whole(params: SamplingParams) -> None:
    request = CoreRequest("ïd", (1, 2, 3), params, (0, 2), 2**64 - 1, -(2**63), ((5,), (6, 7)))
    assert request_from_wire(crossed(request_to_wire(request))) == request
    private = replace(request, prefix_caching=False, cache_salt="sält")
    assert request_from_wire(crossed(request_to_wire(private))) == private


def test_only_what_differs_from_the_defaults_is_sent() -> None:
    form = request_to_wire(CoreRequest("id", (1,), SamplingParams(top_p=0.5, max_tokens=16)))
    assert form[2] == {"top_p": 0.5}


@pytest.mark.parametrize(
    "form",
    [
        None,
        [],
        ["id", [1], {}, [], 0, 0],
        ["id", [1], [], [], 0, 0, [], None, None, None],
        ["id", 1, {}, [], 0, 0, [], None, None, None],
        ["id", [1], {}, None, 0, 0, [], None, None, None],
        ["id", [1], {"tempreature": 1}, [], 0, 0, [], None, None, None],
        ["id", [1], {3: 1}, [], 0, 0, [], None, None, None],
        ["id", [1], {}, [], 0, 0, [], None, None, {"width": 2}],
        ["id", [1], {}, [], 0, 0, [3]],
    ],
)
def test_what_is_no_request(form: Any) -> None:
    with pytest.raises(WireError):
        request_from_wire(form)


def test_beams_cross() -> None:
    beams = BeamSearchParams(beam_width=3, max_tokens=7, early_stopping="never")
    request = CoreRequest("id", (1,), beams.sampling_params((2,)), (2,), beams=beams)
    assert request_from_wire(crossed(request_to_wire(request))) == request


def test_a_parameter_is_refused_by_its_own_error() -> None:
    form = request_to_wire(CoreRequest("id", (1,), SamplingParams()))
    form[2] = {"top_p": 2}
    with pytest.raises(InvalidParameterError, match=r"top_p must be a number in \[0, 1\], got 2"):
        request_from_wire(form)


def test_a_plain_token_has_nothing_more_to_tell() -> None:
    output = CoreOutput("id", 0, [5], num_preemptions=2, first_scheduled_time=1.5)
    assert more_to_wire(output, is_first=False, had_preemptions=2) is None


def test_what_else_an_output_tells() -> None:
    told = TokenLogprobs([5, 6], [-0.5, -1.5], [1, 2])
    output = CoreOutput(
        "id", 0, [5], [told], [told, told], 3, first_scheduled_time=1.5, finish_reason="stop",
        stop_reason=5,
    )  # fmt: skip
    more = crossed(more_to_wire(output, is_first=True, had_preemptions=2))
    assert logprobs_from_wire(more.pop("logprobs")) == [told]
    assert logprobs_from_wire(more.pop("prompt_logprobs")) == [told, told]
    assert more == {
        "first_scheduled_time": 1.5,
        "num_preemptions": 3,
        "finish_reason": "stop",
        "stop_reason": 5,
    }


def test_facts_of_the_engine_cross() -> None:
    assert EngineInfo.from_wire(crossed(INFO.to_wire())) == INFO


def test_facts_that_are_not_ours() -> None:
    form = INFO.to_wire()
    with pytest.raises(WireError, match="colour"):
        EngineInfo.from_wire({**form, "colour": "red"})
    with pytest.raises(WireError, match="block_size"):
        EngineInfo.from_wire({**form, "config": {**form["config"], "block_size": 7}})
    del form["device"]
    with pytest.raises(WireError, match="device"):
        EngineInfo.from_wire(form)


def test_statistics_cross() -> None:
    stats = EngineStats(1, 2, 3, 4, 5, 6, 7, 0.5, 9, 10, 11, {"stop": 3})
    assert stats_from_wire(crossed(stats_to_wire(stats))) == stats
    with pytest.raises(WireError, match="colour"):
        stats_from_wire({**stats_to_wire(stats), "colour": 1})


def test_every_field_of_a_request_has_its_place() -> None:
    """A field that is added to the request has to be added to its form."""
    assert len(dataclasses.fields(CoreRequest)) == len(
        request_to_wire(CoreRequest("id", (1,), SamplingParams()))
    )


def test_msgpack_is_asked_for_text_and_bytes_apart() -> None:
    assert crossed(b"\xff") == b"\xff"
    assert msgpack.unpackb(encode_frame(["é"])[4:]) == ["é"]
