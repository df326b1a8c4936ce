"""The streams of `Client`: contexts and iterators that block."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, Self, TypeVar

import grpc

from cupaged.client.answers import Delta, Event
from cupaged.client.errors import ClientError
from cupaged.client.retry import Attempts
from cupaged.client.streams import StreamRecord, error_of
from cupaged.interrupts import Uninterrupted
from cupaged.v1 import generation_pb2 as pb

T = TypeVar("T")
_M = TypeVar("_M", covariant=True)


class Rpc(Protocol[_M]):
    """An RPC that streams messages."""

    def __next__(self) -> _M: ...

    def cancel(self) -> bool: ...


class CancelledOnExit:
    """A context that cancels its call when it is left.

    When nobody has it any more, gRPC does so itself.
    """

    def cancel(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.cancel()


class GenerationStream(StreamRecord, CancelledOnExit):
    """An answer as it comes: iterate over its events, best inside of `with`.

    The RPC has begun. Leaving the context, `cancel` and the loss of the last reference cancel it,
    and the server ends the request. One thread reads; any may cancel, and the reader then gets
    RequestCancelledError.

    Raises, from the iteration:
        ClientError: the call failed.
    """

    def __init__(
        self,
        begin: Callable[[float | None], Rpc[pb.GenerateStreamResponse]],
        request_id: str,
        attempts: Attempts,
    ) -> None:
        super().__init__(request_id, attempts)
        self._cancelled = threading.Event()
        self._begin = begin
        self._rpc: Rpc[pb.GenerateStreamResponse] | None = None
        self._rpc = begin(self.remaining_s())

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        while (event := self.next_event()) is None:
            if self.ended:
                raise StopIteration
            if self.cancelled:
                raise self.cancellation()
            self._read()
        return event

    def texts(self) -> Iterator[str]:
        """The text of the first sample, piece by piece."""
        for event in self:
            if isinstance(event, Delta) and event.index == 0 and event.text:
                yield event.text

    def cancel(self) -> None:
        """End the request, if it has not ended; from any thread, any number of times."""
        if self.ended:
            return
        self.cancelled = True
        self._cancelled.set()
        if self._rpc is not None:
            with Uninterrupted():
                self._rpc.cancel()

    def _read(self) -> None:
        """Take one message, or the end, or a failure and the wait after it."""
        failure: ClientError | None = None
        try:
            if self._rpc is None:
                self._rpc = self._begin(self.remaining_s())
                if self.cancelled:  # by another thread, a moment ago
                    self._rpc.cancel()
            with Uninterrupted() as uninterrupted:
                uninterrupted.ending(self.cancel)
                message = next(self._rpc)
            self.take(message)
        except StopIteration:
            self.end()
        except grpc.RpcError as error:
            failure = error_of(error, self.request_id)
        except ClientError:
            self.cancel()
            raise
        if failure is not None:
            self._rpc = None
            self._cancelled.wait(self.wait_s(failure))


class Watch(CancelledOnExit, Generic[T]):
    """Values that a server sends until the call is cancelled, as a context and an iterator.

    There are no retries: a connection that is lost raises.
    """

    def __init__(self, rpc: Rpc[Any], read: Callable[[Any], T], request_id: str) -> None:
        self._rpc = rpc
        self._read = read
        self._request_id = request_id

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        try:
            with Uninterrupted() as uninterrupted:
                uninterrupted.ending(self._rpc.cancel)
                message = next(self._rpc)
            return self._read(message)
        except grpc.RpcError as error:
            failure = error_of(error, self._request_id)
        raise failure

    def cancel(self) -> None:
        """End it; from any thread, any number of times."""
        with Uninterrupted():
            self._rpc.cancel()
