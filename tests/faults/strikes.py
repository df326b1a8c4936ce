"""What happens to the server while it works: deaths, pauses, clocks, disks, memory.

A strike is struck in the middle of a round. `also` holds the outcomes that requests may then have
besides those of their manner, if they met the strike: patterns, as in `manners`.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import time
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from cupaged.server.wire import MAX_FRAME_BYTES, PROTOCOL_VERSION, encode_frame
from cupaged.v1 import generation_pb2 as pb
from cupaged.v1 import generation_pb2_grpc
from tests.faults.held import HeldStreams
from tests.faults.manners import AUTHORISED, IN_STREAM
from tests.faults.server import FaultyServer
from tests.faults.task import CLOSED, GONE, PATIENCE_S
from tests.server.local_server import wait_until
from tests.server.watched_server import is_alive

STOP_S = 10.0
_FULL_S = 2.0
_LONG_TEXTS, _LONG_WORDS = 16, 2500
_ENGINE_GONE = ("UNAVAILABLE ENGINE_DEAD", "UNAVAILABLE LOADING", IN_STREAM, "503")
_CONNECTION_GONE = ("UNAVAILABLE", CLOSED, GONE)
_SERVER_GONE = ("UNAVAILABLE DRAINING", *_CONNECTION_GONE, IN_STREAM, "503")
# So gRPC ends calls that have come but that nobody has taken yet when a server closes its port.
_NOT_TAKEN = "CANCELLED"


@dataclass(frozen=True, slots=True)
class Strike:
    """Nothing happens."""

    name: str
    also: tuple[str, ...] = ()

    ends_server = False
    ends_front_end = False  # before it may have counted the ends of its requests

    def strike(self, server: FaultyServer) -> Counter[str]:
        """Do it, and undo what has to be undone; outcomes of requests of its own."""
        return Counter()


@dataclass(frozen=True, slots=True)
class Signal(Strike):
    """A process of a role gets a signal; of front ends, the one that has lived longest."""

    role: str = "engine"
    number: signal.Signals = signal.SIGKILL

    @property
    def ends_front_end(self) -> bool:  # type: ignore[override]
        return self.role == "frontend"

    def strike(self, server: FaultyServer) -> Counter[str]:
        pid = min(server.pids()[self.role])
        os.kill(pid, self.number)
        wait_until(lambda: not is_alive(pid))
        return Counter()


@dataclass(frozen=True, slots=True)
class EngineSignal(Signal):
    """The same while streams are under way, however fast the engine is."""

    def strike(self, server: FaultyServer) -> Counter[str]:
        with HeldStreams(server) as held:
            Signal.strike(self, server)
        return held.outcomes


@dataclass(frozen=True, slots=True)
class Pause(Strike):
    """A process of a role stands still for ten seconds."""

    role: str = "engine"

    def strike(self, server: FaultyServer) -> Counter[str]:
        pid = min(server.pids()[self.role])
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(STOP_S)
        finally:
            os.kill(pid, signal.SIGCONT)
        return Counter()


@dataclass(frozen=True, slots=True)
class End(Strike):
    """The whole server ends, by a signal to its supervisor; it leaves nothing behind."""

    number: signal.Signals = signal.SIGTERM

    ends_server = True

    def strike(self, server: FaultyServer) -> Counter[str]:
        pids = [pid for pids in server.pids().values() for pid in pids]
        server.process.send_signal(self.number)
        code = server.end()
        assert code == (0 if self.number == signal.SIGTERM else -self.number), code
        wait_until(lambda: not any(map(is_alive, pids)))
        return Counter()


@dataclass(frozen=True, slots=True)
class ClockJump(Strike):
    """The wall clock of all processes is another one from now on."""

    seconds: int = 0

    def strike(self, server: FaultyServer) -> Counter[str]:
        server.clock.set(self.seconds)
        return Counter()


@dataclass(frozen=True, slots=True)
class FullDisk(Strike):
    """The log cannot be written for a while."""

    def strike(self, server: FaultyServer) -> Counter[str]:
        server.disk.fill(server.process.pid)
        try:
            time.sleep(_FULL_S)
        finally:
            server.disk.empty(server.process.pid)
        return Counter()


@dataclass(frozen=True, slots=True)
class MemoryLimit(Strike):
    """A process of a role gets no further memory from the system, just when it needs much."""

    role: str = "engine"

    @property
    def ends_front_end(self) -> bool:  # type: ignore[override]
        return self.role == "frontend"

    def strike(self, server: FaultyServer) -> Counter[str]:
        pid = min(server.pids()[self.role])
        unlimited = resource.prlimit(pid, resource.RLIMIT_AS)
        resource.prlimit(pid, resource.RLIMIT_AS, (2**20, unlimited[1]))
        try:
            return _FEED[self.role](server)
        finally:
            with suppress(ProcessLookupError):  # it has ended of it
                resource.prlimit(pid, resource.RLIMIT_AS, unlimited)


def _feed_engine(server: FaultyServer) -> Counter[str]:
    """A message that is too long for any memory, as from a front end; the engine ends it."""
    with HeldStreams(server) as held, socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(PATIENCE_S)
        connection.connect(str(server.engine_socket()))
        length = MAX_FRAME_BYTES.to_bytes(4, "little")
        with suppress(ConnectionError):
            connection.sendall(encode_frame(["hello", PROTOCOL_VERSION, "the campaign"]) + length)
            connection.sendall(bytes(MAX_FRAME_BYTES - 1))
            raise AssertionError("the engine has taken what it has no memory for")
    return held.outcomes


def _feed_front_ends(server: FaultyServer) -> Counter[str]:
    """Long texts at once to both of them, by connections enough."""
    text = pb.TokenizeRequest(text="memory of a process in pages " * _LONG_WORDS)
    with ExitStack() as stack:
        channels = [stack.enter_context(server.open_channel()) for _ in range(_LONG_TEXTS)]
        stubs = map(generation_pb2_grpc.GenerationServiceStub, channels)
        calls = [
            stub.Tokenize.future(text, timeout=PATIENCE_S, metadata=AUTHORISED) for stub in stubs
        ]
        return Counter(call.code().name for call in calls)


_FEED = {"engine": _feed_engine, "frontend": _feed_front_ends}


STRIKES = (
    Strike("nothing"),
    EngineSignal("engine killed", _ENGINE_GONE),
    EngineSignal("engine ended", _ENGINE_GONE, number=signal.SIGTERM),
    Signal("front end killed", _CONNECTION_GONE, role="frontend"),
    Signal("front end ended", _CONNECTION_GONE, role="frontend", number=signal.SIGTERM),
    End("server ended", (*_SERVER_GONE, _NOT_TAKEN)),
    End("server killed", _SERVER_GONE, number=signal.SIGKILL),
    Pause("engine stopped"),
    Pause("front end stopped", role="frontend"),
    Pause("supervisor stopped", role="supervisor"),
    ClockJump("clock set forward", seconds=400 * 86400),
    ClockJump("clock set back", seconds=-400 * 86400),
    FullDisk("full disk"),
    MemoryLimit("engine without memory", _ENGINE_GONE),
    MemoryLimit("front end without memory", _CONNECTION_GONE, role="frontend"),
)
