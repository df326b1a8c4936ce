"""The loop of the engine process: what front ends say, what they hear, and that nothing leaks."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from cupaged.config import EngineConfig
from cupaged.engine.core import EngineCore
from cupaged.engine.runner import NullRunner
from cupaged.errors import (
    CupagedError,
    DuplicateRequestError,
    QueueFullError,
    QueueTimeoutError,
)
from cupaged.server.engine_client import EngineClient
from cupaged.server.wire import FrameReader, encode_frame
from tests.server.serving_loop import (
    GatedRunner,
    ServingLoop,
    connected_client,
    gated,
    read_all,
    serve,
    stats_of,
)
from tests.unit.small_core import drain, request, small_core, tokens_of


def test_outputs_are_those_of_the_core(tmp_path: Path) -> None:
    asked = [
        request("a", 6, seed=5, max_tokens=9),
        request("b", 3, seed=6, n=3, max_tokens=4),
        request("c", 2, seed=7, max_tokens=30, stop_token_ids=list(range(0, 50, 3))),
        request("d", 5, seed=8, logprobs=2, prompt_logprobs=1, max_tokens=3),
    ]
    offline = small_core()
    for one in asked:
        offline.add_request(one)
    expected = drain(offline)

    async def body(loop: ServingLoop, client: EngineClient) -> None:
        streams = [client.submit(one) for one in asked]
        for one, outputs in zip(asked, await asyncio.gather(*map(read_all, streams)), strict=True):
            theirs = [o for o in expected if o.request_id == one.request_id]
            for index in range(one.params.n):
                mine = tokens_of(outputs, one.request_id, index)
                assert mine == tokens_of(theirs, one.request_id, index)
            ends = {o.index: (o.finish_reason, o.stop_reason) for o in outputs if o.finish_reason}
            assert ends == {
                o.index: (o.finish_reason, o.stop_reason) for o in theirs if o.finish_reason
            }
            told = [o.logprobs for o in outputs]
            assert told == [o.logprobs for o in theirs]
            assert [o.prompt_logprobs for o in outputs] == [o.prompt_logprobs for o in theirs]
            assert all(o.first_scheduled_time is not None for o in outputs)
        assert (await stats_of(client)).num_used_blocks == 0
        await client.call("audit")

    assert serve(small_core(), tmp_path, body).error is None


def test_preemptions_are_told(tmp_path: Path) -> None:
    asked = [request(name, 14, max_tokens=24) for name in "ab"]  # 16 blocks of 4 do not hold both

    async def body(loop: ServingLoop, client: EngineClient) -> None:
        streams = [client.submit(one) for one in asked]
        gated(loop.core).gate.release(200)
        first, second = await asyncio.gather(*map(read_all, streams))
        assert {o.num_preemptions for o in first} == {0}
        assert second[0].num_preemptions == 0
        assert second[-1].num_preemptions >= 1

    serve(small_core(GatedRunner, enable_prefix_caching=False), tmp_path, body)


def test_one_message_a_step(tmp_path: Path) -> None:
    """All tokens of a step come in one frame."""

    async def body(loop: ServingLoop, client: EngineClient) -> None:
        reader, writer = await asyncio.open_unix_connection(loop.path)
        params = {"max_tokens": 2}
        forms = [[f"r{i}", [1, 2], params, [], i, 0, [], None, None, None] for i in range(3)]
        writer.write(frames_of(HELLO, *(["add", 7 + i, f, None] for i, f in enumerate(forms))))
        gated(loop.core).gate.release(2)
        frames = FrameReader()
        messages: list[Any] = []
        while len([m for m in messages if m[0] == "step"]) < 2:
            data = await reader.read(65536)
            assert data, "the loop has closed the connection"
            messages += frames.feed(data)
        assert messages[0] == ["ready", loop.info.to_wire()]
        first, second = (m[1] for m in messages if m[0] == "step")
        assert [row[:2] for row in first] == [row[:2] for row in second]
        assert [row[0] for row in first] == [7, 8, 9]
        assert all([*row[3]] == ["first_scheduled_time"] for row in first)
        assert all(row[3] == {"finish_reason": "length"} for row in second)
        writer.close()

    serve(small_core(GatedRunner), tmp_path, body)


# ---- what is refused ---------------------------------------------------------------------------


def test_an_id_is_unique_over_all_front_ends(tmp_path: Path) -> None:
    async def body(loop: ServingLoop, client: EngineClient) -> None:
        other = await connected_client(loop)
        mine = client.submit(request("same", 3, max_tokens=3))
        gated(loop.core).gate.release(1)
        await mine.next()
        theirs = other.submit(request("same", 3, max_tokens=2))
        gated(loop.core).gate.release(10)
        with pytest.raises(DuplicateRequestError, match="'same'"):
            await theirs.next()
        assert len(await read_all(mine)) == 2
        again = other.submit(request("same", 3, max_tokens=2))
        assert len(await read_all(again)) == 2

    serve(small_core(GatedRunner), tmp_path, body)


def test_a_full_queue_is_told_with_an_estimate(tmp_path: Path) -> None:
    async def body(loop: ServingLoop, client: EngineClient) -> None:
        gate = gated(loop.core).gate
        running = client.submit(request("a", 3, max_tokens=40))
        gate.release(1)
        await running.next()  # it runs
        waiting = client.submit(request("b", 3, max_tokens=2))
        refused = client.submit(request("c", 3, max_tokens=2))
        gate.release(1)
        with pytest.raises(QueueFullError, match="2 requests would wait, at most 1 may") as caught:
            await refused.next()
        assert caught.value.retry_after_s is not None
        assert 0.1 <= caught.value.retry_after_s <= 30.0
        gate.release(60)
        assert len(await read_all(waiting)) == 2

    serve(small_core(GatedRunner, max_num_seqs=1, max_num_queued_reqs=1), tmp_path, body)


def test_the_door_says_the_same_here_and_there(tmp_path: Path) -> None:
    """Both ends check; a request that only the engine refuses gets the core's own error."""

    async def body(loop: ServingLoop, client: EngineClient) -> None:
        refused = [
            request("a", 0),
            request("a", 3, n=5),
            request("a", 3, logprobs=21),
            request("a", 3, stop_token_ids=[50]),
            request("a", 64, max_tokens=2),
            request("a", 3, max_tokens=100),
        ]
        for one in refused:
            with pytest.raises(CupagedError) as at_the_core:
                small_core().add_request(one)
            with pytest.raises(CupagedError) as at_the_client:
                client.submit(one)
            blind = client.info
            client.info = loop.info.__class__.from_wire(
                {**loop.info.to_wire(), "config": {**loop.info.to_wire()["config"],
                 "vocab_size": 2**30, "max_num_seqs": 2000, "num_blocks": 2**30,
                 "max_logprobs": 1000, "max_model_len": 2**30}}
            )  # fmt: skip
            try:
                stream = client.submit(one)
            except CupagedError as error:
                at_the_engine = error
            else:
                with pytest.raises(CupagedError) as caught:
                    await stream.next()
                at_the_engine = caught.value
            client.info = blind
            for seen in (at_the_client.value, at_the_engine):
                assert type(seen) is type(at_the_core.value)
                assert str(seen) == str(at_the_core.value)

    serve(small_core(), tmp_path, body)


