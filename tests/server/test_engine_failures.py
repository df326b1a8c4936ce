"""The loop of the engine process when things fail, and when everything happens at once."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from pathlib import Path

import pytest

from cupaged.config import EngineConfig
from cupaged.engine.hash_runner import HashRunner
from cupaged.errors import (
    EngineDeadError,
    EngineError,
    InvalidParameterError,
    KVSanitizerError,
)
from cupaged.outputs import EngineStats
from cupaged.server.control import ControlClosed
from cupaged.server.engine_client import EngineClient
from cupaged.server.engine_loop import MAX_FAILURES
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

# ---- failures ----------------------------------------------------------------------------------


def test_a_step_that_fails_once_costs_nobody_anything(tmp_path: Path) -> None:
    async def body(loop: ServingLoop, client: EngineClient) -> None:
        runner = gated(loop.core)
        streams = [client.submit(request(name, 6, max_tokens=40)) for name in "ab"]
        runner.gate.release(1)
        first = len(await streams[0].next())
        runner.fail_next = 1
        runner.gate.release(200)
        assert first + len(await read_all(streams[0])) == 40
        assert len(await read_all(streams[1])) == 40
        assert (await stats_of(client)).num_used_blocks == 0
        await client.call("audit")

    serve(small_core(GatedRunner), tmp_path, body)


def test_a_failure_that_lasts_takes_one_request_after_the_other(tmp_path: Path) -> None:
    async def body(loop: ServingLoop, client: EngineClient) -> None:
        runner = gated(loop.core)
        lost = [client.submit(request(name, 6, max_tokens=40)) for name in "ab"]
        runner.gate.release(1)
        await lost[0].next()
        runner.fail_next = 3  # together, and each alone
        waiting = client.submit(request("c", 3, n=4, max_tokens=2))  # 4 samples find no place yet
        runner.gate.release(40)
        for stream in lost:
            with pytest.raises(EngineError, match=r"step \d+ failed: a planted failure"):
                await read_all(stream)
        assert len(await read_all(waiting)) == 8
        assert (await stats_of(client)).num_used_blocks == 0
        await client.call("audit")

    serve(small_core(GatedRunner), tmp_path, body)


def test_failures_with_good_steps_between_do_not_add_up(tmp_path: Path) -> None:
    async def body(loop: ServingLoop, client: EngineClient) -> None:
        runner = gated(loop.core)
        runner.gate.release(1000)
        for number in range(5):
            runner.fail_next = 1
            with pytest.raises(EngineError):
                await client.submit(request(f"x{number}", 3, max_tokens=2)).next()
            assert len(await read_all(client.submit(request("good", 3, max_tokens=2)))) == 2

    assert serve(small_core(GatedRunner), tmp_path, body).error is None


def test_failures_in_a_row_end_the_process(tmp_path: Path) -> None:
    async def body(loop: ServingLoop, client: EngineClient) -> None:
        runner = gated(loop.core)
        runner.gate.release(1000)
        runner.fail_next = MAX_FAILURES
        for number in range(MAX_FAILURES - 1):
            with pytest.raises(EngineError, match="planted"):
                await client.submit(request(f"x{number}", 3, max_tokens=2)).next()
        with pytest.raises(EngineError, match="planted"):
            await client.submit(request("x", 3, max_tokens=2)).next()
        while client.state.phase != "dead":
            await asyncio.sleep(0.001)

    loop = serve(small_core(GatedRunner), tmp_path, body)
    assert isinstance(loop.error, EngineError)
    assert str(loop.error).startswith(f"{MAX_FAILURES} steps failed in a row; step")


def test_misused_memory_ends_the_process_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def misuse(plan: object) -> int:
        raise KVSanitizerError("a planted misuse")

    async def body(loop: ServingLoop, client: EngineClient) -> None:
        monkeypatch.setattr(loop.core._runner, "submit", misuse)
        with pytest.raises(EngineError, match="a planted misuse"):
            await client.submit(request("x", 3)).next()
        for _ in range(2000):
            if client.state.phase != "dead":
                await asyncio.sleep(0.001)
        assert client.state.phase == "dead"

    assert isinstance(serve(small_core(), tmp_path, body).error, KVSanitizerError)


def test_a_bug_in_the_core_ends_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cupaged.server.engine_client._REASON_SECONDS", 0.01)

    def broken() -> None:
        raise ZeroDivisionError("a bug")

    async def body(loop: ServingLoop, client: EngineClient) -> None:
        monkeypatch.setattr(loop.core, "_schedule", broken)
        with pytest.raises(EngineDeadError):
            await client.submit(request("x", 3)).next()

    assert isinstance(serve(small_core(), tmp_path, body).error, ZeroDivisionError)


def test_the_end_of_the_supervisor_is_the_end(tmp_path: Path) -> None:
    with ServingLoop(small_core(), tmp_path) as loop:
        loop.supervisor.close()
        loop.join()
    assert isinstance(loop.error, ControlClosed)


# ---- calls, statistics -------------------------------------------------------------------------


def test_calls(tmp_path: Path) -> None:
    async def body(loop: ServingLoop, client: EngineClient) -> None:
        assert await client.call("ping") is None
        with pytest.raises(InvalidParameterError, match="call must be one of ping, stats, audit"):
            await client.call("dance")
        with pytest.raises(InvalidParameterError):
            await client.call("ping", 3)
        assert await client.call("flush_prefix_cache") == 0
        with pytest.raises(InvalidParameterError, match="started before"):
            await client.call("stop_profile")
        await client.call("start_profile")
        with pytest.raises(InvalidParameterError, match="stopped before"):
            await client.call("start_profile")
        await read_all(client.submit(request("a", 3, max_tokens=5)))
        assert "schedule" in await client.call("stop_profile")
        loop.core.block_manager._free.append(0)
        with pytest.raises(EngineError, match="audit failed: a block is free or quarantined twice"):
            await client.call("audit")
        loop.core.block_manager._free.pop()

    serve(small_core(), tmp_path, body)


def test_statistics_come_by_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cupaged.server.engine_loop.STATS_SECONDS", 0.01)

    async def body(loop: ServingLoop, client: EngineClient) -> None:
        came: asyncio.Queue[EngineStats] = asyncio.Queue()
        client.on_stats = came.put_nowait
        await read_all(client.submit(request("a", 3, max_tokens=5)))
        while (await came.get()).generation_tokens_total < 5:
            pass

    serve(small_core(), tmp_path, body)


class Notes:
    """An observer that remembers."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []
        self.updates: list[tuple[EngineStats, bool]] = []

    def step(self, seconds: float, *, num_computed: int, num_generated: int) -> None:
        """Note the tokens."""
        assert seconds >= 0
        self.steps.append((num_computed, num_generated))

    def update(self, stats: EngineStats, *, busy: bool) -> None:
        """Note the snapshot."""
        self.updates.append((stats, busy))


