"""The client of the engine against an engine whose messages are written here."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from cupaged.errors import (
    CapacityError,
    ContextLengthError,
    CupagedError,
    DrainingError,
    DuplicateRequestError,
    EngineDeadError,
    InvalidParameterError,
    LoadingError,
    NotSupportedError,
    PromptError,
    QueueFullError,
    SlowConsumerError,
)
from cupaged.outputs import CoreOutput, EngineStats, TokenLogprobs
from cupaged.request import CoreRequest
from cupaged.sampling_params import SamplingParams
from cupaged.server.engine_client import EngineClient, EngineState
from cupaged.server.wire import encode_frame, error_to_wire
from cupaged.server.wire_forms import request_from_wire, stats_to_wire
from tests.server.fake_engine import INFO, FakeEngine

Body = Callable[[FakeEngine, EngineClient], Awaitable[None]]


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., None]:
    """Runs a coroutine with an engine and a client that is connected to it."""

    def run(body: Body, **options: Any) -> None:
        async def connected() -> None:
            engine = FakeEngine(tmp_path / "engine.sock")
            await engine.start()
            client = EngineClient(str(engine.path), name="front end 7", **options)
            await asyncio.wait_for(client.connect(), 10)
            try:
                await body(engine, client)
            finally:
                await client.close()
                await engine.stop()

        asyncio.run(asyncio.wait_for(connected(), 30))

    return run


def request(request_id: str = "a", **params: Any) -> CoreRequest:
    return CoreRequest(request_id, (5, 6, 7), SamplingParams(**params), (2,), 11)


async def turn(client: EngineClient) -> None:
    """All that was sent so far, in either direction, has been handled."""
    await client.call("ping")
    await asyncio.sleep(0)  # what is told by `call_soon`


async def until(client: EngineClient, phase: str) -> None:
    """Wait for a phase."""
    while client.state.phase != phase:
        await asyncio.sleep(0.001)


def test_a_request_and_its_outputs(run: Callable[..., None]) -> None:
    async def body(engine: FakeEngine, client: EngineClient) -> None:
        assert engine.hello == ["hello", 1, "front end 7"]
        assert client.state == EngineState("ready")
        assert client.info == INFO
        asked = request(max_tokens=3, logprobs=1)
        stream = client.submit(asked, queue_timeout_s=2.5)
        _, handle, form, timeout = await engine.expect("add")
        assert request_from_wire(form) == asked
        assert timeout == 2.5

        engine.send("step", [[handle, 0, [8], {"first_scheduled_time": 1.25}]])
        (first,) = await stream.next()
        assert first == CoreOutput("a", 0, [8], first_scheduled_time=1.25)
        assert not stream.finished

        told = {"logprobs": [[[9, 4], [-0.5, -2.0], [1, 2]]], "num_preemptions": 1}
        engine.send("step", [[handle, 0, [9], told]])
        engine.send("step", [[handle, 0, [], {"finish_reason": "stop", "stop_reason": 9}]])
        await turn(client)
        assert stream.num_pending_tokens == 1
        second, last = await stream.next()
        logprobs = [TokenLogprobs([9, 4], [-0.5, -2.0], [1, 2])]
        assert second == CoreOutput("a", 0, [9], logprobs, (), 1, 0, 1.25)
        assert last == CoreOutput("a", 0, [], None, (), 1, 0, 1.25, "stop", 9)
        assert stream.finished
        assert await stream.next() == []
        assert client.num_streams == 0
        stream.close()
        await turn(client)
        assert engine.received.empty()  # nothing to abort

    run(body)


def test_one_message_brings_tokens_of_many(run: Callable[..., None]) -> None:
    async def body(engine: FakeEngine, client: EngineClient) -> None:
        streams = [client.submit(request(str(i))) for i in range(5)]
        handles = [(await engine.expect("add"))[1] for _ in streams]
        readers = [asyncio.ensure_future(stream.next()) for stream in streams]
        await asyncio.sleep(0)
        engine.send("step", [[h, 0, [10 + i], None] for i, h in enumerate(handles)])
        outputs = await asyncio.gather(*readers)
        assert [[o.new_token_ids for o in got] for got in outputs] == [[[10 + i]] for i in range(5)]

    run(body)


def test_a_request_is_checked_before_it_is_sent(run: Callable[..., None]) -> None:
    async def body(engine: FakeEngine, client: EngineClient) -> None:
        stream = client.submit(request())
        await engine.expect("add")
        refused: list[tuple[type[CupagedError], CoreRequest]] = [
            (DuplicateRequestError, request()),
            (PromptError, CoreRequest("b", (), SamplingParams())),
            (PromptError, CoreRequest("b", (50,), SamplingParams())),
            (ContextLengthError, CoreRequest("b", (1,) * 64, SamplingParams())),
            (InvalidParameterError, request("b", n=65)),
        ]
        for error, asked in refused:
            with pytest.raises(error):
                client.submit(asked)
        assert client.num_streams == 1
        await turn(client)
        assert engine.received.empty()
        stream.close()
        client.submit(request())  # the id is free again

    run(body)


@pytest.mark.parametrize("kind", ["rejected", "failed"])
def test_an_error_of_the_engine_ends_the_stream(kind: str, run: Callable[..., None]) -> None:
    async def body(engine: FakeEngine, client: EngineClient) -> None:
        seen: list[CupagedError] = []
        stream = client.submit(request())
        stream.on_failure = seen.append
        handle = (await engine.expect("add"))[1]
        engine.send("step", [[handle, 0, [4], None]])
        engine.send(kind, handle, error_to_wire(QueueFullError("full", retry_after_s=3.0)))
        engine.send("step", [[handle, 0, [5], None]])
        await turn(client)
        assert [o.new_token_ids for o in await stream.next()] == [[4]]
        for _ in range(2):
            with pytest.raises(QueueFullError, match="full") as caught:
                await stream.next()
            assert caught.value.retry_after_s == 3.0
        assert seen == [caught.value]
        stream.close()
        await turn(client)
        assert engine.received.empty()
        assert client.num_streams == 0

    run(body)


def test_closing_aborts_once(run: Callable[..., None]) -> None:
    async def body(engine: FakeEngine, client: EngineClient) -> None:
        stream = client.submit(request())
        handle = (await engine.expect("add"))[1]
        waiting = asyncio.ensure_future(stream.next())
        await turn(client)
        stream.close()
        stream.close()
        assert await waiting == []
        assert await engine.expect("abort") == ["abort", [handle]]
        engine.send("step", [[handle, 0, [4], None]])  # it was on its way
        await turn(client)
        assert engine.received.empty()
        assert await stream.next() == []

    run(body)


def test_a_reader_that_is_cancelled_loses_nothing(run: Callable[..., None]) -> None:
    async def body(engine: FakeEngine, client: EngineClient) -> None:
        stream = client.submit(request())
        handle = (await engine.expect("add"))[1]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(stream.next(), 0.01)
        engine.send("step", [[handle, 0, [4], None]])
        assert [o.new_token_ids for o in await stream.next()] == [[4]]

    run(body)


def test_samples_end_one_by_one(run: Callable[..., None]) -> None:
    async def body(engine: FakeEngine, client: EngineClient) -> None:
        stream = client.submit(request(n=3))
        handle = (await engine.expect("add"))[1]
        stream.end_sample(1, "stop")
        stream.end_sample(1, "stop")
        assert await engine.expect("end_sample") == ["end_sample", handle, 1, "stop"]
        length = {"finish_reason": "length"}
        engine.send("step", [[handle, 0, [4], length], [handle, 1, [5], length]])
        (only,) = await stream.next()  # sample 1 had ended here
        assert only.index == 0
        assert not stream.finished
        stream.end_sample(2, "stop")
        assert stream.finished
        assert await stream.next() == []
        assert client.num_streams == 0

    run(body)


def test_a_reader_that_does_not_read(run: Callable[..., None]) -> None:
    async def body(engine: FakeEngine, client: EngineClient) -> None:
        seen: list[CupagedError] = []
        slow, other = client.submit(request("slow")), client.submit(request("other"))
        slow.on_failure = seen.append
        handle, other_handle = [(await engine.expect("add"))[1] for _ in range(2)]
        engine.send("step", [[handle, 0, [1] * 6, None], [other_handle, 0, [7], None]])
        engine.send("step", [[handle, 0, [1] * 4, None]])
        await turn(client)
        assert slow.num_pending_tokens == 10
        assert not seen
        engine.send("step", [[handle, 0, [1], None]])
        assert await engine.expect("abort") == ["abort", [handle]]
        await turn(client)
        with pytest.raises(SlowConsumerError, match=r"slow: 11 tokens .* at most 10 may wait"):
            await slow.next()
        assert len(seen) == 1
        assert [o.new_token_ids for o in await other.next()] == [[7]]

    run(body, max_pending_tokens=10)


def test_aborting_by_id_and_calls(run: Callable[..., None]) -> None:
    async def body(engine: FakeEngine, client: EngineClient) -> None:
        client.abort_ids([])
        client.abort_ids(["x", "y"])
        assert await engine.expect("abort_ids") == ["abort_ids", ["x", "y"]]
        asked = asyncio.ensure_future(client.call("audit", 1, "two"))
        _, call_id, name, args = await engine.expect("call")
        assert (name, args) == ("audit", [1, "two"])
        engine.send("reply", call_id, True, {"blocks": 3})
        assert await asked == {"blocks": 3}
        asked = asyncio.ensure_future(client.call("dance"))
        call_id = (await engine.expect("call"))[1]
        engine.send("reply", call_id, False, error_to_wire(NotSupportedError("no call dance")))
        with pytest.raises(NotSupportedError, match="no call dance"):
            await asked

    run(body)


def test_statistics(run: Callable[..., None]) -> None:
    async def body(engine: FakeEngine, client: EngineClient) -> None:
        stats = EngineStats(1, 2, 3, 4, 5, 6, 7, 0.5, 9, 10, 11, {"stop": 3})
        came: asyncio.Queue[EngineStats] = asyncio.Queue()
        client.on_stats = came.put_nowait
        engine.send("stats", stats_to_wire(stats))
        assert await came.get() == stats == client.stats

    run(body)


def test_a_lost_engine_is_told_with_the_supervisors_reason(run: Callable[..., None]) -> None:
    async def body(engine: FakeEngine, client: EngineClient) -> None:
        states: list[EngineState] = []
        client.on_state = states.append
        stream = client.submit(request())
        handle = (await engine.expect("add"))[1]
        engine.send("step", [[handle, 0, [4], None]])
        await turn(client)
        waiting_call = asyncio.ensure_future(client.call("audit"))
        await engine.expect("call")
        await engine.stop()
        await until(client, "dead")  # at once: no request is sent into the void
        with pytest.raises(EngineDeadError):
            client.submit(request("b"))
        client.set_state("dead", "killed by SIGKILL", restarting=True)
        assert [o.new_token_ids for o in await stream.next()] == [[4]]
        for waiting in (stream.next(), waiting_call):
            with pytest.raises(EngineDeadError, match="killed by SIGKILL; it is being restarted"):
                await waiting
        client.set_state("loading")
        with pytest.raises(LoadingError):
            client.submit(request("b"))
        await engine.start()
        client.set_state("ready")
        await client.wait_ready()
        again = client.submit(request("a"))
        await engine.expect("add")
        assert client.num_streams == 1
        again.close()
        await turn(client)
        assert [s.phase for s in states] == ["dead", "dead", "loading", "ready"]

    run(body)


def test_a_lost_engine_without_a_supervisor(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cupaged.server.engine_client._REASON_SECONDS", 0.01)

    async def body(engine: FakeEngine, client: EngineClient) -> None:
        stream = client.submit(request())
        await engine.expect("add")
        await engine.stop()
        with pytest.raises(EngineDeadError, match="its connection was lost"):
            await stream.next()
        await engine.start()  # it comes back by itself
        await client.wait_ready()
        again = client.submit(request())
        assert (await engine.expect("add"))[0] == "add"
        again.close()

    run(body)


@pytest.mark.parametrize(
    ("restarts", "end"), [(True, "it is being restarted"), (False, "it is not restarted")]
)
def test_a_lost_engine_before_the_supervisor_has_spoken(
    restarts: bool, end: str, run: Callable[..., None]
) -> None:
    """What a client hears in that moment decides whether it comes back."""

    async def body(engine: FakeEngine, client: EngineClient) -> None:
        await engine.stop()
        await until(client, "dead")
        with pytest.raises(EngineDeadError, match=end) as told:
            client.submit(request())
        assert told.value.restarting is restarts

    run(body, restarts=restarts)


def test_an_engine_that_is_lost_while_draining_is_not_restarted(run: Callable[..., None]) -> None:
    async def body(engine: FakeEngine, client: EngineClient) -> None:
        client.set_state("draining")
        await engine.stop()
        await until(client, "dead")
        assert not client.state.restarting

    run(body, restarts=True)


def test_draining_is_for_good(run: Callable[..., None]) -> None:
    async def body(engine: FakeEngine, client: EngineClient) -> None:
        stream = client.submit(request())
        handle = (await engine.expect("add"))[1]
        client.set_state("draining")
        client.set_state("ready")
        assert client.state == EngineState("draining")
        with pytest.raises(DrainingError):
            client.submit(request("b"))
        engine.send("step", [[handle, 0, [4], {"finish_reason": "length"}]])
        assert [o.new_token_ids for o in await stream.next()] == [[4]]  # what runs goes on

    run(body)


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff\xff\xff\xff",
        encode_frame(["dance"]),
        encode_frame(["step"]),
        encode_frame(["step", 3]),
        encode_frame(["step", [[1, 2]]]),
        encode_frame(["ready", {"version": 3}]),
        encode_frame(["reply", 1]),
        encode_frame(["stats", 5]),
    ],
)
def test_garbage_ends_the_connection(garbage: bytes, run: Callable[..., None]) -> None:
    async def body(engine: FakeEngine, client: EngineClient) -> None:
        engine.connected.clear()
        engine.send_bytes(garbage)
        await asyncio.wait_for(engine.connected.wait(), 10)  # it connects anew
        await client.wait_ready()
        client.submit(request())
        await engine.expect("add")

    run(body)


def test_before_the_engine_is_there(tmp_path: Path) -> None:
    async def body() -> None:
        engine = FakeEngine(tmp_path / "engine.sock")
        client = EngineClient(str(engine.path))
        await client.connect(wait=False)
        assert client.state == EngineState("loading")
        with pytest.raises(LoadingError):
            client.submit(request())
        with pytest.raises(LoadingError):
            await client.call("audit")
        await engine.start()
        client.set_state("ready")  # the supervisor says when
        await client.wait_ready()
        await client.close()
        await engine.stop()

    asyncio.run(asyncio.wait_for(body(), 30))


def test_closing_the_client_ends_its_streams(run: Callable[..., None]) -> None:
    async def body(engine: FakeEngine, client: EngineClient) -> None:
        stream = client.submit(request())
        await client.close()
        with pytest.raises(EngineDeadError, match="closed"):
            await stream.next()

    run(body)


def test_capacity_is_the_engines(run: Callable[..., None]) -> None:
    """The pool of the engine counts, as its facts tell it."""

    async def body(engine: FakeEngine, client: EngineClient) -> None:
        assert INFO.config.num_blocks == 100
        client.submit(request(max_tokens=None))
        with pytest.raises(CapacityError):
            small = INFO.to_wire()
            small["config"] |= {"num_blocks": 1}
            engine.send("ready", small)
            await turn(client)
            client.submit(CoreRequest("b", (1,) * 20, SamplingParams()))

    run(body)
