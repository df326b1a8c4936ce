"""A front end that gets no memory ends at once, wherever it notices."""

from __future__ import annotations

import asyncio
import resource
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from cupaged.server.out_of_memory import EXIT_CODE, EndWhenOutOfMemory, is_out_of_memory
from cupaged.v1 import generation_pb2 as pb
from tests.server.asking import request
from tests.server.local_server import SECONDS, wait_until
from tests.server.watched_server import WatchedServer, is_alive

CHILD = """
import asyncio, logging, sys, threading
from cupaged.server.out_of_memory import EndWhenOutOfMemory

def fail():
    raise MemoryError

def log():
    try:
        fail()
    except MemoryError:
        logging.exception("a call failed")

class Unraisable:
    def __del__(self):
        fail()

async def main():
    loop = asyncio.get_running_loop()
    EndWhenOutOfMemory().install(loop)
    corners = {
        "log": log,
        "loop": lambda: loop.call_soon(fail),
        "thread": lambda: threading.Thread(target=fail).start(),
        "unraisable": lambda: Unraisable() and None,
    }
    corners[sys.argv[1]]()
    await asyncio.sleep(60)

logging.basicConfig()
asyncio.run(main())
"""


@pytest.mark.parametrize("corner", ["log", "loop", "thread", "unraisable"])
def test_it_is_noticed_in_every_corner(corner: str) -> None:
    child = subprocess.run(
        [sys.executable, "-c", CHILD, corner], capture_output=True, text=True, timeout=SECONDS
    )
    assert child.returncode == EXIT_CODE
    last = "out of memory: this process ends, and with it its requests"
    assert child.stderr.splitlines() == [last]


def caused(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (RuntimeError("can't start new thread"), True),
        (caused(ValueError("x"), caused(KeyError("y"), MemoryError())), True),
        (RuntimeError("memory"), False),
        (OSError(12, "Cannot allocate memory"), True),
        (OSError(28, "No space left on device"), False),
        (None, False),
    ],
)
def test_what_it_looks_like(error: BaseException | None, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_other_errors_are_reported_as_ever(caplog: pytest.LogCaptureFixture) -> None:
    ends: list[None] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        EndWhenOutOfMemory(lambda: ends.append(None)).install(loop)
        loop.call_soon([].pop)
        await asyncio.sleep(0)

    hooks = sys.unraisablehook
    try:
        asyncio.run(main())
    finally:
        sys.unraisablehook = hooks
    assert "pop from empty list" in caplog.text
    assert not ends


def test_a_front_end_without_memory_is_started_again(tiny_model: str, tmp_path: Path) -> None:
    with WatchedServer(tmp_path, tiny_model, "--runner", "null") as server:
        pid = server.pid("frontend-1")
        unlimited = resource.prlimit(pid, resource.RLIMIT_AS)
        resource.prlimit(pid, resource.RLIMIT_AS, (2**20, unlimited[1]))
        long = pb.TokenizeRequest(text="The memory of a process. " * 20_000)
        with pytest.raises(grpc.RpcError) as caught:
            while True:  # it may have some left
                server.generation.Tokenize(long, timeout=SECONDS)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        wait_until(lambda: not is_alive(pid))

        def is_served() -> bool:
            """It is alone, so it may answer before it has found the engine."""
            try:
                answer = server.generation.Generate(request(), timeout=SECONDS, wait_for_ready=True)
            except grpc.RpcError as error:
                assert error.code() is grpc.StatusCode.UNAVAILABLE
                return False
            return bool(answer.samples[0].completion_tokens == 6)

        wait_until(is_served)
        assert server.pid("frontend-1") != pid
        server.terminate()
        assert server.end() == 0
