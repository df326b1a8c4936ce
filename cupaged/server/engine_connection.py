"""A front end's connection as the engine process sees it: never waits, bounded in what it holds.

What cannot be sent at once is kept and sent when the socket takes it. A front end that does not
read loses its connection, and nobody else notices.
"""

from __future__ import annotations

import selectors
import socket
from collections import deque
from typing import Any

from cupaged.server.wire import FrameReader, Message, WireError, encode_frame
from cupaged.server.wire_forms import Row

MAX_BUFFERED_BYTES = 64 * 2**20
_RECEIVE_BYTES = 2**18


class LiveRequest:
    """A request of a front end that is unfinished.

    num_unfinished: samples that have not ended. num_preemptions: as its reader knows it.
    is_fresh: nothing has been sent of it.
    """

    __slots__ = (
        "connection", "handle", "is_fresh", "num_preemptions", "num_unfinished", "request_id",
    )  # fmt: skip

    def __init__(self, connection: Connection, handle: int, request_id: str, n: int) -> None:
        self.connection = connection
        self.handle = handle
        self.request_id = request_id
        self.num_unfinished = n
        self.num_preemptions = 0
        self.is_fresh = True


class Connection:
    """One front end.

    Args:
        sock: connected, non-blocking; this object owns it.
        selector: where it is registered, and asked to tell when the socket can take more.
        max_buffered_bytes: most bytes that wait to be sent; past that `broken` is set.
    """

    def __init__(
        self,
        sock: socket.socket,
        selector: selectors.BaseSelector,
        *,
        max_buffered_bytes: int = MAX_BUFFERED_BYTES,
    ) -> None:
        self.name = "a front end"
        self.has_said_hello = False
        self.requests: dict[int, LiveRequest] = {}  # by handle
        self.rows: list[Row | tuple[Any, ...]] = []  # of the present step
        self.broken: str | None = None  # why it has to be closed
        self._socket = sock
        self._selector = selector
        self._max_buffered_bytes = max_buffered_bytes
        self._reader = FrameReader()
        self._unsent: deque[memoryview] = deque()
        self._num_unsent_bytes = 0
        selector.register(sock, selectors.EVENT_READ, self)

    @property
    def num_unsent_bytes(self) -> int:
        """Bytes that wait for the front end to read."""
        return self._num_unsent_bytes

    @property
    def is_behind(self) -> bool:
        """True while half of what may wait does."""
        return self._num_unsent_bytes > self._max_buffered_bytes // 2

    def receive(self) -> list[Message]:
        """The messages that have come. A closed or garbled connection is `broken` afterwards."""
        try:
            data = self._socket.recv(_RECEIVE_BYTES)
            if data:
                return self._reader.feed(data)
            self.broken = "it was closed"
        except BlockingIOError:
            pass
        except OSError as error:
            self.broken = str(error)
        except WireError as error:
            self.broken = f"it sent {error}"
        return []

    def send_rows(self) -> None:
        """Everything of this step in one message."""
        rows, self.rows = self.rows, []
        self.send(["step", rows])

    def send(self, message: Message) -> None:
        """Send now, or keep what the socket does not take."""
        if self.broken is not None:
            return
        frame = memoryview(encode_frame(message))
        if not self._unsent:
            frame = frame[self._try_send(frame) :]
        if not frame:
            return
        if not self._unsent:
            both = selectors.EVENT_READ | selectors.EVENT_WRITE
            self._selector.modify(self._socket, both, self)
        self._unsent.append(frame)
        self._num_unsent_bytes += len(frame)
        if self._num_unsent_bytes > self._max_buffered_bytes:
            self.broken = f"it did not read {self._num_unsent_bytes} bytes"

    def send_unsent(self) -> None:
        """The socket takes more."""
        while self._unsent:
            first = self._unsent[0]
            sent = self._try_send(first)
            self._num_unsent_bytes -= sent
            if sent < len(first):
                self._unsent[0] = first[sent:]
                return
            self._unsent.popleft()
        self._selector.modify(self._socket, selectors.EVENT_READ, self)

    def close(self) -> None:
        """Close the socket; what is unsent is lost."""
        self._selector.unregister(self._socket)
        self._socket.close()
        self._unsent.clear()

    def _try_send(self, data: memoryview) -> int:
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            self.broken = self.broken or str(error)
            return 0
