"""Ctrl-C held back where it would leave something done by halves.

Python raises KeyboardInterrupt between any two instructions of the main thread, also between the
acquisition of a lock and the code that will release it: what waits for that lock then waits for
ever.
"""

from __future__ import annotations

import _thread
import signal
from collections.abc import Callable
from typing import Any, Self

__all__ = ["Uninterrupted"]


class Uninterrupted:
    """A context that holds Ctrl-C back until it is left; then KeyboardInterrupt is raised.

    It does nothing in other threads, which are never interrupted, and in a program that has a
    handler of SIGINT of its own.
    """

    def __init__(self) -> None:
        self._came = False
        self._holds = False
        self._end: Callable[[], Any] | None = None

    def ending(self, end: Callable[[], Any]) -> None:
        """What Ctrl-C calls from now on, in another thread, so that a wait in the context ends."""
        self._end = end
        if self._came:  # a moment ago
            end()

    def __enter__(self) -> Self:
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return self
        try:
            signal.signal(signal.SIGINT, self._note)
        except ValueError:  # not the main thread
            return self
        self._holds = True
        return self

    def __exit__(self, *error: object) -> None:
        if self._holds:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._came:
            raise KeyboardInterrupt from None

    def _note(self, *_: object) -> None:
        self._came = True
        if self._end is not None:
            # Not in this thread, which may hold the locks that are needed; and nothing that
            # `threading` locks itself.
            _thread.start_new_thread(self._end, ())
