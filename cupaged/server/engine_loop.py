"""The loop of the engine process: messages of the front ends in, a step, one message to each back.

One thread, no waiting but for the selector: it polls while there is work and sleeps while there is
none. It owns who asked for what; the core owns everything about running it. Requests of a front end
that goes away are aborted, and so is every request that waited longer than it wanted to.
"""

from __future__ import annotations

import heapq
import logging
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Any, cast, get_args

from cupaged.engine.core import EngineCore
from cupaged.errors import (
    CupagedError,
    EngineError,
    KVSanitizerError,
    QueueFullError,
    QueueTimeoutError,
    SlowConsumerError,
)
from cupaged.outputs import CoreOutput, FinishReason
from cupaged.server.control import ControlChannel
from cupaged.server.engine_calls import EngineCalls
from cupaged.server.engine_connection import MAX_BUFFERED_BYTES, Connection, LiveRequest
from cupaged.server.engine_observer import NoObserver, Observer
from cupaged.server.wire import PROTOCOL_VERSION, Message, WireError, error_to_wire
from cupaged.server.wire_forms import (
    EngineInfo,
    Row,
    more_to_wire,
    request_from_wire,
    stats_to_wire,
)

STATS_SECONDS = 1.0
_SMALL_LOGPROBS = 32  # at a position
MAX_FAILURES = 5  # steps that fail in a row before the process gives up
_logger = logging.getLogger(__name__)
_NUMBER = (int, float, type(None))
_FIELDS: dict[str, tuple[type | tuple[type, ...], ...]] = {
    "hello": (int, str),
    "add": (int, list, _NUMBER),
    "abort": (list,),
    "abort_ids": (list,),
    "end_sample": (int, int, str),
    "call": (int, str, list),
}
_REASONS = get_args(FinishReason)


