"""Storms of cancellations: whatever ends a stream, all that it had comes back."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.asking import joined, stream_request, tokens
from tests.server.local_server import SECONDS
from tests.server.storm import Storm, run_storm
from tests.server.watched_server import WatchedServer, total

# Steps are slow enough for streams to live until they are ended, and few sequences run at once, so
# that others are ended while they wait.
NULL = ("--runner", "null", "--null-steps-per-s", "200", "--max-num-seqs", "24")
QUEUE = ("--max-num-queued-reqs", "1000")
MARGIN_MB = 6.0
LARGE_MARGIN_MB = 12.0  # what is kept depends on how many streams of a large storm meet
BYSTANDER_TOKENS = 300


@pytest.fixture(scope="module")
def server(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WatchedServer]:
    folder = tmp_path_factory.mktemp("storm")
    with WatchedServer(folder, tiny_model, *NULL, *QUEUE) as running:
        yield running
        running.process.send_signal(signal.SIGTERM)
        assert running.end() == 0
        running.check_gone()


def ends_of(server: WatchedServer) -> Counter[str]:
    """What the server has counted; `computed`: requests that the engine brought to their ends."""
    samples = server.metrics()
    success, failed = "request_success_total", "request_failed_total"
    codes = ("CANCELLED", "DEADLINE_EXCEEDED")
    (stats,) = server.ask_engine("stats")
    given_up = sum(total(samples, failed, f'code="{code}"') for code in codes)
    return Counter(
        received=int(total(samples, "request_received_total")),
        succeeded=int(total(samples, success)),
        aborted=int(total(samples, success, 'finished_reason="abort"')),
        failed=int(total(samples, failed)),
        given_up=int(given_up),
        computed=sum(n for end, n in stats["finished_total"].items() if end != "abort"),
    )


def run_checked(server: WatchedServer, seed: int, **sizes: int) -> Storm:
    """A storm, and all that has to be true after it; beside it a stream that nobody ends."""
    before = ends_of(server)
    message = stream_request(stopping=tokens(BYSTANDER_TOKENS))
    bystander: Any = server.generation.GenerateStream(message, timeout=4 * SECONDS)
    started = next(bystander)
    storm = asyncio.run(run_storm(server.address, seed=seed, **sizes))
    (answer,) = joined([started, *bystander])
    assert len(answer["token_ids"]) == BYSTANDER_TOKENS
    assert len(set(answer["token_ids"])) == 1  # the runner knows one token
    server.wait_idle()
    # Every request had exactly one end; the server and its clients know the same ones.
    ends = ends_of(server)
    ends.subtract(before)
    assert ends["received"] == ends["succeeded"] + ends["failed"]
    assert ends["computed"] == 1  # nothing but the bystander went on
    num_aborted = storm.seen["abort"] + storm.early["abort"]
    assert ends["aborted"] == num_aborted
    assert ends["succeeded"] == num_aborted + 1
    assert ends["failed"] == ends["given_up"]
    seen = sum(storm.seen.values()) - storm.seen["abort"]
    early = sum(storm.early.values()) - storm.early["abort"]
    assert seen <= ends["given_up"] <= seen + early
    # A call of the library has the one status that belongs to its end.
    expected = {"cancel": "CANCELLED", "deadline": "DEADLINE_EXCEEDED", "abort": "OK"}
    assert {*storm.codes} == set(expected.items())
    return storm


def test_a_storm(server: WatchedServer) -> None:
    sizes = {"streams": 60, "at_once": 40, "clients": 1, "of_client": 4}
    storm = run_checked(server, seed=1, **sizes)
    assert sum(storm.seen.values()) + sum(storm.early.values()) == 64
    assert storm.early  # some were ended before they had begun
    before = {name: server.resident_mb(name) for name in ("engine", "frontend-1")}
    run_checked(server, seed=2, **sizes)
    for name, level in before.items():
        assert server.resident_mb(name) < level + MARGIN_MB


@pytest.mark.slow
def test_storms_of_500_streams(server: WatchedServer) -> None:
    """The first storms bring the memory to its level, the others do not raise it."""
    sizes = {"streams": 500, "at_once": 200, "clients": 4, "of_client": 8}
    levels = []
    for seed in range(3, 8):
        run_checked(server, seed=seed, **sizes)
        levels.append({name: server.resident_mb(name) for name in ("engine", "frontend-1")})
    for name in ("engine", "frontend-1"):
        assert levels[-1][name] < levels[1][name] + LARGE_MARGIN_MB, levels
