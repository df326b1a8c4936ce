"""The process that `cupaged serve` is: starts the engine and the front ends, watches, ends them.

It owns the ports, the private folder, the signals and the HTTP endpoints, and handles no request;
it imports neither NumPy nor gRPC, so it stays small. Everything happens in one loop that waits for
children and signals. Whatever ends it, no child outlives it: their control channels end with it.
"""

from __future__ import annotations

import heapq
import logging
import selectors
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TextIO

from cupaged.errors import (
    BadValueError,
    CupagedError,
    EngineDeadError,
    ModelError,
    NotSupportedError,
)
from cupaged.server import http_endpoints, log_setup, metrics
from cupaged.server.child_start import ChildStart
from cupaged.server.openai_gateway import OpenAIGateway
from cupaged.server.ports import HeldPort, check_unix_socket, hold_port
from cupaged.server.private_folder import PrivateFolder
from cupaged.server.serving_state import Phase, ServingState
from cupaged.server.settings import ServeSettings
from cupaged.server.signals import SignalPipe
from cupaged.server.supervised_child import Output, SupervisedChild
from cupaged.server.wire import Message

ENGINE = (sys.executable, "-m", "cupaged.server.engine_process")
FRONT_END = (sys.executable, "-m", "cupaged.server.frontend_process")
FAILURE = 1
MAX_DEATHS, DEATHS_SECONDS = 5, 60.0  # of one front end, until the server gives up
FIRST_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 1.0, 30.0  # before an engine is started again
_STABLE_SECONDS = 60.0  # of an engine's life, after which the first backoff counts again
_LAST_WORDS_SECONDS = 2.0  # front ends answer ENGINE_DEAD for so long
_SAME_SECONDS = 0.3  # signals as close as that are one: `timeout` sends its own twice
_STOP_SECONDS = 3.0  # to end after `stop`, then they are killed
_DRAIN_GRACE_SECONDS = 5.0  # beyond what draining may take
# What a front end says of settings that no other one would start with either.
_REFUSALS = (BadValueError, ModelError, NotSupportedError)
_logger = logging.getLogger(__name__)


