"""One ModelStreamInfer: several requests at once on one stream, each with its own answers and end.

An error of a request is told in its place and leaves the others alone. What ends the stream ends
all its requests: a cancellation, a lost connection, a message that cannot be read, or answers that
nobody reads.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from cupaged.errors import CupagedError, DrainingError, SlowConsumerError
from cupaged.server.rpc import Call

MAX_REQUESTS = 1024  # of a stream at a time; then the next one is not read before one has ended
Answer = Callable[[Any, Call, "InferStream"], Coroutine[Any, Any, None]]


class InferStream:
    """Made and used in the task of the call's handler.

    Args:
        call: of the stream.
        answer: answers a request with its call, by `write`; it raises only what is to end the
            stream.
    """

    def __init__(self, call: Call, answer: Answer) -> None:
        self._call = call
        self._answer = answer
        self._writing = asyncio.Lock()
        self._room = asyncio.Semaphore(MAX_REQUESTS)
        self._tasks: set[asyncio.Task[None]] = set()
        loop = asyncio.get_running_loop()
        self._closing: asyncio.Future[None] = loop.create_future()
        self._broken: asyncio.Future[None] = loop.create_future()
        self.failure: BaseException | None = None  # what has broken the stream

    def close(self) -> None:
        """The server is ending: read no further requests, and end after those that run."""
        if not self._closing.done():
            self._closing.set_result(None)

    async def run(self, requests: AsyncIterator[tuple[Any, Call]]) -> None:
        """Answer until the client has sent its last request and has all answers.

        Raises:
            DrainingError: the server is ending.
            CupagedError: a message cannot be read, or answers are not read.
        """
        # Here, since a status cannot be sent while a write of another task still sends the headers.
        await self._call.context.send_initial_metadata(())
        reader = asyncio.create_task(self._read(requests))
        try:
            first = asyncio.FIRST_COMPLETED
            await asyncio.wait({reader, self._closing, self._broken}, return_when=first)
            if reader.done():
                reader.result()
            else:
                reader.cancel()
            while self._tasks and self.failure is None:
                await asyncio.wait({*self._tasks, self._broken}, return_when=first)
            if self.failure is not None:
                raise self.failure
            if self._closing.done():
                raise DrainingError("the server is ending")
        finally:
            reader.cancel()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(reader, *self._tasks, return_exceptions=True)

    async def write(self, data: bytes) -> None:
        """Send an answer; one at a time, whichever request it is of."""
        async with self._writing:
            await self._call.context.write(data)

    def request_failed(self, error: CupagedError) -> None:
        """A request's answers were not read, so a write hangs that does not end by itself."""
        if isinstance(error, SlowConsumerError):
            self._break(error)

    async def _read(self, requests: AsyncIterator[tuple[Any, Call]]) -> None:
        async for request, call in requests:
            await self._room.acquire()
            task = asyncio.create_task(self._answer(request, call, self))
            self._tasks.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._room.release()
        if not task.cancelled() and (error := task.exception()) is not None:
            self._break(error)

    def _break(self, error: BaseException) -> None:
        if self.failure is None:
            self.failure = error
            self._broken.set_result(None)
