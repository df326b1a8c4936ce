"""The engine as a front end sees it: requests in, streams of outputs back, over a unix socket.

It connects, connects again when the engine comes back, and knows whether requests can be taken. It
runs in one asyncio loop and computes nothing: a step's message is handed out to its streams as it
arrives.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any, cast

from cupaged.engine.door import check_request
from cupaged.errors import CupagedError, DrainingError, EngineDeadError, LoadingError
from cupaged.outputs import EngineStats
from cupaged.request import CoreRequest
from cupaged.server.output_stream import OutputStream
from cupaged.server.serving_state import Phase
from cupaged.server.wire import (
    PROTOCOL_VERSION,
    FrameReader,
    Message,
    WireError,
    encode_frame,
    error_from_wire,
)
from cupaged.server.wire_forms import EngineInfo, request_to_wire, stats_from_wire

MAX_PENDING_TOKENS = 16384
_RETRY_SECONDS = 0.05
_MAX_RETRY_SECONDS = 0.5
LOOK_SECONDS = 1.0  # the engine tells its statistics as often
QUIET_LOOKS = 60  # in a row, until it counts as silent: a step may take its time
_REASON_SECONDS = 0.7  # how long lost requests wait to be told of what the engine ended
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineState:
    """Whether requests can be taken.

    reason: of what the engine ended, "" otherwise. restarting: another one is being started.
    """

    phase: Phase
    reason: str = ""
    restarting: bool = False

    def error(self) -> CupagedError | None:
        """Why no request can be taken now, None if one can."""
        if self.phase == "ready":
            return None
        if self.phase == "dead":
            return EngineDeadError(self.reason, restarting=self.restarting)
        if self.phase == "draining":
            return DrainingError("the server is ending and takes no new requests")
        return LoadingError("the model is still being loaded")


class EngineClient:
    """One connection to the engine process.

    Args:
        path: the engine's unix socket.
        name: of this front end, for the engine's log.
        max_pending_tokens: most tokens of one request that may wait unread; then it is aborted.
        restarts: a dead engine is started again, as long as the server does not end; what the
            supervisor says counts more, and comes later.
    """

    def __init__(
        self,
        path: str,
        *,
        name: str = "",
        max_pending_tokens: int = MAX_PENDING_TOKENS,
        restarts: bool = False,
    ) -> None:
        self.info: EngineInfo | None = None
        self.stats: EngineStats | None = None
        self.on_state: Callable[[EngineState], None] | None = None
        self.on_stats: Callable[[EngineStats], None] | None = None
        self.on_silence: Callable[[bool], None] | None = None
        self.is_silent = False  # it is connected, and has said nothing for a minute
        self._path = path
        self._name = name
        self._max_pending_tokens = max_pending_tokens
        self._restarts = restarts
        self._told = EngineState("loading")  # by the supervisor, or by the end of a connection
        self._is_draining = False
        self._state = self._told
        self._connection: _Connection | None = None
        self._is_ready = False
        self._streams: dict[int, OutputStream] = {}
        self._due: list[OutputStream] = []  # empty between two messages
        self._live: set[str] = set()
        self._handles = count(1)
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._connector: asyncio.Task[None] | None = None
        self._try_now = asyncio.Event()
        self._ready = asyncio.Event()
        self._burial: asyncio.TimerHandle | None = None
        self._num_quiet_looks = 0
        self._next_look: asyncio.TimerHandle | None = None
        self._closed = False

    # ---- the connection ------------------------------------------------------------------------

    @property
    def state(self) -> EngineState:
        """Whether requests can be taken."""
        return self._state

    @property
    def num_streams(self) -> int:
        """Requests that are unfinished here."""
        return len(self._streams)

    async def connect(self, *, wait: bool = True) -> None:
        """Begin to connect, again and again until it works; with `wait`, until it has worked."""
        if self._connector is None:
            self._connector = asyncio.get_running_loop().create_task(self._keep_connected())
            self._look()
        if wait:
            await self.wait_ready()

    async def wait_ready(self) -> None:
        """Return when the engine takes requests."""
        await self._ready.wait()

    async def close(self) -> None:
        """End the connection and every stream."""
        self._closed = True
        if self._connector is not None:
            self._connector.cancel()
            await asyncio.gather(self._connector, return_exceptions=True)
        for timer in (self._burial, self._next_look):
            if timer is not None:
                timer.cancel()
        if self._connection is not None and self._connection.transport is not None:
            self._connection.transport.close()
        self._lose_all(EngineDeadError("the front end has closed its connection"))

    def set_state(self, phase: Phase, reason: str = "", restarting: bool = False) -> None:
        """What the supervisor says of the engine; draining is for good."""
        self._is_draining = self._is_draining or phase == "draining"
        if phase != "draining":
            self._told = EngineState(phase, reason, restarting)
        if phase == "dead":
            self._is_ready = False
            if self._connection is not None and self._connection.transport is not None:
                self._connection.transport.abort()
            self._lose_all(EngineDeadError(reason, restarting=restarting))
        if phase == "ready":
            self._try_now.set()
        self._update()

    # ---- requests ------------------------------------------------------------------------------

    def submit(self, request: CoreRequest, queue_timeout_s: float | None = None) -> OutputStream:
        """Check a request and send it to the engine.

        Args:
            queue_timeout_s: most seconds that it may wait to be scheduled.

        Raises:
            LoadingError, DrainingError, EngineDeadError: no request can be taken now.
            PromptError, InvalidParameterError, CapacityError: see `EngineCore.add_request`; what
                only the engine can know (a full queue, an id of another front end) is raised by
                the stream.
        """
        error = self._state.error()
        if error is not None:
            raise error
        assert self.info is not None
        check_request(request, self.info.config, self._live)
        handle = next(self._handles)
        frame = encode_frame(["add", handle, request_to_wire(request), queue_timeout_s])
        stream = OutputStream(
            request.request_id,
            request.params.n,
            max_pending_tokens=self._max_pending_tokens,
            send_abort=lambda: self._send(["abort", [handle]]),
            send_end=lambda index, reason: self._send(["end_sample", handle, index, reason]),
            forget=lambda: self._forget(handle),
            due=self._due,
        )
        self._streams[handle] = stream
        self._live.add(request.request_id)
        self._write(frame)
        return stream

    def abort_ids(self, request_ids: list[str]) -> None:
        """End requests of any front end; unknown and finished ids are passed over.

        Their streams end with finish_reason "abort".
        """
        if request_ids:
            self._send(["abort_ids", list(request_ids)])

    async def call(self, name: str, *args: Any) -> Any:
        """Ask the engine for something that is no request: "stats", "audit", ...

        Raises:
            CupagedError: it cannot be had.
        """
        error = self._state.error()
        if error is not None and not isinstance(error, DrainingError):
            raise error
        call_id = next(self._handles)
        future = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        self._send(["call", call_id, name, list(args)])
        try:
            return await future
        finally:
            self._calls.pop(call_id, None)

    # ---- inside --------------------------------------------------------------------------------

    def _send(self, message: Message) -> None:
        self._write(encode_frame(message))

    def _write(self, frame: bytes) -> None:
        """Nothing is sent when the connection is lost: the streams are about to hear of it."""
        connection = self._connection
        if connection is not None and connection.transport is not None:
            connection.transport.write(frame)

    def _forget(self, handle: int) -> None:
        stream = self._streams.pop(handle, None)
        if stream is not None:
            self._live.discard(stream.request_id)

    async def _keep_connected(self) -> None:
        loop = asyncio.get_running_loop()
        delay = _RETRY_SECONDS
        while True:
            connection = _Connection(self)
            self._try_now.clear()
            try:
                await loop.create_unix_connection(lambda: connection, self._path)  # noqa: B023
            except OSError:
                delay = min(2 * delay, _MAX_RETRY_SECONDS)
            else:
                delay = _RETRY_SECONDS
                await connection.ended.wait()
            try:
                await asyncio.wait_for(self._try_now.wait(), delay)
            except TimeoutError:
                continue

    def _look(self) -> None:
        """Looks are counted, not seconds: who stood still himself draws no conclusions from it."""
        self._next_look = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look)
        self._num_quiet_looks += 1
        self._set_silent(self._is_ready and self._num_quiet_looks > QUIET_LOOKS)

    def heard(self) -> None:
        """The engine has said something."""
        self._num_quiet_looks = 0
        if self.is_silent:
            self._set_silent(False)

    def _set_silent(self, is_silent: bool) -> None:
        if is_silent == self.is_silent:
            return
        self.is_silent = is_silent
        if is_silent:
            _logger.error("the engine has said nothing for %g s", QUIET_LOOKS * LOOK_SECONDS)
        else:
            _logger.info("the engine is no longer silent")
        if self.on_silence is not None:
            self.on_silence(is_silent)

    def opened(self, connection: _Connection) -> None:
        """A connection stands; the engine's facts come next."""
        self._lose_all(None)  # what the connection before it had
        self._connection = connection
        self._send(["hello", PROTOCOL_VERSION, self._name])

    def lost(self, connection: _Connection, why: str) -> None:
        """The connection has ended. The supervisor will say of what; until then nobody is told."""
        if self._connection is not connection:
            return
        self._connection = None
        self._is_ready = False
        if self._closed:
            return
        if self._told.phase != "dead":
            restarting = self._restarts and not self._is_draining
            self._told = EngineState("dead", why, restarting)
        if self._streams or self._calls:
            loop = asyncio.get_running_loop()
            self._burial = loop.call_later(_REASON_SECONDS, self._lose_all, None)
        self._update()

    def _lose_all(self, error: CupagedError | None) -> None:
        """Every stream and call ends with the error, or with what is known by now."""
        if self._burial is not None:
            self._burial.cancel()
            self._burial = None
        why = error or EngineDeadError(self._told.reason, restarting=self._told.restarting)
        for stream in list(self._streams.values()):
            stream.fail(why)
        self._streams.clear()
        self._live.clear()
        for future in self._calls.values():
            if not future.done():
                future.set_exception(why)

    def _update(self) -> None:
        """Derive the state; tell of a change."""
        state = self._told
        if self._is_ready:
            state = EngineState("ready")
        elif state.phase == "ready":  # the engine is, but its facts are on their way
            state = EngineState("loading")
        if self._is_draining and state.phase != "dead":
            state = EngineState("draining")
        if self._is_ready:
            self._ready.set()
        else:
            self._ready.clear()
        if state != self._state:
            self._state = state
            if self.on_state is not None:
                asyncio.get_running_loop().call_soon(self.on_state, state)

    def receive(self, message: Message) -> None:
        """A message of the engine. Raises WireError for one that it would not send."""
        kind = message[0]
        try:
            if kind == "step":
                streams = self._streams
                for handle, index, tokens, more in message[1]:
                    stream = streams.get(handle)
                    if stream is not None:  # else it was closed while this was on its way
                        stream.push(index, tokens, more)
                due = self._due
                while due:
                    due.pop().deliver()
            elif kind in ("rejected", "failed"):
                if (stream := self._streams.get(message[1])) is not None:
                    stream.fail(error_from_wire(message[2]))
            elif kind == "stats":
                self.stats = stats_from_wire(message[1])
                if self.on_stats is not None:
                    asyncio.get_running_loop().call_soon(self.on_stats, self.stats)
            elif kind == "reply":
                self._reply(*message[1:])
            elif kind == "ready":
                self.info = EngineInfo.from_wire(message[1])
                self._is_ready = True
                self._told = EngineState("ready")
                self._update()
            else:
                raise WireError(f"a message of an unknown kind: {kind!r}")
        except (ValueError, TypeError, IndexError, KeyError, AttributeError) as error:
            raise WireError(f"a message {kind!r} that cannot be read: {error}") from error

    def _reply(self, call_id: int, ok: bool, value: Any) -> None:
        future = self._calls.get(call_id)
        if future is None or future.done():
            return
        if ok:
            future.set_result(value)
        else:
            future.set_exception(error_from_wire(value))


class _Connection(asyncio.Protocol):
    """Bytes to messages."""

    def __init__(self, client: EngineClient) -> None:
        self.transport: asyncio.Transport | None = None
        self.ended = asyncio.Event()
        self._client = client
        self._reader = FrameReader()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._client.opened(self)

    def data_received(self, data: bytes) -> None:
        assert self.transport is not None
        self._client.heard()
        try:
            for message in self._reader.feed(data):
                self._client.receive(message)
        except WireError as error:
            _logger.error("the connection to the engine is closed: %s", error)
            self.transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None
        why = "its connection was lost" + (f": {error}" if error else "")
        self._client.lost(self, why)
        self.ended.set()
