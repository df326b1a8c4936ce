"""Signals as numbers in a pipe, so that one selector waits for them with everything else."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Any

_WATCHED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)


class SignalPipe:
    """A context, in the main thread: SIGTERM, SIGINT, SIGHUP and SIGCHLD come here meanwhile.

    SIGHUP is left alone where it is ignored, as under nohup.
    """

    def __enter__(self) -> SignalPipe:
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        os.set_blocking(self._write_end, False)
        self._old_fd = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        self._old: dict[signal.Signals, Any] = {}
        for number in _WATCHED:
            if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue
            self._old[number] = signal.signal(number, _noted)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_fd)
        os.close(self._read_end)
        os.close(self._write_end)

    def fileno(self) -> int:
        """Readable when a signal has come."""
        return self._read_end

    def read(self) -> list[int]:
        """The numbers that have come."""
        try:
            return list(os.read(self._read_end, 1024))
        except BlockingIOError:
            return []


def _noted(number: int, frame: FrameType | None) -> None:
    """Python writes the number into the pipe before it calls this."""
