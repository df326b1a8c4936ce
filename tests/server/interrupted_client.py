"""A program that Ctrl-C interrupts at random moments of its calls; it prints how many went well.

python -m tests.server.interrupted_client NUMBER SEED
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading

from cupaged.client import Client
from tests.server.fake_service import FakeServer, stalls_after

_MOST_DELAY_S = 0.01  # a stream stands still long before that


def interrupted(client: Client, delay_s: float) -> bool:
    """Whether Ctrl-C ends a stream that never ends by itself."""
    timer = threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGINT))
    try:
        timer.start()
        with client.stream("a b c") as stream:
            for _ in stream.texts():
                pass
    except KeyboardInterrupt:
        return True
    finally:
        timer.join()
    return False


def main(number: int, seed: int) -> None:
    """Interrupt so many streams, with a call after each."""
    draw = random.Random(seed)
    with FakeServer() as server, Client(server.address) as client:
        for _ in range(number):
            server.script.append(stalls_after(2))
            assert interrupted(client, draw.uniform(0, _MOST_DELAY_S))
            server.script.clear()  # if it has not come so far
            assert (text := client.generate("d").text) == "d", text
            assert all(seen.ended.wait(20) for seen in server.seen)
            server.seen.clear()
        print(number)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
