"""Bounds on untrusted Python code, here compiled chat templates: how long, and how much memory.

The interpreter calls a trace function on every line of the code that is started inside `limited`;
that function looks at the clock and, now and then, at the memory of the process. It sees Python
lines only: a single built-in operation runs to its end first.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

_STATM = Path("/proc/self/statm")
_LINES_BETWEEN_LOOKS = 64  # at the memory; the clock is read on every line


@contextmanager
def limited(
    *, seconds: float, memory_bytes: int, fail: Callable[[str], Exception]
) -> Iterator[None]:
    """Raise `fail(reason)` in code started inside the block when it goes beyond a limit.

    Args:
        seconds: of wall time.
        memory_bytes: growth of the process's resident memory; looked at on Linux only.
    """
    deadline = time.monotonic() + seconds
    allowed = _resident_bytes() + memory_bytes
    num_lines = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal num_lines
        num_lines += 1
        if time.monotonic() > deadline:
            raise fail(f"takes longer than {seconds:g} seconds")
        if num_lines % _LINES_BETWEEN_LOOKS == 0 and _resident_bytes() > allowed:
            raise fail(f"takes more than {memory_bytes >> 20} MiB of memory")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def _resident_bytes() -> int:
    try:
        return int(_STATM.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