def frames_of(*messages: list[Any]) -> bytes:
    return b"".join(map(encode_frame, messages))


HELLO: list[Any] = ["hello", 1, ""]
FORM: list[Any] = ["x", [1], {}, [], 0, 0, [], None, None, None]


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff\xff\xff\xff",
        frames_of(["dance"]),
        frames_of(["hello", 2, "from the future"]),
        frames_of(["add", 1, FORM, None]),  # before hello
        frames_of(HELLO, ["add", 1, [1], None]),
        frames_of(HELLO, ["add", 1, FORM]),
        frames_of(HELLO, ["add", 1, FORM, "soon"]),
        frames_of(HELLO, ["add", 1, FORM, None], ["add", 1, FORM, None]),
        frames_of(HELLO, ["abort", 3]),
        frames_of(HELLO, ["abort", [[]]]),
        frames_of(HELLO, ["abort_ids", [3]]),
        frames_of(HELLO, ["end_sample", 1, 0, "boredom"]),
        frames_of(HELLO, ["call", 1, 2, []]),
    ],
)
def test_garbage_closes_its_connection_only(garbage: bytes, tmp_path: Path) -> None:
    async def body(loop: ServingLoop, client: EngineClient) -> None:
        reader, writer = await asyncio.open_unix_connection(loop.path)
        writer.write(garbage)
        while await reader.read(65536):  # until the loop closes it
            pass
        writer.close()
        assert len(await read_all(client.submit(request("a", 3, max_tokens=4)))) == 4
        await client.call("audit")
        assert (await stats_of(client)).num_used_blocks == 0

    assert serve(small_core(), tmp_path, body).error is None


# ---- ends --------------------------------------------------------------------------------------


async def used_blocks(client: EngineClient) -> int:
    return (await stats_of(client)).num_used_blocks


def test_an_abort_takes_effect_within_two_steps(tmp_path: Path) -> None:
    async def body(loop: ServingLoop, client: EngineClient) -> None:
        gate = gated(loop.core).gate
        stream = client.submit(request("a", 6, max_tokens=40))
        gate.release(1)
        await stream.next()
        other = client.submit(request("b", 6, max_tokens=40))
        gate.release(2)
        await other.next()
        before = loop.core._num_steps
        stream.close()
        asked = asyncio.ensure_future(stats_of(client))
        audited = asyncio.ensure_future(client.call("audit"))
        await asyncio.sleep(0)  # both are sent
        gate.release(2)
        stats = await asked
        assert stats.num_steps - before <= 2
        assert stats.num_running == 1
        assert stats.num_used_blocks == 2  # 6 + 1 tokens in blocks of 4: only the other's
        await audited
        other.close()
        gate.release(1)

    serve(small_core(GatedRunner), tmp_path, body)


