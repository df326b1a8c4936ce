"""The conversation's two ends: lines that come in, notes and figures that go out, and Ctrl-C.

At a terminal there is a prompt, line editing, figures after each answer, and Ctrl-C stops an
answer. Through a pipe there is none of it: lines in, answers out, and whatever went wrong on
standard error.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from types import FrameType, TracebackType
from typing import Self

from cupaged.cli.streams import StreamError, decoded, shown, standard_input, tell

_PROMPT = "> "
_CONTINUED = "... "
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


class Stop:
    """Whether an answer is to end early. This one never is: Ctrl-C ends the program."""

    requested = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return


class StopOnInterrupt(Stop):
    """While it is entered, the first Ctrl-C asks for the end and the second ends the program.

    The engine is never interrupted in the middle of a step.
    """

    def __enter__(self) -> Self:
        self.requested = False
        self._previous = signal.signal(signal.SIGINT, self._on_interrupt)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


class Console:
    """Standard streams, for a person or for a program.

    Args:
        quick: the only line there is; None for what standard input holds.
        commands: words that the Tab key completes at the beginning of a line.
    """

    def __init__(self, quick: str | None = None, commands: Iterable[str] = ()) -> None:
        self._quick = quick
        if quick is None:
            standard_input()  # must be open
        at_terminal = sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()
        self.interactive = at_terminal and quick is None
        self.failed = False
        shows_errors = sys.stderr is not None and sys.stderr.isatty()
        self._shows_figures = self.interactive and shows_errors
        wants_colours = "NO_COLOR" not in os.environ and os.environ.get("TERM", "dumb") != "dumb"
        self._dim, self._plain = (_DIM, _PLAIN) if shows_errors and wants_colours else ("", "")
        if self.interactive:
            _edit_lines(tuple(commands))

    def lines(self) -> Iterator[str]:
        """Input until it ends; empty lines are passed over. Text keeps its leading spaces."""
        if self._quick is not None:
            return iter([self._quick])
        return self._typed() if self.interactive else _piped()

    def stop(self) -> Stop:
        """A guard for the making of one answer."""
        return StopOnInterrupt() if self.interactive else Stop()

    def write(self, text: str) -> None:
        """A piece of an answer."""
        print(text, end="", flush=True)

    def note(self, text: str) -> None:
        """A word from the program itself, where a person is there to read it."""
        if self.interactive:
            tell(f"{self._dim}{text}{self._plain}")

    def warn(self, text: str) -> None:
        """A word that matters to a program's reader as well."""
        tell(f"{self._dim}{text}{self._plain}")

    def figures(self, text: str) -> None:
        """Figures about an answer; only on a terminal."""
        if self._shows_figures:
            tell(f"{self._dim}[{text}]{self._plain}")

    def fail(self, error: object) -> None:
        """A line that could not be answered. Through a pipe, the exit code will say so as well."""
        tell(f"cupaged: {error}")
        self.failed = self.failed or not self.interactive

    def _typed(self) -> Iterator[str]:
        """Lines as they are edited; one that ends with a backslash goes on in the next."""
        while True:
            try:
                line = input(_PROMPT)
                while line.endswith("\\"):
                    line = f"{line[:-1]}\n{input(_CONTINUED)}"
                line.encode()
            except EOFError:
                print()
                return
            except UnicodeError:
                self.fail(f"{shown('-')}: is not UTF-8")
                continue
            if line.strip():
                yield line


def _piped() -> Iterator[str]:
    try:
        for number, data in enumerate(standard_input(), start=1):
            if number == 1:
                data = data.removeprefix(codecs.BOM_UTF8)
            line = decoded(data, f"{shown('-')}, line {number}").rstrip("\r\n")
            if line.strip():
                yield line
    except OSError as error:
        raise StreamError(f"{shown('-')}: cannot be read: {error.strerror}") from None


def _edit_lines(commands: tuple[str, ...]) -> None:
    """Line editing and history, where Python has them; the history ends with the program."""
    with contextlib.suppress(ImportError):
        import readline

        def complete(text: str, state: int) -> str | None:
            fitting = [name for name in commands if text and name.startswith(text)]
            return fitting[state] if state < len(fitting) else None

        readline.set_completer(complete)
        readline.set_completer_delims(" \t\n")
        readline.parse_and_bind("tab: complete")
