"""A real engine process of which the test is the supervisor."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from cupaged.server.child_start import ChildStart
from cupaged.server.settings import ServeSettings
from cupaged.server.wire import FrameReader, Message, encode_frame

SECONDS = 60.0


class EngineChild:
    """A context: the process is killed at its end, if it still runs.

    Args:
        folder: for its socket.
        model: a model folder.
        settings: of the server; `engine` holds options of EngineArgs.
    """

    def __init__(self, folder: Path, model: Path, **settings: Any) -> None:
        self.socket = folder / "engine.sock"
        self.control, theirs = socket.socketpair()
        self.control.settimeout(SECONDS)
        self._reader = FrameReader()
        self._messages: list[Message] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "cupaged.server.engine_process", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stderr=subprocess.PIPE,
            text=True,
        )
        theirs.close()
        start = ChildStart(
            settings=ServeSettings(model=str(model), **settings),
            name="engine",
            engine_socket=str(self.socket),
        )
        self.send(*start.to_message())

    def __enter__(self) -> EngineChild:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()
        self.control.close()
        assert self.process.stderr is not None
        self.process.stderr.close()

    def send(self, *message: Any) -> None:
        """On the control channel."""
        self.control.sendall(encode_frame([*message]))

    def hear(self, kind: str) -> Message:
        """The next message on the control channel, which is of this kind."""
        while not self._messages:
            data = self.control.recv(65536)
            assert data, f"the engine has ended:\n{self.log()}"
            self._messages += self._reader.feed(data)
        message = self._messages.pop(0)
        assert message[0] == kind, message
        return message

    def log(self) -> str:
        """All that it has printed; waits for its end."""
        return self.process.communicate(timeout=SECONDS)[1]
