"""ModelStreamInfer: many requests on one stream, their parts and ends, and what ends the stream."""

from __future__ import annotations

import asyncio
import queue
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from prometheus_client import generate_latest

from cupaged.llm import LLM
from cupaged.server.compat import kserve_stream
from tests.server.asking import PROMPT, Started, failure, offline, told
from tests.server.kserve_messages import INTERFACE, KServe, infer, outputs_of
from tests.server.local_server import SECONDS, LocalServer, wait_until

Code = grpc.StatusCode
PARAMETERS = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}


@pytest.fixture
def kserve(server: LocalServer) -> Iterator[KServe]:
    yield KServe(server.channel)
    server.wait_idle()


def ask(request_id: str, text: str = PROMPT, stream: bool = True, **tensors: Any) -> Any:
    """A request of six tokens, as parts unless it says otherwise."""
    parameters = {**PARAMETERS, **tensors.pop("parameters", {})}
    return infer(id=request_id, text_input=text, stream=stream, parameters=parameters, **tensors)


def by_id(answers: Iterator[Any]) -> dict[str, list[Any]]:
    """The answers of each request; errors are texts, others must end as the protocol says."""
    found: dict[str, list[Any]] = defaultdict(list)
    for answer in answers:
        response = answer.infer_response
        assert (response.model_name, response.model_version) == ("tiny", "1")
        found[response.id].append(answer.error_message or response)
        is_last = response.parameters["triton_final_response"].bool_param
        assert is_last or not answer.error_message
        if is_last:
            found[response.id].append(None)
    for request_id, each in found.items():
        assert each.count(None) == 1 and each.pop() is None, f"{request_id}: more after its end"
    return found


class Open:
    """A stream to which requests are sent one by one; cancelled at the end."""

    def __init__(self, server: LocalServer) -> None:
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.answers = KServe(server.channel).ModelStreamInfer(iter(self._requests.get, None))

    def send(self, request: Any) -> None:
        """None half-closes it."""
        self._requests.put(request)

    def __enter__(self) -> Open:
        return self

    def __exit__(self, *error: object) -> None:
        self._requests.put(None)
        self.answers.cancel()


# ---- answers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("raw", [True, False], ids=["raw", "typed"])
def test_parts_are_the_engines_text(kserve: KServe, llm: LLM, raw: bool) -> None:
    expected = offline(llm, PROMPT).outputs[0]
    request = ask("a", raw=raw, return_num_output_tokens=True, return_finish_reason=True)
    parts = [outputs_of(r) for r in by_id(kserve.ModelStreamInfer(iter([request])))["a"]]
    assert b"".join(p["text_output"][0] for p in parts) == expected.text.encode()
    assert sum(p["num_output_tokens"][0] for p in parts) == 6
    reasons = [p["finish_reason"] for p in parts]
    assert reasons == [[b"None"]] * (len(parts) - 1) + [[b"length"]]


def test_a_whole_answer_begins_with_the_prompt(kserve: KServe, llm: LLM) -> None:
    text = offline(llm, PROMPT).outputs[0].text
    requests = [ask("a", stream=False), ask("b", stream=False, exclude_input_in_output=True)]
    found = by_id(kserve.ModelStreamInfer(iter(requests)))
    told = {key: [outputs_of(r)["text_output"] for r in each] for key, each in found.items()}
    assert told == {"a": [[(PROMPT + text).encode()]], "b": [[text.encode()]]}


def test_samples_side_by_side(kserve: KServe, llm: LLM) -> None:
    texts = [o.text for o in offline(llm, PROMPT, temperature=1.0, seed=3, n=3).outputs]
    request = ask("a", parameters={"n": 3, "temperature": 1.0, "seed": 3})
    parts = [outputs_of(r) for r in by_id(kserve.ModelStreamInfer(iter([request])))["a"]]
    joined = [b"".join(p["text_output"][i] for p in parts).decode() for i in range(3)]
    assert joined == texts


def test_many_requests_and_their_errors(kserve: KServe, llm: LLM) -> None:
    prompts = {f"good{i}": PROMPT + " x" * i for i in range(20)}
    requests = [ask(key, text) for key, text in prompts.items()]
    bad = {
        "empty": (ask("empty", ""), "text_input must be a text of at least one token, got ''"),
        "other": (ask("other", model_name="other"), "model must be one of 'tiny', or empty"),
        "echo": (
            ask("echo", exclude_input_in_output=False),
            "exclude_input_in_output must be true or absent where stream is true, got False",
        ),
        "beams": (ask("beams", beam_width=3), "beam_width is not supported in this version"),
    }
    requests[3:3] = [request for request, _ in bad.values()]
    requests[0].model_name = "tiny"
    answers = list(kserve.ModelStreamInfer(iter(requests)))
    for answer in answers:
        if answer.infer_response.id == "other":  # errors carry the name that was asked for
            answer.infer_response.model_name = "tiny"
    found = by_id(iter(answers))
    assert set(found) == {*prompts, *bad}
    for key, (_, text) in bad.items():
        (message,) = found[key]
        assert message.startswith(text)
    for key, prompt in prompts.items():
        text = b"".join(outputs_of(r)["text_output"][0] for r in found[key]).decode()
        assert text == offline(llm, prompt).outputs[0].text


