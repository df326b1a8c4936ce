"""The clock and the disk of a campaign's server do what they say."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.clock import ShiftedClock
from tests.faults.disk import can_mount
from tests.faults.server import TOKEN, FaultyServer
from tests.server.asking import request
from tests.server.local_server import SECONDS, wait_until

DAY_S = 86400
TOLERANCE_S = 3600  # of all that a test may take
TELL = """
import sys, threading, time
for _ in sys.stdin:
    before = time.monotonic()
    threading.Event().wait(0.01)
    assert 0.01 <= time.monotonic() - before < 3600
    print(time.time(), time.monotonic(), flush=True)
"""


@pytest.fixture
def clock(tmp_path: Path) -> Iterator[ShiftedClock]:
    made = ShiftedClock(tmp_path)
    yield made
    made.close()


def test_only_the_wall_clock_is_another_one(clock: ShiftedClock) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", TELL], env=clock.environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as child:  # fmt: skip
        assert child.stdin is not None and child.stdout is not None
        for days in (0, 400, -400, 0):
            clock.set(days * DAY_S)
            print(file=child.stdin, flush=True)
            wall, monotonic = map(float, child.stdout.readline().split())
            assert abs(wall - time.time() - days * DAY_S) < TOLERANCE_S
            assert abs(monotonic - time.monotonic()) < TOLERANCE_S
        child.stdin.close()


@pytest.mark.parametrize("mounts", [True, False])
def test_a_server_logs_again_when_its_disk_has_room(
    mounts: bool,
    tiny_model: str,
    tmp_path: Path,
    clock: ShiftedClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A disk of its own where that is allowed, and what stands in for it."""
    if mounts and not can_mount(tmp_path):
        pytest.skip("this user may not mount a file system")
    monkeypatch.setattr("tests.faults.disk.can_mount", lambda folder: mounts)
    folder = tmp_path / "server"
    folder.mkdir()
    with FaultyServer(folder, tiny_model, clock) as server:
        pid = server.process.pid

        def serve(request_id: str) -> None:
            metadata = (("authorization", f"Bearer {TOKEN}"),)
            message = request(request_id=request_id)
            answer = server.generation.Generate(message, timeout=SECONDS, metadata=metadata)
            assert answer.samples[0].completion_tokens == 6

        serve("before")
        wait_until(lambda: "before" in server.read_log())
        server.disk.fill(pid)
        for i in range(40):  # more than any buffer holds
            serve(f"{i}-meanwhile-{'x' * 200}")
        assert "39-meanwhile" not in server.read_log()
        server.disk.empty(pid)
        serve("after")
        wait_until(lambda: "after request finished" in server.read_log())
        server.terminate()
        assert server.end() == 0
        server.check_gone()
