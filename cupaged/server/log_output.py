"""The log on its way out of the server: whoever writes never waits for whoever reads.

A thread writes to the file. What comes while a reader stands still is kept up to a bound; what is
beyond that, or cannot be written to a full disk, is dropped, and a line says later how much it was.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque

MAX_WAITING_BYTES = 4 * 2**20
_CLOSE_S = 1.0
_logger = logging.getLogger(__name__)


class LogOutput:
    """A context, at whose end what waits is written, if that can be done in a second.

    Args:
        fd: of the file.
        max_waiting_bytes: most that are kept.
    """

    def __init__(self, fd: int, *, max_waiting_bytes: int = MAX_WAITING_BYTES) -> None:
        self._fd = fd
        self._max_waiting_bytes = max_waiting_bytes
        self._waiting: deque[bytes] = deque()
        self._num_waiting_bytes = 0  # with those that are being written
        self._num_lost = 0  # lines, since the last word about it
        self._is_cut = False  # the last line that was written is not whole
        self._is_ending = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)

    def __enter__(self) -> LogOutput:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        with self._changed:
            self._is_ending = True
            self._changed.notify()
        self._thread.join(_CLOSE_S)

    def write(self, data: str | bytes) -> None:
        """Take whole lines; never waits, never fails."""
        if isinstance(data, str):
            data = data.encode("utf-8", "backslashreplace")
        with self._changed:
            if self._num_waiting_bytes + len(data) > self._max_waiting_bytes:
                self._num_lost += data.count(b"\n")
                return
            self._waiting.append(data)
            self._num_waiting_bytes += len(data)
            self._changed.notify()

    def flush(self) -> None:
        """Everything is on its way."""

    def _run(self) -> None:
        while (data := self._next()) is not None:
            written = self._write(data)
            with self._changed:
                self._num_waiting_bytes -= len(data)
                self._num_lost += data.count(b"\n", written)
                lost = self._num_lost if written == len(data) else 0
                self._num_lost -= lost
            if lost:
                _logger.warning("%d lines of the log are lost: they could not be written", lost)

    def _next(self) -> bytes | None:
        """What is to be written; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_ending)
            return self._waiting.popleft() if self._waiting else None

    def _write(self, data: bytes) -> int:
        """Bytes that were written: all of them, or as many as there was room for."""
        written = 0
        try:
            if self._is_cut:
                os.write(self._fd, b"\n")
                self._is_cut = False
            while written < len(data):
                written += os.write(self._fd, data[written:])
        except OSError:
            self._is_cut = self._is_cut or (written > 0 and data[written - 1] != ord("\n"))
        return written
