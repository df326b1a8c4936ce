"""A child of the supervisor: its process, its control channel, its output line by line."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from cupaged.errors import CupagedError
from cupaged.server.child_start import ChildStart
from cupaged.server.wire import FrameReader, Message, WireError, encode_frame, error_from_wire

KEPT_LINES = 20
_MAX_LINE_BYTES = 2**16
_SEND_SECONDS = 1.0
_SHOWN_CHARS = 300


class Output(Protocol):
    """Takes whole lines."""

    def write(self, data: bytes, /) -> object: ...
    def flush(self) -> object: ...


class SupervisedChild:
    """Started when constructed.

    Args:
        command: of the process; the file descriptor of its control channel is put behind it.
        start: what it is told first.
        selector: where its channel and its output are registered, with this object as data.
        output: where the lines that it prints go, whole.
    """

    def __init__(
        self,
        command: Sequence[str],
        start: ChildStart,
        selector: selectors.BaseSelector,
        output: Output,
    ) -> None:
        self.name = start.name
        self.index = start.index
        self.is_up = False  # it has loaded, or listens
        self.dying_error: CupagedError | None = None  # what it said before it ended
        self.last_lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._selector = selector
        self._output = output
        self._reader = FrameReader()
        self._line = b""
        self._control, theirs = socket.socketpair()
        self._pipe, write_end = os.pipe()
        try:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                process_group=0,  # Ctrl-C at a terminal is for the supervisor alone
            )
        finally:
            theirs.close()
            os.close(write_end)
        self._control.settimeout(_SEND_SECONDS)
        os.set_blocking(self._pipe, False)
        selector.register(self._control, selectors.EVENT_READ, self)
        selector.register(self._pipe, selectors.EVENT_READ, self)
        self.send(*start.to_message())

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative for a signal."""
        return self._process.poll()

    def owns(self, fileobj: object) -> str:
        """Which of its ends a registered object is: "control" or "output"."""
        return "output" if fileobj == self._pipe else "control"

    def send(self, *message: object) -> None:
        """Tell it something. A child that does not listen is about to be found dead."""
        with contextlib.suppress(OSError):
            self._control.sendall(encode_frame(list(message)))

    def wait(self) -> None:
        """Return when it has ended."""
        self._process.wait()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to it, if it runs."""
        if self.exit_code is None:
            self._process.send_signal(number)

    def receive(self) -> list[Message]:
        """What it has said; remembers what it says of its end."""
        try:
            data = self._control.recv(2**16, socket.MSG_DONTWAIT)
            messages = self._reader.feed(data) if data else []
        except BlockingIOError:
            return []
        except (OSError, WireError):
            data, messages = b"", []
        if not data and self._control in self._selector.get_map():
            self._selector.unregister(self._control)
        for message in messages:
            if message[0] == "dying":
                self.dying_error = error_from_wire(message[2])
        return messages

    def forward_output(self) -> None:
        """Pass its finished lines on."""
        try:
            data = os.read(self._pipe, 2**16)
        except BlockingIOError:
            return
        if not data:
            if self._pipe in self._selector.get_map():
                self._selector.unregister(self._pipe)
            data = b"\n" if self._line else b""
        *lines, self._line = (self._line + data).split(b"\n")
        if len(self._line) > _MAX_LINE_BYTES:
            lines.append(self._line)
            self._line = b""
        for line in lines:
            self.last_lines.append(line.decode("utf-8", "replace"))
        with contextlib.suppress(OSError):  # whoever read our standard error has gone
            self._output.write(b"".join(line + b"\n" for line in lines))
            self._output.flush()

    def bury(self) -> list[Message]:
        """It has ended: take its last messages and lines, and give everything back."""
        messages: list[Message] = []
        while self._control in self._selector.get_map() and (last := self.receive()):
            messages += last
        for _ in range(100):  # a process of its own may hold the pipe open for ever
            if self._pipe not in self._selector.get_map():
                break
            self.forward_output()
        for end in (self._control, self._pipe):
            if end in self._selector.get_map():
                self._selector.unregister(end)
        self._control.close()
        os.close(self._pipe)
        return messages

    def reason(self) -> str:
        """Of what it ended, in one line."""
        if self.dying_error is not None:
            return str(self.dying_error)
        code = self.exit_code
        if code is None:
            return "it runs"
        if code == -signal.SIGKILL:
            return "killed by SIGKILL (perhaps by the system, for want of memory)"
        how = f"ended with exit code {code}" if code >= 0 else f"killed by {_signal_name(-code)}"
        said = next((line for line in reversed(self.last_lines) if line.strip()), "")
        return f"{how}; its last line: {said[:_SHOWN_CHARS]}" if said else how


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
