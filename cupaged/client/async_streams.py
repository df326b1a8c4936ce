"""The streams of `AsyncClient`: asynchronous contexts and iterators."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, Generic, Protocol, Self, TypeVar

import grpc

from cupaged.client.answers import Delta, Event
from cupaged.client.errors import ClientError, ProtocolError
from cupaged.client.retry import Attempts
from cupaged.client.streams import CANCELLED, StreamRecord, cancellation, error_of
from cupaged.v1 import generation_pb2 as pb

T = TypeVar("T")
_M = TypeVar("_M", covariant=True)


class Rpc(Protocol[_M]):
    """An RPC that streams messages."""

    async def read(self) -> Any: ...

    def cancel(self) -> bool: ...


class CancelledOnExit:
    """A context that cancels its call when it is left, and when nobody has it any more.

    gRPC itself never cancels a call that was forgotten: it keeps the call alive, and with it the
    request on the server.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def cancel(self) -> None:
        """End the call; any number of times."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.cancel()

    def __del__(self) -> None:
        # The garbage collector may run in any thread, and after the loop's end.
        rpc, loop = getattr(self, "_rpc", None), getattr(self, "_loop", None)
        if rpc is not None and loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(rpc.cancel)


class AsyncGenerationStream(StreamRecord, CancelledOnExit):
    """An answer as it comes: iterate over its events, best inside of `async with`.

    The RPC has begun. Leaving the context, `cancel`, the cancellation of the task that reads, and
    the loss of the last reference cancel it, and the server ends the request. One task reads;
    others may cancel, and the reader then gets RequestCancelledError.

    Raises, from the iteration:
        ClientError: the call failed.
    """

    def __init__(
        self,
        begin: Callable[[float | None], Rpc[pb.GenerateStreamResponse]],
        request_id: str,
        attempts: Attempts,
    ) -> None:
        StreamRecord.__init__(self, request_id, attempts)
        CancelledOnExit.__init__(self)
        self._cancelled = asyncio.Event()
        self._begin = begin
        self._rpc: Rpc[pb.GenerateStreamResponse] | None = begin(self.remaining_s())

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        while (event := self.next_event()) is None:
            if self.ended:
                raise StopAsyncIteration
            if self.cancelled:
                raise self.cancellation()
            await self._read()
        return event

    async def texts(self) -> AsyncIterator[str]:
        """The text of the first sample, piece by piece."""
        async for event in self:
            if isinstance(event, Delta) and event.index == 0 and event.text:
                yield event.text

    def cancel(self) -> None:
        """End the request, if it has not ended; any number of times."""
        if self.ended:
            return
        self.cancelled = True
        self._cancelled.set()
        if self._rpc is not None:
            self._rpc.cancel()

    async def _read(self) -> None:
        """Take one message, or the end, or a failure and the wait after it."""
        failure: ClientError | None = None
        try:
            if self._rpc is None:
                self._rpc = self._begin(self.remaining_s())
            message = await self._rpc.read()
            if message is grpc.aio.EOF:
                self._rpc = None
                self.end()
            else:
                self.take(message)
        except grpc.RpcError as error:
            failure = error_of(error, self.request_id)
        except ProtocolError:
            self.cancel()
            raise
        except asyncio.CancelledError:
            if not self.cancelled or is_cancelling():
                self.cancel()
                raise
            raise self.cancellation() from None
        if failure is not None:
            self._rpc = None
            await sleep(self._cancelled, self.wait_s(failure))


class AsyncWatch(CancelledOnExit, Generic[T]):
    """Values that a server sends until the call is cancelled, as a context and an iterator.

    There are no retries: a connection that is lost raises.
    """

    def __init__(self, rpc: Rpc[Any], read: Callable[[Any], T], request_id: str) -> None:
        super().__init__()
        self._rpc = rpc
        self._read = read
        self._request_id = request_id

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        try:
            message = await self._rpc.read()
        except grpc.RpcError as error:
            raise error_of(error, self._request_id) from None
        except asyncio.CancelledError:
            self._rpc.cancel()
            if is_cancelling():
                raise
            raise cancellation(CANCELLED, self._request_id) from None
        if message is grpc.aio.EOF:
            raise StopAsyncIteration
        return self._read(message)

    def cancel(self) -> None:
        """End it; any number of times."""
        self._rpc.cancel()


def is_cancelling() -> bool:
    """Whether somebody cancels the task that runs now, and not only the call that it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def sleep(woken: asyncio.Event, seconds: float) -> bool:
    """Wait, unless an event is set; whether it is."""
    try:
        await asyncio.wait_for(woken.wait(), seconds)
    except TimeoutError:
        return False
    return True
