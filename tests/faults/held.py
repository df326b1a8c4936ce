"""Streams that are under way at every moment, so that what ends the engine always ends some."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import grpc

from cupaged.v1 import generation_pb2_grpc
from tests.faults.manners import AUTHORISED
from tests.faults.server import FaultyServer
from tests.faults.task import PATIENCE_S
from tests.server.asking import stream_request, tokens, told

_STREAMS, _TOKENS = 4, 160


class HeldStreams:
    """A context in which streams are read, each followed by the next until one ends badly.

    It is left when each has ended so: leave it only after a strike at the engine.

    outcomes: statuses with their reasons, of all that have ended.
    """

    def __init__(self, server: FaultyServer) -> None:
        self.outcomes: Counter[str] = Counter()
        self._server = server
        self._is_over = threading.Event()
        self._have_begun = [threading.Event() for _ in range(_STREAMS)]
        self._threads = [
            threading.Thread(target=self._hold, args=(begun,)) for begun in self._have_begun
        ]

    def __enter__(self) -> HeldStreams:
        for thread in self._threads:
            thread.start()
        for begun in self._have_begun:
            begun.wait(PATIENCE_S)
        return self

    def __exit__(self, *error: object) -> None:
        for thread in self._threads:
            thread.join(PATIENCE_S)
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _hold(self, begun: threading.Event) -> None:
        with self._server.open_channel() as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            while not self._is_over.is_set():
                try:
                    for _ in self._stream(stub):
                        begun.set()
                except grpc.RpcError as error:
                    status = told(error)
                    self.outcomes[" ".join(filter(None, (status.code.name, status.reason)))] += 1
                    begun.set()
                    return
                self.outcomes["OK"] += 1

    def _stream(self, stub: Any) -> Any:
        message = stream_request(stopping=tokens(_TOKENS))
        return stub.GenerateStream(message, timeout=PATIENCE_S, metadata=AUTHORISED)