def test_ids_may_be_equal_or_empty(kserve: KServe) -> None:
    answers = list(kserve.ModelStreamInfer(iter([ask("", stream=False), ask("", stream=False)])))
    assert [a.error_message for a in answers] == ["", ""]


def test_no_more_are_read_than_there_is_room_for(
    kserve: KServe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kserve_stream, "MAX_REQUESTS", 2)
    found = by_id(kserve.ModelStreamInfer(ask(str(i)) for i in range(9)))
    assert set(found) == {str(i) for i in range(9)}


def test_an_empty_stream(kserve: KServe) -> None:
    assert list(kserve.ModelStreamInfer(iter([]))) == []


# ---- ends --------------------------------------------------------------------------------------


def test_cancelling_ends_all_its_requests(endless: LocalServer) -> None:
    before = endless.num_aborted()
    with Open(endless) as stream:
        stream.send(ask("a", parameters={"max_tokens": 900}))
        assert next(stream.answers).infer_response.id == "a"
        stream.send(ask("b", parameters={"max_tokens": 900}))
        wait_until(lambda: endless.stats()["num_running"] == 2)
    endless.wait_idle()
    assert endless.num_aborted() == before + 2


def test_limits_are_told_in_the_stream(paced: LocalServer) -> None:
    with Started(paced), Open(paced) as stream:
        stream.send(ask("late", parameters={"timeout": 50_000}))
        answer = next(stream.answers)
        assert answer.infer_response.id == "late"
        assert "queue_timeout" in answer.error_message
        stream.send(ask("waits"))
        wait_until(lambda: paced.stats()["num_waiting"] == 1)
        stream.send(ask("refused"))
        answer = next(stream.answers)
        assert answer.infer_response.id == "refused"
        assert "1 requests wait" in answer.error_message
    paced.wait_idle()


def test_a_reader_that_stops(paced: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answers pile up behind a write that hangs, until one request has too many."""

    async def hang(self: Any, data: bytes) -> None:
        async with self._writing:
            await asyncio.sleep(SECONDS)

    monkeypatch.setattr(kserve_stream.InferStream, "write", hang)
    with Open(paced) as stream:
        stream.send(ask("a", parameters={"max_tokens": 900}))
        status = failure(lambda: list(stream.answers))
        assert (status.code, status.reason) == (Code.ABORTED, "SLOW_CONSUMER")
    paced.wait_idle()
    lines = generate_latest(paced.registry).decode().splitlines()
    assert [line for line in lines if "request_failed_total{" in line and "SLOW_CONSUMER" in line]


def test_a_message_that_cannot_be_read_ends_the_stream(endless: LocalServer) -> None:
    channel: Any = endless.channel
    call = channel.stream_stream(f"/{INTERFACE.service.full_name}/ModelStreamInfer")
    before = endless.num_aborted()

    def messages() -> Iterator[bytes]:
        yield ask("a", parameters={"max_tokens": 900}).SerializeToString()
        wait_until(lambda: endless.stats()["num_running"] == 1)
        yield b"\xff\xff"

    with pytest.raises(grpc.RpcError) as caught:
        list(call(messages(), timeout=SECONDS))
    status = told(caught.value)
    assert (status.code, status.reason) == (Code.INVALID_ARGUMENT, "MALFORMED_REQUEST")
    endless.wait_idle()
    assert endless.num_aborted() == before + 1


def test_draining_ends_streams_after_their_requests(mortal: LocalServer) -> None:
    with Open(mortal) as busy, Open(mortal) as idle:
        idle.send(ask("first", stream=False))
        next(idle.answers)
        busy.send(ask("a", parameters={"max_tokens": 40}))
        answers = [next(busy.answers)]
        mortal.run(mortal.front_end.drain(timeout_s=SECONDS))
        assert failure(lambda: list(idle.answers)).reason == "DRAINING"
        with pytest.raises(grpc.RpcError) as caught:
            answers += iter(busy.answers)
        assert told(caught.value).reason == "DRAINING"
        assert by_id(iter(answers))["a"]


def test_a_dead_engine_is_told_to_each_request(mortal: LocalServer) -> None:
    with Open(mortal) as stream:
        stream.send(ask("a", parameters={"max_tokens": 900}))
        next(stream.answers)
        mortal.stop_engine()
        error = next(a for a in stream.answers if a.error_message)
        assert error.infer_response.id == "a" and "engine" in error.error_message
        stream.send(ask("b"))
        assert next(stream.answers).infer_response.id == "b"


@pytest.fixture
def mortal(tiny_model: str) -> Iterator[LocalServer]:
    """A server that does not live on after its test."""
    with LocalServer(tiny_model, runner="null", null_steps_per_s=100.0) as running:
        yield running


def test_a_message_that_cannot_be_read_beside_the_first_answer(server: LocalServer) -> None:
    """The status must not meet headers that are still being sent."""
    good = infer(text_input="a page", stream=True, max_tokens=2).SerializeToString()
    path = f"/{INTERFACE.service.full_name}/ModelStreamInfer"
    call: Any = server.channel.stream_stream(path)
    for _ in range(200):
        with pytest.raises(grpc.RpcError) as caught:
            list(call(iter([good, b"\xd7"]), timeout=5))
        assert told(caught.value).code is Code.INVALID_ARGUMENT
    server.wait_idle()