def test_an_observer_sees_every_step(tmp_path: Path) -> None:
    notes = Notes()

    async def body(loop: ServingLoop, client: EngineClient) -> None:
        await read_all(client.submit(request("a", 6, n=2, max_tokens=3)))

    serve(small_core(max_num_batched_tokens=4), tmp_path, body, observer=notes)
    assert notes.steps == [(4, 0), (2, 2), (2, 2), (2, 2)]
    assert notes.updates[0][0].num_steps == 0


# ---- everything at once ------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_a_storm_of_requests_and_aborts(seed: int, tmp_path: Path) -> None:
    """Whoever is left has the tokens that the core alone would give; nothing leaks."""
    rng = random.Random(seed)
    asked = [
        request(
            f"r{i}",
            rng.randint(1, 20),
            seed=i,
            n=rng.choice([1, 1, 1, 2, 4]),
            max_tokens=rng.randint(1, 12),
        )
        for i in range(120)
    ]
    runner = partial(_hash_runner, blocks=24)

    async def one(client: EngineClient, other: EngineClient, number: int) -> None:
        one, fate = asked[number], rng.random()
        owner, stranger = rng.sample([client, other], 2)
        await asyncio.sleep(rng.random() * 0.05)
        stream = owner.submit(one)
        outputs = []
        try:
            for _ in range(rng.randint(0, 5)):
                outputs += await stream.next()
            if fate < 0.3:
                return
            if fate < 0.4:
                stranger.abort_ids([one.request_id])
            elif fate < 0.5:
                stream.end_sample(rng.randrange(one.params.n), "stop")
            outputs += await read_all(stream)
            if fate >= 0.5:
                alone = small_core()
                alone.add_request(one)
                expected = drain(alone)
                for index in range(one.params.n):
                    mine = tokens_of(outputs, one.request_id, index)
                    assert mine == tokens_of(expected, one.request_id, index)
        finally:
            stream.close()

    async def body(loop: ServingLoop, client: EngineClient) -> None:
        other = await connected_client(loop)
        await asyncio.gather(*(one(client, other, i) for i in range(len(asked))))
        assert client.num_streams == other.num_streams == 0
        while (stats := await stats_of(client)).num_running or stats.num_waiting:
            await client.call("audit")
        assert stats.num_used_blocks == stats.num_preempted == stats.num_queued_tokens == 0
        assert len(asked) <= sum(stats.finished_total.values()) <= sum(r.params.n for r in asked)
        await client.call("audit")

    loop = serve(small_core(runner, num_blocks=24), tmp_path, body)
    assert loop.error is None
    assert not loop.loop._live


def _hash_runner(config: EngineConfig, blocks: int) -> HashRunner:
    return HashRunner(num_blocks=blocks, block_size=config.block_size, vocab_size=50)
