"""Log probabilities over gRPC: those of the engine in one process."""

from __future__ import annotations

from typing import Any

import pytest

from cupaged.llm import LLM
from cupaged.v1 import generation_pb2 as pb
from tests.server.asking import PROMPT, joined, offline, read, request, stream_request
from tests.server.local_server import SECONDS, LocalServer

NEAR = 2e-3  # batches differ between the two, and BLAS rounds otherwise


def test_logprobs(server: LocalServer, llm: LLM) -> None:
    output = pb.OutputOptions(logprobs=3, prompt_logprobs=2)
    expected = offline(llm, PROMPT, logprobs=3, prompt_logprobs=2)
    answer = server.generation.Generate(request(output=output), timeout=SECONDS)
    events = read(server, stream_request(output=output))
    [streamed] = joined(events)
    sample, theirs = answer.samples[0], expected.outputs[0]
    check_positions(sample.logprobs, theirs.logprobs or [], theirs.token_ids, 3)
    check_positions(streamed["logprobs"], theirs.logprobs or [], theirs.token_ids, 3)
    assert theirs.cumulative_logprob is not None
    for end in (sample, streamed["end"]):
        assert end.cumulative_logprob == pytest.approx(theirs.cumulative_logprob, abs=NEAR)
    told = [p for e in events if e.HasField("prompt_logprobs") for p in e.prompt_logprobs.positions]
    for positions in (answer.prompt_logprobs, told):
        assert positions[0] == pb.PositionLogprobs()
        prompt = expected.prompt_logprobs or []
        ids = expected.prompt_token_ids
        check_positions(positions[1:], prompt[1:], ids[1:], 2)


def check_positions(positions: Any, expected: list[Any], ids: list[int], count: int) -> None:
    assert len(positions) == len(expected) == len(ids)
    for position, alternatives, token in zip(positions, expected, ids, strict=True):
        assert position.token.token_id == token
        for entry in (position.token, *position.top):
            theirs = alternatives[entry.token_id]
            assert entry.logprob == pytest.approx(theirs.logprob, abs=NEAR)
            assert entry.rank == theirs.rank
            assert entry.text.decode(errors="replace") == theirs.decoded_token
        assert [entry.rank for entry in position.top] == list(range(1, count + 1))


def test_prompt_logprobs_come_in_several_messages(server: LocalServer) -> None:
    ids = [5 + i % 400 for i in range(900)]
    output = pb.OutputOptions(prompt_logprobs=20)
    fields = {"token_ids": pb.TokenIds(ids=ids), "output": output}
    events = read(server, stream_request(None, **fields))
    parts = [e.prompt_logprobs.positions for e in events if e.HasField("prompt_logprobs")]
    assert len(parts) == 2  # 16,384 log probabilities each, at most
    told = [p.token.token_id for part in parts for p in part]
    assert told == [0, *ids[1:]]
