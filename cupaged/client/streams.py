"""What both clients know of a stream that runs: its events, its end, and whether it may be retried.

Nothing here reads from the network; `sync_client` and `async_client` do.
"""

from __future__ import annotations

from collections import deque

import grpc

from cupaged.client.answers import Event, Finished, Started, Usage, read_events
from cupaged.client.errors import (
    ClientError,
    ProtocolError,
    RequestCancelledError,
    error_from_status,
)
from cupaged.client.retry import Attempts
from cupaged.v1 import generation_pb2 as pb

CANCELLED = "the call was cancelled by this client"
CLOSED = "the client is closed"


class StreamRecord:
    """The events of one answer, over all attempts.

    `started` is handed out once, also if the attempt after it fails and another one starts: nobody
    has seen a token by then. After any other event there is no further attempt.

    Attributes:
        request_id: of the call.
        started: the first event, None before it has come.
        finished: the ends of the samples so far, by their index.
        usage: what the request took, None before the end.
    """

    def __init__(self, request_id: str, attempts: Attempts) -> None:
        self.request_id = request_id
        self.started: Started | None = None
        self.finished: dict[int, Finished] = {}
        self.usage: Usage | None = None
        self.ended = False
        self.cancelled = False
        self._attempts = attempts
        self._events: deque[Event] = deque()
        self._is_answered = False

    def next_event(self) -> Event | None:
        """The next event that has come, None if one must be read first."""
        return self._events.popleft() if self._events else None

    def take(self, message: pb.GenerateStreamResponse) -> None:
        """Note what a message holds.

        Raises:
            ProtocolError: it breaks the protocol.
        """
        for event in read_events(message):
            if isinstance(event, Started):
                if self.started is not None:
                    continue
                self.started = event
            else:
                self._is_answered = True
            if isinstance(event, Finished):
                self.finished[event.index] = event
            elif isinstance(event, Usage):
                self.usage = event
            self._events.append(event)

    def end(self) -> None:
        """The RPC ended with the status OK.

        Raises:
            ProtocolError: there should have been more.
        """
        self.ended = True
        if self.usage is None or not self.finished:
            raise ProtocolError(
                "the stream ended before its samples did",
                code=grpc.StatusCode.OK,
                request_id=self.request_id,
            )
        self._attempts.succeeded()

    def remaining_s(self) -> float | None:
        """Time for the next attempt; DeadlineError if there is none."""
        return self._attempts.remaining_s()

    def wait_s(self, error: ClientError) -> float:
        """Seconds until the next attempt after a failure; raises it if there is to be none."""
        if self.cancelled:
            self.ended = True
            raise self.cancellation() from None
        if self._is_answered:
            self.ended = True
            raise error
        try:
            return self._attempts.wait_s(error)
        except ClientError:
            self.ended = True
            raise

    def cancellation(self) -> RequestCancelledError:
        """The error of a stream that was cancelled here."""
        return cancellation(CANCELLED, self.request_id)


def cancellation(message: str, request_id: str = "") -> RequestCancelledError:
    """The error of a call that this client gave up."""
    return RequestCancelledError(message, code=grpc.StatusCode.CANCELLED, request_id=request_id)


def error_of(error: grpc.RpcError, request_id: str = "") -> ClientError:
    """What an error of gRPC means; `grpc.aio.AioRpcError` has the same three methods."""
    if not isinstance(error, grpc.Call | grpc.aio.AioRpcError):
        return ProtocolError(f"{type(error).__name__}: {error}", request_id=request_id)
    metadata = [(str(key), value) for key, value in error.trailing_metadata() or ()]
    return error_from_status(error.code(), error.details(), metadata, request_id)
