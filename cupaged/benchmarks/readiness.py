"""Waiting for a server that is not ready yet."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["when_ready"]

_POLL_S = 0.2
T = TypeVar("T")


def when_ready(ask: Callable[[], T], wait_s: float, not_ready: tuple[type[Exception], ...]) -> T:
    """What `ask` gives, when it no longer raises one of `not_ready`; that is raised after `wait_s`.

    Anything else that it raises is raised at once.
    """
    deadline = time.monotonic() + wait_s
    while True:
        try:
            return ask()
        except not_ready:
            if time.monotonic() + _POLL_S > deadline:
                raise
        time.sleep(_POLL_S)
