"""Signals that reach a child although they are meant for the whole server.

A terminal sends SIGINT, and systemd sends SIGTERM, to every process there is. The end is then the
supervisor's to arrange: the child has to live on while the server drains.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from types import FrameType

PATIENCE_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """From now on the system kills this process when its parent has ended, however that was."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def leave_to_supervisor() -> None:
    """From now on SIGINT does nothing, and SIGTERM ends this process a moment later.

    `stay` within that moment saves it; without a word of the supervisor it was meant alone.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, _end)
    signal.signal(signal.SIGTERM, _wait)


def stay() -> None:
    """The server drains: live on until the supervisor says otherwise."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.setitimer(signal.ITIMER_REAL, 0)


def _wait(number: int, frame: FrameType | None) -> None:
    signal.setitimer(signal.ITIMER_REAL, PATIENCE_SECONDS)


def _end(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)
