"""/metrics, /livez and /readyz in plain HTTP, on threads of the supervisor.

Made for scrapers and probes, and safe against others: a bound on connections, on the bytes of a
request and on its time, one request a connection, no other paths, no bodies. It is not encrypted
and asks for no token; what it shows are numbers, the model's name and why the server is not ready.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from cupaged.errors import ConfigError
from cupaged.server.metrics import SupervisorMetrics
from cupaged.server.metrics_page import MetricsPage
from cupaged.server.serving_state import ServingState

MAX_CONNECTIONS = 32
MAX_REQUEST_BYTES = 16 * 1024
REQUEST_SECONDS = 5.0  # for a whole request and its answer, however it dribbles in
_MAX_IGNORED_BYTES = 256 * 1024
_LINGER_SECONDS = 1.0
_TEXT = "text/plain; charset=utf-8"
_TICK_SECONDS = 0.25
_OFF = -1
_MAX_PORT = 65535
_NOT_OURS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EINVAL)

_logger = logging.getLogger(__name__)
_Answer = tuple[HTTPStatus, bytes, str]  # status, body, content type


class HttpSettings(Protocol):
    """The settings that are used here; `ServeSettings` has them.

    metrics_port: 0 takes any free port; None or -1 turns the endpoints off.
    """

    @property
    def metrics_host(self) -> str: ...
    @property
    def metrics_port(self) -> int | None: ...
    @property
    def metrics_compat(self) -> str | None: ...


class HttpEndpoints:
    """The running endpoints.

    address: host and port that are listened on.
    """

    def __init__(self, server: _Server) -> None:
        self._server = server
        host, port = server.server_address[:2]
        self.address = (str(host), int(port))
        self._thread = threading.Thread(
            target=server.serve_forever, args=(_TICK_SECONDS,), name="http", daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        """Address of the metrics page."""
        host, port = self.address
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/metrics"

    def close(self) -> None:
        """Stop listening and cut what is open; returns when the port is free."""
        self._server.shutdown()
        self._server.server_close()
        self._server.cut(older_than_s=0.0)
        self._thread.join()


def start(
    settings: HttpSettings,
    state: Callable[[], ServingState],
    *,
    metrics_folder: str | Path,
    metrics: SupervisorMetrics,
    model_name: str,
) -> HttpEndpoints | None:
    """Listen and serve from now on; None when `metrics_port` turns the endpoints off.

    Args:
        settings: host, port, and whose names the metrics have besides ours.
        state: gives the present state; called from other threads.
        metrics_folder: that of `metrics.store_in` of all children; it exists.
        metrics: the supervisor's own numbers.
        model_name: the first served name.

    Raises:
        ConfigError: the port is in use or not allowed, the host is none of this machine, or
            `metrics_compat` is unknown.
    """
    host, port = settings.metrics_host, settings.metrics_port
    if port is None or port == _OFF:
        return None
    if not 0 <= port <= _MAX_PORT:
        raise ConfigError("metrics_port", port, f"from 0 to {_MAX_PORT}, or -1 for no endpoints")
    page = MetricsPage(
        metrics_folder,
        state=state,
        metrics=metrics,
        model_name=model_name,
        compat=settings.metrics_compat,
    )
    return HttpEndpoints(_listen(host, port, state, page))


def _listen(host: str, port: int, state: Callable[[], ServingState], page: MetricsPage) -> _Server:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError:
        found = []
    if not found:
        raise ConfigError("metrics_host", host, "a host name or an address of this machine")
    for family, _, _, _, address in found:
        try:
            return _Server(family, address, state, page)
        except PermissionError:
            allowed = "a port that this user may listen on (1024 or more)"
            raise ConfigError("metrics_port", port, allowed) from None
        except OSError as error:
            if error.errno in _NOT_OURS:  # a name may have an address of IPv6 where there is none
                continue
            allowed = f"a free port of {host} (0 takes any, -1 turns the endpoints off)"
            raise ConfigError("metrics_port", port, allowed) from error
    raise ConfigError("metrics_host", host, "an address of this machine")


class _Server(ThreadingHTTPServer):
    """A thread a connection, at most MAX_CONNECTIONS; those that take too long are cut."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(
        self,
        family: socket.AddressFamily,
        address: Any,
        state: Callable[[], ServingState],
        page: MetricsPage,
    ) -> None:
        self.address_family = family
        self.state = state
        self.page = page
        self._open: dict[socket.socket, float] = {}  # since when, in seconds of `_running_s`
        self._answered: set[socket.socket] = set()  # those whose request is whole
        self._lock = threading.Lock()
        self._running_s = 0.0
        self._looked = time.monotonic()
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Bind without the name look-up of the base class, which may take many seconds."""
        socketserver.TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Give a new connection a thread.

        When all are taken, the oldest that has not said what it wants has to go, so that those who
        say nothing keep no probe away; without such a one the new connection is closed at once.
        """
        self._count_seconds()
        with self._lock:
            full = len(self._open) >= MAX_CONNECTIONS
            silent = next((c for c in self._open if c not in self._answered), None)
            if full and silent is not None:
                del self._open[silent]
                _shut(silent)
                full = False
            if not full:
                self._open[request] = self._running_s
        if full:
            _logger.warning("%d HTTP connections are open: refused another one", MAX_CONNECTIONS)
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """End a connection; also called by the base class after each request."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Called by the loop after each tick and each connection."""
        self._count_seconds()
        self.cut(older_than_s=REQUEST_SECONDS)

    def _count_seconds(self) -> None:
        """Of the loop: those for which the process stood still are no fault of a client."""
        now = time.monotonic()
        self._running_s += min(now - self._looked, 2 * _TICK_SECONDS)
        self._looked = now

    def cut(self, *, older_than_s: float) -> None:
        """Shut the connections down that are open for longer; their threads end by that."""
        limit = self._running_s - older_than_s
        with self._lock:
            for connection, since in self._open.items():
                if since <= limit:
                    _shut(connection)

    @contextlib.contextmanager
    def answering(self, connection: socket.socket) -> Iterator[None]:
        """Meanwhile the connection keeps its thread."""
        with self._lock:
            self._answered.add(connection)
        try:
            yield
        finally:
            with self._lock:
                self._answered.discard(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Called by the base class inside `except`: a client that went away is no error."""
        if isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            _logger.debug("an HTTP client went away", exc_info=True)
        else:
            _logger.exception("an HTTP request failed")


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the client was faster
        connection.shutdown(socket.SHUT_RDWR)


class _TooLong(Exception):
    """The request has more bytes than are read."""


class _Bounded:
    """Reads lines of a connection up to a number of bytes in all."""

    def __init__(self, file: BufferedIOBase) -> None:
        self._file = file
        self._left = MAX_REQUEST_BYTES

    def readline(self, limit: int = -1) -> bytes:
        """A line; _TooLong past the bound."""
        allowed = self._left + 1
        line = self._file.readline(allowed if limit < 0 else min(allowed, limit))
        self._left -= len(line)
        if self._left < 0:
            raise _TooLong
        return line

    def close(self) -> None:
        """Close the file below."""
        self._file.close()


class _Handler(BaseHTTPRequestHandler):
    """Answers one request, then closes."""

    server: _Server
    protocol_version = "HTTP/1.1"
    error_content_type = _TEXT
    error_message_format = "%(message)s\n"

    def setup(self) -> None:
        super().setup()
        self.connection.settimeout(REQUEST_SECONDS)
        self.rfile: Any = _Bounded(self.rfile)

    def handle(self) -> None:
        """One request; `close_connection` of the base class never gets to say otherwise."""
        try:
            self.handle_one_request()
        except _TooLong:
            self.requestline, self.request_version, self.command = "", "HTTP/1.1", ""
            self.send_error(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                f"a request may have {MAX_REQUEST_BYTES} bytes",
            )
        self._ignore_the_rest()

    def _ignore_the_rest(self) -> None:
        """Read what the client still sends: closing on unread bytes would destroy the answer."""
        left = _MAX_IGNORED_BYTES
        with contextlib.suppress(OSError):  # the client has gone, or says nothing for too long
            self.connection.settimeout(_LINGER_SECONDS)
            self.connection.shutdown(socket.SHUT_WR)
            while left > 0 and (ignored := self.connection.recv(min(left, 65536))):
                left -= len(ignored)

    def __getattr__(self, name: str) -> Callable[[], None]:
        """The base class looks for `do_` and the method: all but two of them are refused."""
        if name.startswith("do_"):
            return self._answer
        raise AttributeError(name)

    def _answer(self) -> None:
        with self.server.answering(self.connection):
            self._answer_path()

    def _answer_path(self) -> None:
        path = urlsplit(self.path).path
        answers = {"/metrics": self._metrics, "/livez": self._live, "/readyz": self._ready}
        if path not in answers:
            self._send(HTTPStatus.NOT_FOUND, f"there are only {', '.join(answers)}\n".encode())
        elif self.command not in ("GET", "HEAD"):
            self._send(HTTPStatus.METHOD_NOT_ALLOWED, b"only GET and HEAD are allowed\n")
        else:
            self._send(*answers[path]())

    def _metrics(self) -> _Answer:
        accept = ",".join(self.headers.get_all("Accept", []))
        try:
            body, content_type = self.server.page.render(" ".join(accept.split()))
        except Exception:
            _logger.exception("the metrics page cannot be made")
            error = b"the metrics cannot be read; the log says why\n"
            return HTTPStatus.INTERNAL_SERVER_ERROR, error, _TEXT
        return HTTPStatus.OK, body, content_type

    def _live(self) -> _Answer:
        return _probe("alive", self.server.state().why_not_live())

    def _ready(self) -> _Answer:
        return _probe("ready", self.server.state().why_not_ready())

    def _send(self, status: HTTPStatus, body: bytes, content_type: str = _TEXT) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        if status is HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def version_string(self) -> str:
        """The Server header."""
        return "cupaged"

    def log_message(self, format: str, *args: Any) -> None:
        """Requests of probes are not worth a line, except when looking for an error."""
        _logger.debug("%s %s", self.client_address[0], format % args)


def _probe(good: str, why_not: str | None) -> _Answer:
    if why_not is None:
        return HTTPStatus.OK, f"{good}\n".encode(), _TEXT
    return HTTPStatus.SERVICE_UNAVAILABLE, f"not {good}: {why_not}\n".encode(), _TEXT
