"""Ctrl-C in the middle of calls: it is never lost, and the client can be used further."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from cupaged.interrupts import Uninterrupted
from tests.e2e.cli import environment
from tests.server.test_client_state import INTERRUPTIBLE

SECONDS = 60  # far longer than it takes


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_streams_interrupted_at_random_moments() -> None:
    number = 300
    program = [sys.executable, "-m", "tests.server.interrupted_client", str(number), "1"]
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTIBLE, *program], env=environment(), text=True,
        capture_output=True, timeout=SECONDS,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, f"{number}\n"), done.stderr


def test_it_comes_when_the_block_is_left() -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt), Uninterrupted():
        interrupt()
        reached.append("the end")
    assert reached == ["the end"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_waits_is_ended_before_and_after_it_is_told() -> None:
    ended = threading.Event()
    with pytest.raises(KeyboardInterrupt), Uninterrupted() as uninterrupted:
        uninterrupted.ending(ended.set)
        interrupt()
        assert ended.wait(SECONDS)
    ended.clear()
    with pytest.raises(KeyboardInterrupt), Uninterrupted() as uninterrupted:
        interrupt()
        uninterrupted.ending(ended.set)
        assert ended.is_set()


def test_an_error_gives_way_to_it() -> None:
    with pytest.raises(KeyboardInterrupt) as caught, Uninterrupted():
        interrupt()
        raise ValueError("the call was cancelled")
    assert caught.value.__suppress_context__


def test_nothing_happens_in_another_thread_or_beside_another_handler() -> None:
    kept = signal.getsignal(signal.SIGINT)
    handlers = []

    def look() -> None:
        with Uninterrupted():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    came = []
    own = signal.signal(signal.SIGINT, lambda *_: came.append("own"))
    try:
        look()
        with Uninterrupted():
            interrupt()
    finally:
        mine = signal.signal(signal.SIGINT, own)
    assert handlers == [kept, mine] and came == ["own"]
