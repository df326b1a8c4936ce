"""Ways to run the command: in this process, in one of its own, and in a terminal of 80 by 24."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from cupaged.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
# Makes the terminal the controlling one, so that Ctrl-C becomes a signal, then runs its arguments.
_OWN_TERMINAL = """
import fcntl, os, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execvp(sys.argv[1], sys.argv[1:])
"""
SHORT = ("--max-tokens", "6", "--ignore-eos")


def environment(**changes: str) -> dict[str, str]:
    """This process's, with the checkout importable and one BLAS thread."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1", **changes}


def command(*arguments: str) -> list[str]:
    """The command line of a process."""
    return [sys.executable, "-m", "cupaged", *arguments]


def process(*arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run the command in a process of its own, without a terminal."""
    return subprocess.run(
        command(*arguments), input=stdin, env=environment(), capture_output=True, timeout=60
    )


def shell(line: str, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    """Run the command through a shell, where `"$@"` in the line stands for it."""
    return subprocess.run(
        ["bash", "-c", line, "-", *command(*arguments)],
        env=environment(), capture_output=True, timeout=60, stdin=subprocess.DEVNULL,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Done:
    """How a run ended."""

    code: int
    out: str
    err: str


class Inline:
    """Runs the command in this process: without its start, a model answers in milliseconds."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
    ) -> None:
        self._monkeypatch = monkeypatch
        self._captured = capfdbinary

    def __call__(self, *arguments: str, stdin: bytes | str = b"") -> Done:
        data = stdin.encode() if isinstance(stdin, str) else stdin
        with self._monkeypatch.context() as patch, io.TextIOWrapper(io.BytesIO(data)) as file:
            patch.setattr(sys, "stdin", file)
            code = main(arguments)
        out, err = self._captured.readouterr()
        return Done(code, out.decode(), err.decode())


class Terminal:
    """A process in a terminal of 80 columns and 24 lines."""

    def __init__(self, *arguments: str) -> None:
        leader, follower = pty.openpty()
        size = {"COLUMNS": "80", "LINES": "24", "TERM": "xterm"}
        self._leader = leader
        self.process = subprocess.Popen(
            [sys.executable, "-c", _OWN_TERMINAL, *arguments], env=environment(**size),
            stdin=follower, stdout=follower, stderr=follower, start_new_session=True,
        )  # fmt: skip
        os.close(follower)
        self._written = b""
        self._seen = 0

    def type(self, text: str) -> None:
        """Keys, as they are; Enter is `\\r`."""
        os.write(self._leader, text.encode())

    def wait_for(self, pattern: str, seconds: float = 20) -> str:
        """What has appeared since the last call, up to the first match of a pattern."""
        deadline = time.monotonic() + seconds
        while True:
            fresh = plain(self._written.decode(errors="ignore"))[self._seen :]
            if match := re.search(pattern, fresh):
                self._seen += match.end()
                return fresh[: match.end()]
            assert time.monotonic() < deadline, f"no {pattern!r} in {fresh!r}"
            self._read(0.1)

    def wait_for_prompt(self, pattern: str = "") -> str:
        """What has appeared up to a prompt behind a pattern; the next keys are those of a person.

        Keys that come in the moment between the prompt and the start of line editing are handled
        by the terminal itself, and some of them are lost.
        """
        shown = self.wait_for(f"{pattern}> $")
        deadline = time.monotonic() + 2
        while termios.tcgetattr(self._leader)[3] & termios.ICANON and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        return shown

    def end(self, seconds: float = 20) -> int:
        """The exit code, when the process has ended by itself."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None or self._read(0):
            assert time.monotonic() < deadline, f"still there: {self._written!r}"
            self._read(0.05)
        os.close(self._leader)
        return self.process.returncode

    @property
    def written(self) -> str:
        """Everything, escapes and all."""
        return self._written.decode()

    def _read(self, seconds: float) -> bool:
        if not select.select([self._leader], [], [], seconds)[0]:
            return False
        try:
            piece = os.read(self._leader, 65536)
        except OSError:  # the other side has closed
            return False
        self._written += piece
        return bool(piece)


def plain(text: str) -> str:
    """Without escape sequences and carriage returns."""
    return re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]|\r", "", text)
