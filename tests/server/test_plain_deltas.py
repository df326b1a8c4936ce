"""The bytes of plain deltas are those of the message, kept or not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cupaged.server.plain_deltas import PlainDeltas
from cupaged.v1 import generation_pb2 as pb


def message(index: int, text: str, token_ids: Sequence[int]) -> pb.GenerateStreamResponse:
    return pb.GenerateStreamResponse(
        delta=pb.Delta(index=index, text=text, token_ids=list(token_ids))
    )


CASES: list[tuple[int, str, Sequence[int]]] = [
    (0, " the", [260]),
    (0, "the", [260]),  # at the start of a text, the same token
    (0, " the", [260]),
    (3, " the", [260]),
    (0, " the", [260]),
    (0, "", [7]),  # half a character
    (0, "\N{PILE OF POO}", [8]),
    (0, " the end", [260, 1500]),
    (0, " the", ()),
    (0, "x", [2**31]),
    (0, "", [0]),
]


@pytest.mark.parametrize("max_kept", [0, 1, 2, 100])
def test_each_message(max_kept: int) -> None:
    deltas = PlainDeltas(max_kept)
    for index, text, token_ids in CASES * 2:
        data = deltas.encode(index, text, token_ids)
        assert pb.GenerateStreamResponse.FromString(data) == message(index, text, token_ids)


def test_the_message_of_a_token_is_kept_up_to_the_bound() -> None:
    deltas = PlainDeltas(2)
    first, second, third = (deltas.encode(0, "a", [i]) for i in (1, 2, 3))
    assert deltas.encode(0, "a", [1]) is first
    assert deltas.encode(0, "a", [2]) is second
    assert deltas.encode(0, "a", [3]) is not third
    other = deltas.encode(0, "b", [1])  # takes the place of its predecessor
    assert deltas.encode(0, "b", [1]) is other
