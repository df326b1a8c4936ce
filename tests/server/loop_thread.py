"""A server of a test in a thread with an event loop of its own."""

from __future__ import annotations

import asyncio
import threading
from typing import Self

SECONDS = 30.0  # nothing here takes as long


class LoopThread:
    """A context in which `serve` runs, which a subclass defines."""

    def __init__(self) -> None:
        self.address = ""
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),))

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(SECONDS)
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()
        self._loop.close()

    async def serve(self) -> None:
        """Listen, call `is_ready` with the address, and serve until `until_the_end` returns."""
        raise NotImplementedError

    def is_ready(self, address: str) -> None:
        """The server listens."""
        self.address = address
        self._ready.set()

    async def until_the_end(self) -> None:
        """Return when the context is left."""
        await self._end.wait()

    async def _run(self) -> None:
        self._end = asyncio.Event()
        await self.serve()
