"""A supervisor over children that only pretend: `python -m tests.server.fake_children ROLE ...`.

What a child does is a word in a file of the folder FAKE_CHILDREN, read when it starts, so that a
test can change it between two lives. All that a child hears it prints.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from cupaged.errors import ConfigError
from cupaged.server.child_start import ChildStart
from cupaged.server.control import ControlChannel, ControlClosed
from cupaged.server.wire import error_to_wire

MODULE = (sys.executable, "-m", "tests.server.fake_children")


def supervise(*words: str) -> int:
    """Run the supervisor, with less patience than usual; words are settings, name=value."""
    from cupaged.server import log_setup, supervisor
    from cupaged.server.settings_sources import load_settings

    supervisor.FIRST_BACKOFF_SECONDS = 0.25
    supervisor._LAST_WORDS_SECONDS = 0.5
    supervisor._STOP_SECONDS = supervisor._DRAIN_GRACE_SECONDS = 0.25
    words = ("port=0", "metrics_port=0", "model=fake", *words)
    pairs = (word.split("=", 1) for word in words)
    environment = {f"CUPAGED_{name.upper()}": value for name, value in pairs}
    log_setup.configure("supervisor")
    engine, front_end = (*MODULE, "engine"), (*MODULE, "frontend")
    settings = load_settings({}, environment)
    return supervisor.Supervisor(settings, engine=engine, front_end=front_end).run()


def child(role: str, fd: str) -> int:
    """Be a child."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = ControlChannel.inherited(int(fd))
    start = ChildStart.read(control)
    mode = Path(os.environ["FAKE_CHILDREN"], role).read_text()

    def say(*words: Any) -> None:
        print(f"{start.name}:", *words, file=sys.stderr, flush=True)

    say("pid", os.getpid(), "port", start.port, "admin", start.admin_port, "mode", mode)
    if mode == "refused":
        error = ConfigError("max_model_len", 1, "an integer >= 2")
        control.send("dying", str(error), error_to_wire(error))
        return 1
    if mode == "crashing":
        say("about to crash")
        return 7
    if mode == "loading":
        time.sleep(60)
    control.send(*(["loaded", {}, 0.5] if role == "engine" else ["listening", "somewhere"]))
    while True:
        try:
            messages = control.receive()
        except ControlClosed:
            say("orphaned")
            return 3
        for message in messages:
            say(*message)
            if message[:2] == ["state", "ready"] and mode == "asking":
                control.send("log_level_set", "debug")
                control.send("drain_requested", 2.5)
            if message[:2] == ["state", "ready"] and mode == "complaining":
                control.send("engine_silent", True)
            if message[0] == "stop" and mode != "deaf":
                return 0
            if message[0] == "drain" and mode == "ok":
                return 0
        time.sleep(0.01)


if __name__ == "__main__":
    role, *rest = sys.argv[1:]
    sys.exit(supervise(*rest) if role == "supervise" else child(role, *rest))
