"""The demo's display: the block pool as a bar, what runs and waits, and the answers as they grow.

On a terminal it redraws in place; elsewhere it prints a plain line now and then. It only looks.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self, TextIO

import numpy as np
from numpy.typing import NDArray

from cupaged.outputs import EngineStats

_FRAMES_PER_SECOND = 12
_PLAIN_EVERY_SECONDS = 1.0
_FREE, _USED, _SHARED = "·", "█", "▓"
_PLAIN_CELLS = {_FREE: ".", _USED: "#", _SHARED: "="}


def print_next(commands: Iterable[str]) -> None:
    """Commands to go on with; `{bin}` in them is where this Python's programs lie."""
    print("\ntry next:")
    prefix = ".venv/bin/" if Path(sys.prefix).name == ".venv" else ""
    for command in commands:
        print("  " + command.format(bin=prefix))


@dataclass(slots=True)
class Row:
    """One answer on the display."""

    label: str
    prompt: str
    text: str = ""
    state: str = "waiting"


class Display(Protocol):
    """Shown while requests run; a context manager."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc_info: object) -> None: ...

    def update(self, stats: EngineStats, rows: list[Row], tokens_per_second: float) -> None:
        """Take the newest figures; draws them now or a little later."""


def make_display(out: TextIO, ref_counts: NDArray[np.int32]) -> Display:
    """A live display on a terminal, plain lines elsewhere. ref_counts: live, one a block."""
    if out.isatty() and os.environ.get("TERM", "dumb") != "dumb":
        return LiveDisplay(out, ref_counts)
    return PlainDisplay(out, ref_counts)


def pool_bar(ref_counts: NDArray[np.int32], width: int) -> str:
    """The pool, one cell for one block, or for several where the bar is too short for that."""
    cells = []
    for blocks in np.array_split(ref_counts, min(width, len(ref_counts))):
        cells.append(_SHARED if (blocks > 1).any() else _USED if blocks.any() else _FREE)
    return "".join(cells)


def _figures(stats: EngineStats, tokens_per_second: float) -> str:
    return (
        f"running {stats.num_running}  waiting {stats.num_waiting}  "
        f"preempted {stats.num_preempted} (so far {stats.num_preemptions_total})  "
        f"{tokens_per_second:.1f} tokens/s"
    )


class LiveDisplay:
    """Redraws itself over its former self, within the width of the terminal."""

    def __init__(self, out: TextIO, ref_counts: NDArray[np.int32]) -> None:
        self._out = out
        self._ref_counts = ref_counts
        self._num_lines = 0
        self._drawn_at = 0.0
        self._newest: tuple[EngineStats, list[Row], float] | None = None

    def __enter__(self) -> Self:
        self._out.write("\x1b[?25l")  # hide the cursor
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._draw()
        self._out.write("\x1b[?25h\n")
        self._out.flush()

    def update(self, stats: EngineStats, rows: list[Row], tokens_per_second: float) -> None:
        """Draw, at most a dozen times a second."""
        self._newest = (stats, rows, tokens_per_second)
        now = time.perf_counter()
        if now - self._drawn_at >= 1 / _FRAMES_PER_SECOND:
            self._drawn_at = now
            self._draw()

    def _draw(self) -> None:
        if self._newest is None:
            return
        stats, rows, rate = self._newest
        columns = shutil.get_terminal_size().columns
        bar = pool_bar(self._ref_counts, max(8, columns - 36))
        lines = [
            f"KV pool [{bar}] {stats.num_used_blocks}/{stats.num_blocks} blocks",
            f"        {_USED} used  {_SHARED} shared  {_FREE} free",
            _figures(stats, rate),
            "",
            *(answer_line(row, columns) for row in rows),
        ]
        up = f"\x1b[{self._num_lines}F" if self._num_lines else ""
        self._out.write(up + "".join(f"{line[:columns]}\x1b[K\n" for line in lines))
        self._out.flush()
        self._num_lines = len(lines)


def answer_line(row: Row, columns: int) -> str:
    """A row within the width: of a long answer, its end."""
    head = f"{row.label:>4} {row.state:<8} {row.prompt} "
    tail = " ".join(row.text.split())
    room = max(10, columns - len(head) - 1)
    return head + (tail if len(tail) <= room else "…" + tail[-(room - 1) :])


class PlainDisplay:
    """A line a second, and each answer when it has ended."""

    def __init__(self, out: TextIO, ref_counts: NDArray[np.int32]) -> None:
        self._out = out
        self._ref_counts = ref_counts
        self._printed_at = 0.0
        self._ended: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        bar = self._bar()
        self._print(f"pool [{bar}] at the end\n")

    def update(self, stats: EngineStats, rows: list[Row], tokens_per_second: float) -> None:
        """Print what has ended, and the figures when a second has gone by."""
        now = time.perf_counter()
        if now - self._printed_at >= _PLAIN_EVERY_SECONDS:
            self._printed_at = now
            self._print(f"pool [{self._bar()}] {_figures(stats, tokens_per_second)}")
        for row in rows:
            if row.state not in ("waiting", "running") and row.label not in self._ended:
                self._ended.add(row.label)
                text = " ".join(row.text.split())
                self._print(f"{row.label:>4} {row.state:<6} {row.prompt} {text}")

    def _bar(self) -> str:
        bar = pool_bar(self._ref_counts, 40)
        return "".join(_PLAIN_CELLS[cell] for cell in bar)

    def _print(self, line: str) -> None:
        print(line, file=self._out, flush=True)