def test_aborting_by_id_ends_the_stream_of_whoever_owns_it(tmp_path: Path) -> None:
    async def body(loop: ServingLoop, client: EngineClient) -> None:
        other = await connected_client(loop)
        gate = gated(loop.core).gate
        whole = client.submit(request("a", 6, n=3, max_tokens=40))
        gate.release(1)
        first = await whole.next()
        assert [o.index for o in first] == [0, 1, 2]
        queued = client.submit(request("b", 6, n=4, max_tokens=40))  # 3 of 4 places are taken
        queued.end_sample(2, "stop")
        gate.release(1)
        await whole.next()
        other.abort_ids(["a", "unknown", "b", "a"])
        gate.release(1)
        ends = [o for o in await read_all(whole) if o.finish_reason]
        assert [(o.index, o.finish_reason) for o in ends] == [(i, "abort") for i in range(3)]
        ends = await read_all(queued)
        assert [(o.index, o.finish_reason) for o in ends] == [(i, "abort") for i in (0, 1, 3)]
        assert await used_blocks(client) == 0
        other.abort_ids(["a", "b"])
        await other.call("audit")

    serve(small_core(GatedRunner), tmp_path, body)


def test_samples_ended_by_the_front_end(tmp_path: Path) -> None:
    async def body(loop: ServingLoop, client: EngineClient) -> None:
        gate = gated(loop.core).gate
        stream = client.submit(request("a", 6, n=3, max_tokens=4))
        stream.end_sample(1, "stop")  # before the samples have parted
        gate.release(1)
        assert [o.index for o in await stream.next()] == [0, 2]
        stream.end_sample(2, "stop")
        gate.release(4)
        outputs = await read_all(stream)
        assert outputs[-1].index == 0
        assert outputs[-1].finish_reason == "length"
        stats = await stats_of(client)
        assert stats.num_used_blocks == 0
        assert stats.finished_total == {"stop": 2, "length": 1}
        client.submit(request("a", 6, max_tokens=1)).close()  # the id is free

    serve(small_core(GatedRunner), tmp_path, body)


def test_a_connection_that_ends_takes_its_requests_with_it(tmp_path: Path) -> None:
    async def body(loop: ServingLoop, client: EngineClient) -> None:
        other = await connected_client(loop)
        gate = gated(loop.core).gate
        mine = client.submit(request("a", 6, max_tokens=5))
        for i in range(6):
            other.submit(request(f"x{i}", 6, max_tokens=50))
        gate.release(1)
        await mine.next()
        await other.close()
        rest = asyncio.ensure_future(read_all(mine))
        while loop.core.has_unfinished_requests:  # a step at a time
            gate.release(1)
            await asyncio.sleep(0.001)
        assert len(tokens_of(await rest, "a")) == 4
        stats = await stats_of(client)
        assert stats.num_used_blocks == stats.num_running == stats.num_waiting == 0
        assert stats.finished_total == {"length": 1, "abort": 6}
        await client.call("audit")

    serve(small_core(GatedRunner), tmp_path, body)


def test_waiting_too_long(tmp_path: Path) -> None:
    """Only what was never started fails; a timeout that has not passed does nothing."""

    async def body(loop: ServingLoop, client: EngineClient) -> None:
        gate = gated(loop.core).gate
        running = client.submit(request("a", 3, max_tokens=12), queue_timeout_s=60.0)
        gate.release(1)
        await running.next()
        late = client.submit(request("b", 3, max_tokens=2), queue_timeout_s=0.001)
        patient = client.submit(request("c", 3, max_tokens=2), queue_timeout_s=60.0)
        gate.release(40)
        with pytest.raises(QueueTimeoutError, match="request b waited") as caught:
            await late.next()
        assert caught.value.retry_after_s is not None
        assert len(tokens_of(await read_all(running), "a")) == 11
        assert len(await read_all(patient)) == 2
        assert (await stats_of(client)).finished_total == {"abort": 1, "length": 2}

    serve(small_core(GatedRunner, max_num_seqs=1), tmp_path, body)


def test_a_front_end_that_does_not_read(tmp_path: Path) -> None:
    """It loses its connection; the engine never waits for it."""
    config = EngineConfig(vocab_size=50, num_blocks=4000, max_model_len=60_000, max_num_seqs=4)
    core = EngineCore(config, NullRunner(7))

    async def body(loop: ServingLoop, client: EngineClient) -> None:
        deaf = socket.socket(socket.AF_UNIX)
        deaf.connect(str(loop.path))
        form = ["deaf", [1, 2], {"max_tokens": 60_000}, [], 0, 0, [], None, None, None]
        deaf.sendall(encode_frame(["hello", 1, "deaf"]) + encode_frame(["add", 1, form, None]))
        while (await stats_of(client)).num_running < 1:
            pass
        while (stats := await stats_of(client)).num_running:
            assert stats.generation_tokens_total < 59_000, "it was served to the end"
        assert stats.finished_total == {"abort": 1}
        assert stats.num_used_blocks == 0
        deaf.close()

    serve(core, tmp_path, body, max_buffered_bytes=10_000)
