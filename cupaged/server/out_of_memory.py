"""The end of a process that gets no memory: at once, so that the supervisor starts a new one.

Nobody knows what an allocation that failed has interrupted: inside gRPC it may have been the one
that takes calls, or the wake-up that a request waits for, which would then never end. So whoever
comes upon such an error, in a call or in a corner that can only report it, ends the process.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

EXIT_CODE = 12
_LAST_WORDS = b"out of memory: this process ends, and with it its requests\n"
_STDERR = 2
_NO_THREAD = "can't start new thread"  # its stack is memory, too


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or one that it came of, is a want of memory."""
    while error is not None:
        if isinstance(error, MemoryError):
            return True
        if isinstance(error, OSError) and error.errno == errno.ENOMEM:
            return True
        if isinstance(error, RuntimeError) and str(error) == _NO_THREAD:
            return True
        error = error.__cause__ or error.__context__
    return False


def end_process() -> None:
    """Say why, and be gone; takes no memory."""
    os.write(_STDERR, _LAST_WORDS)
    os._exit(EXIT_CODE)


class EndWhenOutOfMemory(logging.Filter):
    """Ends this process when such an error is reported anywhere.

    That is in the log, by a thread that ends with it, by Python where it cannot be raised, or by
    the event loop.

    Args:
        end: does it.
    """

    def __init__(self, end: Callable[[], Any] = end_process) -> None:
        super().__init__()
        self._end = end

    def install(self, loop: asyncio.AbstractEventLoop) -> None:
        """From now on."""
        for handler in logging.getLogger().handlers:
            handler.addFilter(self)
        loop.set_exception_handler(self._in_loop)
        sys.unraisablehook = self._unraisable
        threading.excepthook = self._in_thread

    def filter(self, record: logging.LogRecord) -> bool:
        """Looks at the error of a line; every line may pass."""
        if record.exc_info:
            self._look(record.exc_info[1])
        return True

    def _look(self, error: BaseException | None) -> None:
        if is_out_of_memory(error):
            self._end()

    def _in_loop(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._look(context.get("exception"))
        loop.default_exception_handler(context)

    def _unraisable(self, found: Any) -> None:
        self._look(found.exc_value)
        sys.__unraisablehook__(found)

    def _in_thread(self, found: Any) -> None:
        self._look(found.exc_value)
        threading.__excepthook__(found)
