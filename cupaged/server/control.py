"""The control channel between the supervisor and a child: one socket, inherited, msgpack frames.

The child's end. Its first frame is the settings; when it reaches its end, the supervisor is gone
and the child ends, too: no child outlives it, whatever it died of.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from typing import Any

from cupaged.server.wire import FrameReader, Message, WireError, encode_frame

_SEND_SECONDS = 10.0
_ORPHAN_EXIT = 3
_WATCH_SECONDS = 0.1


class ControlClosed(Exception):
    """The supervisor is gone."""


class ControlChannel:
    """A child's end of the channel.

    Args:
        sock: connected; this object owns it.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._socket.settimeout(_SEND_SECONDS)
        self._reader = FrameReader()
        self._waiting: list[Message] = []

    @classmethod
    def inherited(cls, fd: int) -> ControlChannel:
        """The end whose file descriptor the supervisor has passed down."""
        return cls(socket.socket(fileno=fd))

    def fileno(self) -> int:
        """For a selector or an event loop; readable when a message or the end is there."""
        return self._socket.fileno()

    def send(self, *message: Any) -> None:
        """Tell the supervisor something.

        Raises:
            ControlClosed: it is gone.
        """
        try:
            self._socket.sendall(encode_frame(list(message)))
        except OSError as error:
            raise ControlClosed(str(error)) from None

    def receive(self) -> list[Message]:
        """The messages that are there; does not wait.

        Raises:
            ControlClosed: the supervisor is gone, or sends what is no message.
        """
        messages, self._waiting = self._waiting, []
        while select.select([self._socket], [], [], 0)[0]:
            messages += self._read()
        return messages

    def read_first(self) -> Message:
        """The settings; waits for them.

        Raises:
            ControlClosed: the supervisor is gone.
        """
        self._socket.settimeout(None)
        while not self._waiting:
            self._waiting += self._read()
        self._socket.settimeout(_SEND_SECONDS)
        return self._waiting.pop(0)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _read(self) -> list[Message]:
        try:
            data = self._socket.recv(2**16)
        except OSError as error:
            raise ControlClosed(str(error)) from None
        if not data:
            raise ControlClosed("end of the channel")
        try:
            return self._reader.feed(data)
        except WireError as error:
            raise ControlClosed(str(error)) from None


class OrphanWatch:
    """Ends this process when the supervisor goes while the main thread is busy loading.

    Used as a context; nothing of the channel is read.
    """

    def __init__(self, control: ControlChannel) -> None:
        self._socket = socket.socket(fileno=os.dup(control.fileno()))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="orphan-watch", daemon=True)

    def __enter__(self) -> OrphanWatch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        self._socket.close()

    def _watch(self) -> None:
        while not self._stop.wait(_WATCH_SECONDS):
            if select.select([self._socket], [], [], 0)[0] and not self._peek():
                os._exit(_ORPHAN_EXIT)

    def _peek(self) -> bytes:
        try:
            return self._socket.recv(1, socket.MSG_PEEK)
        except OSError:
            return b""
