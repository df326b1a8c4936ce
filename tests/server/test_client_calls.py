"""Both clients against a scripted server: answers, errors, retries, deadlines."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2

from cupaged.client import Delta, Finished, PromptLogprobs, Started, Usage, errors
from cupaged.client.errors import FieldViolation
from cupaged.outputs import CompletionOutput, Logprob
from cupaged.v1 import generation_pb2 as pb
from tests.server.client_tools import CLIENTS
from tests.server.fake_service import (
    QUEUE_FULL,
    WAIT_S,
    FakeServer,
    fails,
    fails_after,
    retry_info,
    stalls,
)

Code = grpc.StatusCode
CHAT = [{"role": "user", "content": "one two"}]
ROUNDED = 1.05  # gRPC sends a deadline that may be some hundredths too late
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


@pytest.fixture(params=CLIENTS)
def client(request: pytest.FixtureRequest, server: FakeServer) -> Iterator[Any]:
    with CLIENTS[request.param](server.address) as client:
        yield client


def once(answer: Any) -> Any:
    """An act with a fixed answer."""
    return lambda request, context: answer


def test_generate(server: FakeServer, client: Any) -> None:
    answer = client.generate("a b", n=2, model="fake", request_id="id-1", traceparent=TRACE)
    assert answer.outputs == [
        CompletionOutput(i, "a b", [0, 1], finish_reason="length", delta="a b") for i in range(2)
    ]
    assert (answer.text, answer.request_id, answer.model) == ("a b", "id-1", "fake")
    assert answer.usage == Usage(2, 0, 4, time_to_first_token_s=0.25)
    assert (answer.prompt, answer.prompt_logprobs) == (None, None)
    (seen,) = server.seen
    assert seen.request == pb.GenerateRequest(
        request_id="id-1", model="fake", text="a b", sampling=pb.SamplingOptions(n=2)
    )
    assert seen.metadata["x-request-id"] == "id-1" and seen.metadata["traceparent"] == TRACE
    assert "authorization" not in seen.metadata


def test_each_call_has_an_id_of_its_own(server: FakeServer, client: Any) -> None:
    for _ in range(2):
        client.generate("a")
    client.tokenize("a")
    first, second, third = (seen.metadata["x-request-id"] for seen in server.seen)
    assert len({first, second, third}) == 3
    assert server.seen[0].request.request_id == first


def test_chat(server: FakeServer, client: Any) -> None:
    assert client.chat(CHAT).text == "one two"
    (message,) = server.seen[0].request.chat.messages
    assert (message.role, message.content) == ("user", "one two")
    with client.stream_chat(CHAT, max_tokens=5) as stream:
        assert list(stream.texts()) == ["one ", "two "]
    assert server.seen[1].request.stopping.max_new_tokens == 5


def test_what_goes_around_generation(client: Any) -> None:
    assert client.tokenize("a b c") == [0, 1, 2]
    assert client.detokenize([3, 4]) == "w3 w4"
    rendered = client.apply_chat_template(CHAT)
    assert (rendered.text, rendered.token_ids) == ("user:one two", [0, 1])
    assert client.abort("live", "unknown") == ["live"]


def test_facts(client: Any) -> None:
    model = client.model_info()
    assert (model.name, model.aliases, model.max_model_len) == ("fake", ("other",), 64)
    assert model.default_sampling == {"temperature": 0.5, "top_k": 7, "max_tokens": 9}
    assert (model.bos_token_id, model.eos_token_ids, model.load_time) == (None, (2,), None)
    assert [m.name for m in client.list_models()] == ["first", "second"]
    about = client.server_info()
    assert (about.version, about.features, about.packages) == (
        "9.9", ("prefix_cache",), {"grpcio": "1.99"},
    )  # fmt: skip
    load = client.load()
    assert (load.state, load.num_running, load.kv_cache_usage) == ("ready", 1, 0.25)
    assert (load.max_num_queued_reqs, load.max_num_queued_tokens) == (256, None)
    assert load.finished_total == {"stop": 3}
    assert client.health() == "SERVING"


def test_log_probabilities_and_the_prompt(server: FakeServer, client: Any) -> None:
    drawn = pb.TokenLogprob(token_id=7, logprob=-1.5, rank=3, text=b"\xc3")
    best = pb.TokenLogprob(token_id=9, logprob=-0.5, rank=1, text="é".encode())
    position = pb.PositionLogprobs(token=drawn, top=[best])
    sample = pb.Sample(
        text="x", token_ids=[7], logprobs=[position], cumulative_logprob=-1.5,
        finish_reason=pb.FINISH_REASON_STOP, match=pb.StopMatch(stop_token_id=0),
    )  # fmt: skip
    answer = pb.GenerateResponse(
        samples=[sample], prompt=pb.Prompt(text="p", token_ids=[1]),
        prompt_logprobs=[pb.PositionLogprobs(), position],
    )  # fmt: skip
    server.script.append(once(answer))
    got = client.generate("p", logprobs=1, prompt_logprobs=1, echo=True)
    expected = {7: Logprob(-1.5, 3, "\ufffd"), 9: Logprob(-0.5, 1, "é")}
    assert got.outputs[0].logprobs == [expected] and list(got.outputs[0].logprobs[0]) == [7, 9]
    assert got.outputs[0].cumulative_logprob == -1.5 and got.outputs[0].stop_reason == 0
    assert got.prompt_logprobs == [None, expected]
    assert (got.prompt, got.prompt_token_ids) == ("p", [1])


def test_a_stream_has_every_event_in_order(server: FakeServer, client: Any) -> None:
    with client.stream("a b", n=2, request_id="id-2") as stream:
        events = list(stream)
        assert next(stream, None) is None
    assert events == [
        Started("id-2", "fake", 2),
        Delta(0, "a ", [0]), Delta(1, "a ", [0]), Delta(0, "b ", [1]), Delta(1, "b ", [1]),
        Finished(0, "stop", None, 2), Finished(1, "stop", None, 2),
        Usage(2, 0, 4, time_to_first_token_s=0.25),
    ]  # fmt: skip
    assert (stream.started, stream.usage) == (events[0], events[-1])
    assert stream.finished == {0: events[5], 1: events[6]}


def test_events_of_other_kinds(server: FakeServer, client: Any) -> None:
    position = pb.PositionLogprobs(token=pb.TokenLogprob(token_id=1, logprob=-math.inf, rank=2))
    logprobs = pb.PromptLogprobs(positions=[pb.PositionLogprobs(), position])
    end = pb.Finished(
        reason=pb.FINISH_REASON_ABORT, match=pb.StopMatch(stop_string="s"), cumulative_logprob=-2
    )
    started = pb.Started(cached_tokens=0, prompt=pb.Prompt(text="p", token_ids=[5]))
    # Field 999 is a kind of event that this version does not know.
    unknown = pb.GenerateStreamResponse.FromString(b"\xba\x3e\x00")
    server.script.append(
        once(
            iter(
                [
                    pb.GenerateStreamResponse(started=started),
                    unknown,
                    pb.GenerateStreamResponse(prompt_logprobs=logprobs),
                    pb.GenerateStreamResponse(finished=end, usage=pb.Usage()),
                ]
            )
        )
    )
    with client.stream("a") as stream:
        assert list(stream) == [
            Started("", "", 0, num_cached_tokens=0, prompt="p", prompt_token_ids=[5]),
            PromptLogprobs([None, {1: Logprob(-math.inf, 2, "")}]),
            Finished(0, "abort", "s", 0, cumulative_logprob=-2.0),
            Usage(0, 0, 0),
        ]


@pytest.mark.parametrize("call", ["generate", "stream"])
def test_an_error_has_its_class_and_all_its_details(
    server: FakeServer, client: Any, call: str
) -> None:
    bad = error_details_pb2.BadRequest()
    bad.field_violations.add(field="sampling.top_p", description="must be in [0, 1], got 3")
    server.script.append(fails(Code.INVALID_ARGUMENT, "no", "INVALID_PARAMETER", bad))
    with pytest.raises(errors.InvalidRequestError) as raised:
        list(getattr(client, call)("a", request_id="id-3"))
    error = raised.value
    assert error.field_violations == (FieldViolation("sampling.top_p", "must be in [0, 1], got 3"),)
    assert (error.code, error.reason) == (Code.INVALID_ARGUMENT, "INVALID_PARAMETER")
    assert error.request_id == "id-3" and len(server.seen) == 1
    while error.__cause__ is None and error.__context__ is not None:
        error = error.__context__  # type: ignore[assignment]
    assert not isinstance(error, grpc.RpcError)


@pytest.mark.parametrize("call", ["generate", "stream"])
def test_a_full_queue_is_tried_again_with_the_same_id(
    server: FakeServer, client: Any, call: str
) -> None:
    for _ in range(2):
        server.script.append(fails(*QUEUE_FULL, retry_info(0.01)))
    answer = getattr(client, call)("a b")
    if call == "stream":
        assert "".join(answer.texts()) == "a b "
    else:
        assert answer.text == "a b"
    assert len({seen.request.request_id for seen in server.seen}) == 1 < len(server.seen) == 3


def test_no_retry_after_a_token(server: FakeServer, client: Any) -> None:
    lost = fails(Code.UNAVAILABLE, "draining", "DRAINING", retry_info(0.01))
    server.script.append(fails_after(2, lost))  # started, one delta
    with client.stream("a b") as stream:
        got = []
        with pytest.raises(errors.DrainingError) as raised:
            for event in stream:
                got.append(event)
        assert next(stream, None) is None  # it has ended
    assert [type(event) for event in got] == [Started, Delta]
    assert raised.value.retry_after_s == 0.01 and len(server.seen) == 1


def test_a_retry_before_the_first_token_shows_the_start_once(
    server: FakeServer, client: Any
) -> None:
    lost = fails(Code.UNAVAILABLE, "draining", "DRAINING", retry_info(0.01))
    server.script.append(fails_after(1, lost))  # started only
    with client.stream("a") as stream:
        kinds = [type(event) for event in stream]
    assert kinds == [Started, Delta, Finished, Usage] and len(server.seen) == 2


@pytest.mark.parametrize("name", CLIENTS)
def test_retries_can_be_turned_off(server: FakeServer, name: str) -> None:
    server.script.append(fails(*QUEUE_FULL, retry_info(0.01)))
    with CLIENTS[name](server.address, retries=0) as client:
        with pytest.raises(errors.QueueFullError) as raised:
            client.generate("a")
        assert raised.value.retry_after_s == 0.01 and len(server.seen) == 1
        assert client.generate("a").text == "a"


def test_a_queue_timeout_is_not_tried_again(server: FakeServer, client: Any) -> None:
    failure = fails(Code.RESOURCE_EXHAUSTED, "waited", "QUEUE_TIMEOUT", retry_info(0.01))
    server.script.append(failure)
    with pytest.raises(errors.QueueTimeoutError):
        client.generate("a", queue_timeout_s=0.5)
    assert len(server.seen) == 1


def test_health_is_not_tried_again(server: FakeServer, client: Any) -> None:
    server.health_script.append(fails(*QUEUE_FULL, retry_info(0.01)))
    with pytest.raises(errors.QueueFullError):
        client.health()
    assert client.health() == "SERVING"


@pytest.mark.parametrize("call", ["generate", "stream"])
def test_a_timeout_is_the_deadline_of_the_call(server: FakeServer, client: Any, call: str) -> None:
    server.script.append(stalls)
    with pytest.raises(errors.DeadlineError):
        list(getattr(client, call)("a", timeout=0.2))
    (seen,) = server.seen
    assert seen.remaining_s is not None and 0 < seen.remaining_s < 0.2 * ROUNDED
    assert seen.ended.wait(WAIT_S)


def test_no_timeout_is_no_deadline(server: FakeServer, client: Any) -> None:
    client.generate("a")
    # Without a deadline gRPC reports none, or one in the far future.
    assert server.seen[0].remaining_s is None or server.seen[0].remaining_s > 10**6


@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_may_have_a_timeout_for_all_calls(server: FakeServer, name: str) -> None:
    with CLIENTS[name](server.address, timeout=5) as client:
        client.generate("a")
        client.generate("a", timeout=2)
    own, given = (seen.remaining_s for seen in server.seen)
    assert own is not None and 3 < own < 5 * ROUNDED
    assert given is not None and 0 < given < 2 * ROUNDED


def test_a_wait_beyond_the_deadline_is_not_begun(server: FakeServer, client: Any) -> None:
    server.script.append(fails(*QUEUE_FULL, retry_info(30)))
    with pytest.raises(errors.QueueFullError):
        client.generate("a", timeout=10)


def test_all_attempts_share_the_deadline(server: FakeServer, client: Any) -> None:
    for _ in range(2):
        server.script.append(fails(*QUEUE_FULL, retry_info(0.4)))
    client.generate("a", timeout=4)
    first, second, third = (seen.remaining_s for seen in server.seen)
    assert first is not None and second is not None and third is not None
    assert first > second > third > 0


def test_a_message_that_is_too_large(server: FakeServer, client: Any) -> None:
    with pytest.raises(errors.MessageTooLargeError, match="larger than max"):
        client.generate("x" * 5 * 2**20)  # the fake has gRPC's own limit of 4 MiB
    assert server.seen == []


@pytest.mark.parametrize("name", CLIENTS)
def test_an_answer_that_is_too_large(server: FakeServer, name: str) -> None:
    with (
        CLIENTS[name](server.address, max_message_bytes=1000) as client,
        pytest.raises(errors.MessageTooLargeError, match="larger than max"),
    ):
        client.generate("x" * 5000)


@pytest.mark.parametrize("messages", [[], [pb.GenerateStreamResponse(started=pb.Started())]])
def test_a_stream_that_ends_too_early(server: FakeServer, client: Any, messages: list[Any]) -> None:
    server.script.append(once(iter(messages)))
    with pytest.raises(errors.ProtocolError, match="ended before its samples did"):
        list(client.stream("a"))


def test_answers_that_break_the_protocol(server: FakeServer, client: Any) -> None:
    server.script.append(once(pb.GenerateResponse()))
    with pytest.raises(errors.ProtocolError, match="no samples"):
        client.generate("a")
    end = pb.GenerateStreamResponse(finished=pb.Finished(reason=99))  # type: ignore[arg-type]
    server.script.append(once(iter([end])))
    with pytest.raises(errors.ProtocolError, match="the finish reason 99 is unknown"):
        list(client.stream("a"))


@pytest.mark.parametrize("name", CLIENTS)
def test_nobody_there(name: str) -> None:
    with FakeServer() as server:
        address = server.address
    with CLIENTS[name](address, retries=1) as client:
        with pytest.raises(errors.UnreachableError, match="Connection refused"):
            client.generate("a")
        with pytest.raises(errors.UnreachableError):
            list(client.stream("a"))
        with pytest.raises(errors.UnreachableError):
            client.health()


@pytest.mark.parametrize("name", CLIENTS)
def test_a_server_that_comes_back_is_found(name: str) -> None:
    with FakeServer() as server:
        address = server.address
    with CLIENTS[name](address, retries=50, timeout=WAIT_S) as client:
        with pytest.raises(errors.UnreachableError):
            client.health()
        later: list[FakeServer] = []
        timer = threading.Timer(0.3, lambda: later.append(FakeServer(address=address)))
        timer.start()
        assert client.generate("a").text == "a"
        timer.join()
        later[0].stop()


def test_another_kind_of_server(client: Any, server: FakeServer) -> None:
    server.script.append(fails(Code.UNIMPLEMENTED, "Method not found!"))
    with pytest.raises(errors.UnimplementedError):
        client.generate("a")