class Supervisor:
    """One server. `run` is called once, in the main thread.

    Args:
        settings: of the whole server.
        engine, front_end: commands of the children.
        stdout: gets the one line that says where the server is.
        stderr: gets the lines of the children.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        settings: ServeSettings,
        *,
        engine: tuple[str, ...] = ENGINE,
        front_end: tuple[str, ...] = FRONT_END,
        stdout: TextIO | None = None,
        stderr: Output | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.state = ServingState()
        self._settings = settings
        self._commands = (engine, front_end)
        self._stdout = stdout or sys.stdout
        self._stderr: Output = stderr or sys.stderr.buffer
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        self._metrics = metrics.SupervisorMetrics()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._engine: SupervisedChild | None = None
        self._front_ends: dict[int, SupervisedChild] = {}
        self._deaths: dict[int, deque[float]] = {
            i: deque(maxlen=MAX_DEATHS) for i in range(settings.frontends)
        }
        self._have_listened: set[int] = set()  # front ends, in this life or an earlier one
        self._has_been_ready = False
        self._is_draining = False
        self._first_signal = (0, 0.0)  # and when it came
        self._is_announced = False
        self._ready_since = 0.0
        self._backoff = FIRST_BACKOFF_SECONDS
        self._ending: int | None = None  # the exit code, once the end has begun
        self._error: CupagedError | None = None  # of what the server could not even begin
        self._port: HeldPort | None = None
        self._admin_port: HeldPort | None = None
        self._http: http_endpoints.HttpEndpoints | None = None
        self._gateway: OpenAIGateway | None = None

    def run(self) -> int:
        """Serve until a signal or a death ends it.

        Returns:
            The exit code: 0 after draining, 1 after a death, 128 + the signal when forced.

        Raises:
            CupagedError: the server could not begin: a port, a certificate, the model.
        """
        with ExitStack() as stack:
            stack.callback(self._selector.close)
            signals = stack.enter_context(SignalPipe())
            self._take_ports(stack)
            self._folder = stack.enter_context(PrivateFolder())
            self._http = http_endpoints.start(
                self._settings,
                lambda: self.state,
                metrics_folder=self._folder.metrics,
                metrics=self._metrics,
                model_name=self._settings.model_names[0],
            )
            if self._http is not None:
                stack.callback(self._http.close)
            stack.callback(self._bury_all)
            self._selector.register(signals, selectors.EVENT_READ, signals)
            self._start_engine()
            for index in range(self._settings.frontends):
                self._start_front_end(index)
            while self._ending is None or self._children():
                self._turn(signals)
        if self._error is not None:
            raise self._error
        return self._ending

    # ---- the loop ------------------------------------------------------------------------------

    def _turn(self, signals: SignalPipe) -> None:
        patience = max(0.0, self._timers[0][0] - self._clock()) if self._timers else None
        for key, _ in self._selector.select(patience):
            source = key.data
            if isinstance(source, SignalPipe):
                for number in signals.read():
                    self._on_signal(number)
            elif source.owns(key.fileobj) == "output":
                source.forward_output()
            else:
                self._hear(source, source.receive())
        while self._timers and self._clock() >= self._timers[0][0]:
            heapq.heappop(self._timers)[2]()
        for child in self._children():
            if child.exit_code is not None:
                self._hear(child, child.bury())
                self._on_death(child)
        if self._gateway is not None:
            self._gateway.look()

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (self._clock() + seconds, next(self._order), action))

    def _children(self) -> list[SupervisedChild]:
        engine = [] if self._engine is None else [self._engine]
        return [*engine, *self._front_ends.values()]

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGCHLD:
            return  # `_turn` looks at every child anyway
        if self._ending is None and not self._is_draining:
            self._first_signal = (number, self._clock())
            _logger.info("%s: the server ends", signal.Signals(number).name)
            self._drain(self._settings.drain_timeout)
            return
        first, came = self._first_signal
        is_same = number == first and self._clock() - came < _SAME_SECONDS
        if not self.state.forced and number != signal.SIGHUP and not is_same:
            _logger.warning("%s again: the server is killed", signal.Signals(number).name)
            self.state = replace(self.state, forced=True)
            self._ending = 128 + number
            self._kill_all()

    # ---- starting ------------------------------------------------------------------------------

    def _take_ports(self, stack: ExitStack) -> None:
        settings = self._settings
        if settings.uds is not None:
            check_unix_socket(settings.uds)
        else:
            self._port = hold_port(settings.host, settings.port, "--port")
            stack.callback(self._port.close)
        if settings.admin_port is not None:
            self._admin_port = hold_port(settings.host, settings.admin_port, "--admin-port")
            stack.callback(self._admin_port.close)
        if settings.openai:
            self._gateway = OpenAIGateway(settings)
            stack.callback(self._gateway.close)

    def _start_engine(self) -> None:
        self._engine = self._start(self._commands[0], "engine", 0)
        if self._has_been_ready:
            self._metrics.engine_restarted()
        self._set_state("loading")

    def _start_front_end(self, index: int) -> None:
        if self._ending is None:
            child = self._start(self._commands[1], f"frontend-{index + 1}", index)
            self._front_ends[index] = child
            self._tell_state(child)

    def _start(self, command: tuple[str, ...], name: str, index: int) -> SupervisedChild:
        is_first = name != "engine" and index == 0
        start = ChildStart(
            settings=self._settings,
            name=name,
            index=index,
            engine_socket=str(self._folder.socket),
            metrics_folder=str(self._folder.metrics) if self._settings.has_metrics else None,
            statistics_file=None if name == "engine" else str(self._folder.statistics / name),
            port=self._port.port if self._port else None,
            admin_port=self._admin_port.port if self._admin_port and is_first else None,
            others_serve=self.state.why_not_ready() is None,
        )
        child = SupervisedChild(command, start, self._selector, self._stderr)
        _logger.debug("%s is process %d", name, child.pid)
        return child

    # ---- what children say ---------------------------------------------------------------------

    def _hear(self, child: SupervisedChild, messages: list[Message]) -> None:
        for kind, *values in messages:
            if kind == "loaded" and child is self._engine:
                child.is_up = True
                self._ready_since = self._clock()
                _logger.info("the engine is ready after %.1f s", values[1])
                if self.state.phase == "loading":
                    self._set_state("ready")
                self._has_been_ready = True
            elif kind == "listening":
                child.is_up = True
                self.state = replace(self.state, silent=False)  # it looks anew
                self._have_listened.add(child.index)
                self._count_listening()
                _logger.info("%s listens at %s", child.name, values[0])
            elif kind == "drain_requested":
                if self._ending is None and not self._is_draining:
                    _logger.info("asked to end by %s", child.name)
                    asked = values[0] if values else None
                    self._drain(self._settings.drain_timeout if asked is None else float(asked))
            elif kind == "engine_silent":
                self.state = replace(self.state, silent=bool(values[0]))
            elif kind == "log_level_set":
                log_setup.set_level(values[0])
                self._tell_all("log_level", values[0])
            elif kind not in ("dying", "stats"):
                _logger.warning("%s says %r, which nobody understands", child.name, kind)
        self._announce()

    def _announce(self) -> None:
        """The one line, when everything is there for the first time."""
        settings = self._settings
        is_whole = self.state.phase == "ready" and self.state.num_listening == settings.frontends
        if self._is_announced or not is_whole:
            return
        self._is_announced = True
        scheme = "grpcs" if settings.has_tls else "grpc"
        place = f"{scheme}://{self._port.address}" if self._port else f"unix:{settings.uds}"
        pages = f" (metrics {self._http.url})" if self._http is not None else ""
        line = f"cupaged serving {settings.model_names[0]} on {place}{pages}"
        try:
            print(line, file=self._stdout, flush=True)
        except OSError as error:
            _logger.warning("standard output cannot be written: %s", error)
        if self._gateway is not None and self._port is not None:
            self._gateway.start(self._port.port)

    # ---- deaths --------------------------------------------------------------------------------

    def _on_death(self, child: SupervisedChild) -> None:
        metrics.process_died(self._folder.metrics, child.name)
        if child is self._engine:
            self._engine = None
            self._on_engine_death(child)
        else:
            del self._front_ends[child.index]
            self._count_listening()
            self._on_front_end_death(child)

    def _on_engine_death(self, child: SupervisedChild) -> None:
        reason = child.reason()
        if self._ending is not None:
            return
        if not self._has_been_ready:
            self._error = child.dying_error or EngineDeadError(reason)
            self._end(FAILURE)
            return
        restarting = self._settings.restart_engine and not self._is_draining
        _logger.error("the engine has ended: %s", reason)
        self._set_state("dead", reason, restarting)
        if restarting:
            lived = self._clock() - self._ready_since if child.is_up else 0.0
            if lived > _STABLE_SECONDS:
                self._backoff = FIRST_BACKOFF_SECONDS
            _logger.info("the engine is started again in %g s", self._backoff)
            self._after(self._backoff, self._restart_engine)
            self._backoff = min(2 * self._backoff, MAX_BACKOFF_SECONDS)
        else:
            self._after(_LAST_WORDS_SECONDS, lambda: self._end(FAILURE))

    def _restart_engine(self) -> None:
        if self._ending is None and self._engine is None and self.state.phase == "dead":
            self._start_engine()

    def _on_front_end_death(self, child: SupervisedChild) -> None:
        if self._ending is not None:
            return
        if self._is_draining:
            if child.exit_code != 0:
                _logger.error("%s has ended: %s", child.name, child.reason())
            if not self._front_ends:
                self._end(FAILURE if self.state.phase == "dead" else 0)
            return
        if not child.is_up and isinstance(child.dying_error, _REFUSALS):
            self._error = child.dying_error
            self._end(FAILURE)
            return
        deaths = self._deaths[child.index]
        deaths.append(self._clock())
        _logger.error("%s has ended: %s", child.name, child.reason())
        if len(deaths) == MAX_DEATHS and deaths[-1] - deaths[0] < DEATHS_SECONDS:
            text = "%s has ended %d times in %g s: the server gives up"
            _logger.error(text, child.name, MAX_DEATHS, DEATHS_SECONDS)
            self._end(FAILURE)
            return
        self._metrics.frontend_restarted()
        self._start_front_end(child.index)

    # ---- ending --------------------------------------------------------------------------------

    def _drain(self, timeout_s: float) -> None:
        """Let running requests end; where there can be none, end at once."""
        if self.state.phase != "ready":
            is_lost = self.state.phase == "dead" and not self.state.restarting
            self._end(FAILURE if is_lost else 0)
            return
        self._is_draining = True
        self._set_state("draining")
        if self._engine is not None:
            self._engine.send("draining")
        for child in self._front_ends.values():
            child.send("drain", timeout_s)
        if not self._front_ends:
            self._end(0)
        most = self._settings.drain_delay + timeout_s + _DRAIN_GRACE_SECONDS
        self._after(most, self._give_up_draining)

    def _give_up_draining(self) -> None:
        if self._ending is None:
            _logger.error("the front ends have not ended in time")
            self._end(FAILURE)

    def _end(self, code: int) -> None:
        """Stop every child, soon by force, and end with the code."""
        if self._ending is not None:
            return
        self._ending = code
        self._tell_all("stop")
        for child in self._children():
            if not child.is_up:
                child.signal(signal.SIGKILL)  # it loads, hears nothing, and has no requests
        self._after(_STOP_SECONDS, self._kill_all)

    def _kill_all(self) -> None:
        for child in self._children():
            child.signal(signal.SIGKILL)

    def _bury_all(self) -> None:
        """However this ends, nothing is left behind."""
        self._kill_all()
        for child in self._children():
            child.wait()
            child.bury()
        if self._settings.uds is not None:
            Path(self._settings.uds).unlink(missing_ok=True)

    # ---- state ---------------------------------------------------------------------------------

    def _set_state(self, phase: Phase, reason: str = "", restarting: bool = False) -> None:
        self.state = replace(
            self.state, phase=phase, reason=reason, restarting=restarting, silent=False
        )
        for child in self._front_ends.values():
            self._tell_state(child)

    def _tell_state(self, child: SupervisedChild) -> None:
        child.send("state", self.state.phase, self.state.reason, self.state.restarting)

    def _tell_all(self, *message: object) -> None:
        for child in self._children():
            child.send(*message)

    def _count_listening(self) -> None:
        listening = sum(child.is_up for child in self._front_ends.values())
        self.state = replace(self.state, num_listening=listening)