class EngineLoop:
    """Serves an engine core over a listening socket.

    Args:
        core: of this process; nobody else touches it.
        info: told to every front end.
        listener: a unix socket that listens; this object owns it.
        control: messages of the supervisor, None where there is none.
        on_control: called for each of them; a true result ends the loop.
        observer: is told of steps, and of the state once a second.
        clock: seconds, monotonic.
        max_buffered_bytes: most bytes that one front end may leave unread.
    """

    def __init__(
        self,
        core: EngineCore,
        info: EngineInfo,
        listener: socket.socket,
        *,
        control: ControlChannel | None = None,
        on_control: Callable[[Message], bool] = lambda message: False,
        observer: Observer | None = None,
        clock: Callable[[], float] = time.monotonic,
        max_buffered_bytes: int = MAX_BUFFERED_BYTES,
    ) -> None:
        self.core = core
        self.info = info
        self._listener = listener
        self._control = control
        self._on_control = on_control
        self._observer = observer or NoObserver()
        self._clock = clock
        self._max_buffered_bytes = max_buffered_bytes
        self._selector = selectors.DefaultSelector()
        self._connections: list[Connection] = []
        self._live: dict[str, LiveRequest] = {}  # by request id
        self._timeouts: list[tuple[float, int, LiveRequest]] = []  # a heap
        self._num_timeouts = 0
        self._num_failures = 0
        self._drained: deque[tuple[float, int]] = deque(maxlen=10)  # (time, admitted requests)
        self._next_stats = clock()
        self._calls = EngineCalls(core)
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, None)
        if control is not None:
            self._selector.register(control, selectors.EVENT_READ, control)

    def run(self) -> None:
        """Serve until the supervisor says to stop.

        Raises:
            EngineError: the steps fail one after another, or memory of the KV pool was misused.
            ControlClosed: the supervisor is gone.
        """
        try:
            while self._turn():
                pass
        finally:
            for connection in list(self._connections):
                connection.close()
            self._selector.close()
            self._listener.close()

    # ---- one turn ------------------------------------------------------------------------------

    def _turn(self) -> bool:
        """Messages, then a step; False when the loop has to end."""
        now = self._clock()
        if now >= self._next_stats:
            self._tell_stats(now)
        if self._timeouts and now >= self._timeouts[0][0]:
            self._expire(now)
        for key, events in self._selector.select(self._patience(now)):
            connection = key.data
            if isinstance(connection, Connection):
                if events & selectors.EVENT_WRITE:
                    connection.send_unsent()
                if events & selectors.EVENT_READ:
                    self._read(connection)
            elif connection is None:
                self._accept()
            elif not self._obey():
                return False
        if self.core.has_unfinished_requests:
            self._step()
        for connection in self._connections:
            if connection.broken is not None:
                self._drop(connection)
                break  # the list has changed; others can wait for the next turn
        return True

    def _patience(self, now: float) -> float:
        """Seconds that the selector may sleep."""
        if self.core.has_unfinished_requests or any(c.broken for c in self._connections):
            return 0.0
        due = min(self._next_stats, self._timeouts[0][0] if self._timeouts else self._next_stats)
        return max(0.0, due - now)

    def _step(self) -> None:
        core, started = self.core, self._clock()
        computed, generated = core.num_computed_tokens, core.num_generated_tokens
        try:
            outputs = core.step()
        except KVSanitizerError as error:
            self._tell_lost(error)
            raise  # whatever comes next would be lost, too
        except EngineError as error:
            self._num_failures += 1
            self._tell_lost(error)
            if self._num_failures == MAX_FAILURES:
                raise EngineError(f"{MAX_FAILURES} steps failed in a row; {error}") from error
            return
        self._num_failures = 0
        live, busy = self._live, []
        for output in outputs:
            request = live.get(output.request_id)
            if request is None:  # given up a moment ago, for another sample of this step
                continue
            rows = request.connection.rows
            if not rows:
                busy.append(request.connection)
            if (
                output.finish_reason is None
                and output.logprobs is None
                and output.num_preemptions == request.num_preemptions
                and not request.is_fresh
            ):  # a token and nothing else: nearly always
                rows.append((request.handle, output.index, output.new_token_ids, None))
                continue
            more = more_to_wire(
                output, is_first=request.is_fresh, had_preemptions=request.num_preemptions
            )
            request.is_fresh = False
            request.num_preemptions = output.num_preemptions
            row = (request.handle, output.index, output.new_token_ids, more)
            if not _is_large(output):
                rows.append(row)
            elif not request.connection.is_behind:
                request.connection.send(["step", [row]])
            else:
                self._give_up(request)
                continue
            if output.finish_reason is not None:
                self._end_samples(request, 1)
        for connection in busy:
            if connection.rows:
                connection.send_rows()
        self._observer.step(
            self._clock() - started,
            num_computed=core.num_computed_tokens - computed,
            num_generated=core.num_generated_tokens - generated,
        )

    def _give_up(self, request: LiveRequest) -> None:
        """Its front end cannot keep up with what it brings: end it, before all others suffer."""
        error = SlowConsumerError(
            f"request {request.request_id}: its log probabilities are more than can be passed on "
            "in time; the request was aborted"
        )
        self._abort(request)
        request.connection.send(["failed", request.handle, error_to_wire(error)])

    def _tell_lost(self, error: EngineError) -> None:
        """Tell of the requests that a failed step has taken with it."""
        _logger.error("%s", error, exc_info=error.__cause__)
        form = error_to_wire(error)
        for request in [r for i, r in self._live.items() if not self.core.holds(i)]:
            self._forget(request)
            request.connection.send(["failed", request.handle, form])

    # ---- front ends ----------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # it has gone again
            return
        sock.setblocking(False)
        connection = Connection(sock, self._selector, max_buffered_bytes=self._max_buffered_bytes)
        self._connections.append(connection)

    def _read(self, connection: Connection) -> None:
        for message in connection.receive():
            try:
                self._dispatch(connection, message)
            except WireError as error:
                connection.broken = f"it sent {error}"
                return

    def _dispatch(self, connection: Connection, message: Message) -> None:
        kind, *values = message
        types = _FIELDS.get(kind)
        if types is None:
            raise WireError(f"a message of an unknown kind: {kind!r}")
        if len(values) != len(types) or not all(map(isinstance, values, types)):
            raise WireError(f"a message {kind!r} with wrong fields")
        if kind != "hello" and not connection.has_said_hello:
            raise WireError(f"a message {kind!r} before hello")
        getattr(self, f"_on_{kind}")(connection, *values)

    def _drop(self, connection: Connection) -> None:
        """Close a connection and abort what it had."""
        if connection.requests or not (connection.broken or "").startswith("it was closed"):
            text = "%s has gone (%s): %d requests are aborted"
            _logger.warning(text, connection.name, connection.broken, len(connection.requests))
        self._connections.remove(connection)
        connection.close()
        for request in list(connection.requests.values()):
            self._abort(request)

    # ---- what front ends say -------------------------------------------------------------------

    def _on_hello(self, connection: Connection, version: int, name: str) -> None:
        if version != PROTOCOL_VERSION:
            raise WireError(f"version {version} of the protocol; this is {PROTOCOL_VERSION}")
        connection.name = name or connection.name
        connection.has_said_hello = True
        connection.send(["ready", self.info.to_wire()])
        connection.send(["stats", stats_to_wire(self.core.stats())])

    def _on_add(
        self, connection: Connection, handle: int, form: list[Any], timeout_s: float | None
    ) -> None:
        if handle in connection.requests:
            raise WireError(f"handle {handle} a second time")
        try:
            request = request_from_wire(form)
            self.core.add_request(request)
        except CupagedError as error:
            if isinstance(error, QueueFullError):
                error.retry_after_s = self._retry_after_s()
            connection.send(["rejected", handle, error_to_wire(error)])
            return
        live = LiveRequest(connection, handle, request.request_id, request.params.n)
        self._live[request.request_id] = connection.requests[handle] = live
        if timeout_s is not None:
            self._num_timeouts += 1
            due = self._clock() + timeout_s
            heapq.heappush(self._timeouts, (due, self._num_timeouts, live))

    def _on_abort(self, connection: Connection, handles: list[Any]) -> None:
        for handle in handles:
            if not isinstance(handle, int):
                raise WireError("an abort of what is no handle")
            if (request := connection.requests.get(handle)) is not None:
                self._abort(request)

    def _on_abort_ids(self, connection: Connection, request_ids: list[Any]) -> None:
        self._abort_ids(request_ids)

    def _abort_ids(self, request_ids: list[Any]) -> list[str]:
        """End the live ones, and return their ids.

        Their owners, which may be other front ends, are told that the samples have ended.
        """
        aborted = []
        for request_id in request_ids:
            if not isinstance(request_id, str):
                raise WireError("an abort of what is no request id")
            request = self._live.get(request_id)
            if request is None:
                continue
            aborted.append(request_id)
            more = {"finish_reason": "abort"}
            samples = self.core.unfinished_samples(request_id)
            self._abort(request)
            rows: list[Row] = [[request.handle, index, [], more] for index in samples]
            request.connection.send(["step", rows])
        return aborted

    def _on_end_sample(self, connection: Connection, handle: int, index: int, reason: str) -> None:
        if reason not in _REASONS:
            raise WireError(f"an unknown reason {reason!r}")
        request = connection.requests.get(handle)
        ended = cast(FinishReason, reason)
        if request is not None and self.core.abort(request.request_id, index, reason=ended):
            self._end_samples(request, 1)

    def _on_call(self, connection: Connection, call_id: int, name: str, args: list[Any]) -> None:
        if name == "abort_ids" and len(args) == 1 and isinstance(args[0], list):
            connection.send(["reply", call_id, True, self._abort_ids(args[0])])
            return
        connection.send(["reply", call_id, *self._calls.answer(name, args)])

    # ---- the ends of requests ------------------------------------------------------------------

    def _end_samples(self, request: LiveRequest, number: int) -> None:
        request.num_unfinished -= number
        if not request.num_unfinished:
            self._forget(request)

    def _abort(self, request: LiveRequest) -> None:
        self.core.abort(request.request_id)
        self._forget(request)

    def _forget(self, request: LiveRequest) -> None:
        del self._live[request.request_id]
        del request.connection.requests[request.handle]

    def _expire(self, now: float) -> None:
        """End what has waited too long; what runs, or ran before, may go on."""
        while self._timeouts and now >= self._timeouts[0][0]:
            request = heapq.heappop(self._timeouts)[2]
            if self._live.get(request.request_id) is not request:
                continue
            if self.core.was_scheduled(request.request_id):
                continue
            error = QueueTimeoutError(
                f"request {request.request_id} waited as long as its queue_timeout allows and was "
                f"not started; {self.core.scheduler.num_queued_reqs} requests wait",
                retry_after_s=self._retry_after_s(),
            )
            self._abort(request)
            request.connection.send(["failed", request.handle, error_to_wire(error)])

    # ---- the supervisor, statistics ------------------------------------------------------------

    def _obey(self) -> bool:
        assert self._control is not None
        return not any([self._on_control(message) for message in self._control.receive()])

    def _tell_stats(self, now: float) -> None:
        self._next_stats = now + STATS_SECONDS
        self._drained.append((now, self.core.num_admitted))
        stats = self.core.stats()
        self._observer.update(stats, busy=self.core.has_unfinished_requests)
        for connection in self._connections:
            if connection.has_said_hello and not connection.num_unsent_bytes:
                connection.send(["stats", stats_to_wire(stats)])

    def _retry_after_s(self) -> float:
        """When an eighth of the queue has moved on, at the rate of the last ten seconds."""
        since, before = self._drained[0]
        moved = self.core.num_admitted - before
        elapsed = max(self._clock() - since, 0.001)
        wanted = 1 + self.core.scheduler.num_queued_reqs / 8
        return min(max(wanted * elapsed / moved, 0.1), 30.0) if moved else 30.0


def _is_large(output: CoreOutput) -> bool:
    """Whether its log probabilities fill a message of their own."""
    told = output.logprobs or ()
    return bool(output.prompt_logprobs) or any(len(p.token_ids) > _SMALL_LOGPROBS for p in told)
