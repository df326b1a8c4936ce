"""/metrics, /livez and /readyz: what they answer, and that nobody can hold them up."""

from __future__ import annotations

import errno
import http.client
import logging
import re
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from cupaged.errors import ConfigError
from cupaged.server import http_endpoints
from cupaged.server.http_endpoints import HttpEndpoints, start
from cupaged.server.metrics import SupervisorMetrics
from cupaged.server.metrics_page import MetricsPage
from cupaged.server.serving_state import ServingState

LOADED = ServingState("ready", num_listening=1)


@dataclass
class Settings:
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = 0
    metrics_compat: str | None = None


@dataclass
class Server:
    """Endpoints whose state a test sets."""

    folder: Path
    state: ServingState = LOADED
    settings: Settings = field(default_factory=Settings)
    endpoints: HttpEndpoints = field(init=False)

    def __post_init__(self) -> None:
        started = start(
            self.settings,
            lambda: self.state,
            metrics_folder=self.folder,
            metrics=SupervisorMetrics(),
            model_name="tiny",
        )
        assert started is not None
        self.endpoints = started

    def ask(
        self, path: str, method: str = "GET", body: bytes | None = None, **headers: str
    ) -> tuple[int, str, http.client.HTTPMessage]:
        connection = http.client.HTTPConnection(*self.endpoints.address, timeout=60)
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        text = response.read().decode()
        connection.close()
        return response.status, text, response.headers

    def send(self, data: bytes) -> bytes:
        """All that comes back for these bytes."""
        with socket.create_connection(self.endpoints.address, timeout=60) as connection:
            connection.sendall(data)
            return received(connection)


def received(connection: socket.socket) -> bytes:
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("metrics"))
    yield server
    server.endpoints.close()


@pytest.fixture
def server(shared: Server) -> Server:
    """The one of this module, loaded and ready."""
    shared.state = LOADED
    return shared


@pytest.mark.parametrize(
    ("state", "live", "ready"),
    [
        (LOADED, "alive", "ready"),
        (ServingState(), "alive", "not ready: the model is being loaded"),
        (ServingState("loading", num_listening=2), "alive", "not ready: the model is being loaded"),
        (ServingState("ready"), "alive", "not ready: no front end is listening"),
        (ServingState("draining", num_listening=1), "alive", "not ready: the server is draining"),
        (
            ServingState("dead", "killed by SIGKILL", restarting=True, num_listening=1),
            "alive",
            "not ready: the engine is being restarted: killed by SIGKILL",
        ),
        (
            ServingState("dead", "exit code 3", num_listening=1),
            "not alive: the engine is dead: exit code 3",
            "not ready: the engine is dead: exit code 3",
        ),
        (
            ServingState("dead"),
            "not alive: the engine is dead: no reason is known",
            "not ready: the engine is dead: no reason is known",
        ),
        (
            ServingState("draining", num_listening=1, forced=True),
            "not alive: a second signal has forced the end",
            "not ready: a second signal has forced the end",
        ),
    ],
)
def test_probes(server: Server, state: ServingState, live: str, ready: str) -> None:
    server.state = state
    for path, body in (("/livez", live), ("/readyz", ready)):
        status, text, headers = server.ask(path)
        assert text == f"{body}\n"
        assert status == (503 if body.startswith("not ") else 200)
        assert headers["Content-Type"] == "text/plain; charset=utf-8"


def test_the_whole_answer_is_golden(server: Server) -> None:
    answer = server.send(b"GET /readyz HTTP/1.1\r\nHost: x\r\n\r\n").decode()
    assert re.sub(r"Date: [^\r]+", "Date: -", answer) == (
        "HTTP/1.1 200 OK\r\n"
        "Server: cupaged\r\n"
        "Date: -\r\n"
        "Content-Type: text/plain; charset=utf-8\r\n"
        "Content-Length: 6\r\n"
        "Cache-Control: no-store\r\n"
        "X-Content-Type-Options: nosniff\r\n"
        "Connection: close\r\n"
        "\r\n"
        "ready\n"
    )


def test_metrics_page(server: Server) -> None:
    status, text, headers = server.ask("/metrics?ignored=1")
    assert status == 200
    assert headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert int(headers["Content-Length"]) == len(text)
    assert 'cupaged_server_state{model_name="tiny",state="ready"} 1.0\n' in text


def test_metrics_page_in_open_metrics(server: Server) -> None:
    status, text, headers = server.ask("/metrics", Accept="application/openmetrics-text")
    assert (status, text[-6:]) == (200, "# EOF\n")
    assert headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")


def test_a_page_that_cannot_be_made(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    damaged = server.folder / "counter_frontend-1.db"
    damaged.write_bytes(b"damaged")
    status, text, _ = server.ask("/metrics")
    damaged.unlink()
    assert (status, text) == (500, "the metrics cannot be read; the log says why\n")
    assert "the metrics page cannot be made" in caplog.text
    assert server.ask("/livez")[0] == 200


@pytest.mark.parametrize("path", ["/metrics", "/livez", "/readyz"])
def test_head_is_get_without_a_body(server: Server, path: str) -> None:
    for state in (LOADED, ServingState("dead")):
        server.state = state
        status, text, headers = server.ask(path)
        status_of_head, nothing, headers_of_head = server.ask(path, "HEAD")
        assert (status_of_head, nothing) == (status, "")
        assert headers_of_head["Content-Length"] == headers["Content-Length"] == str(len(text))


@pytest.mark.parametrize("path", ["/", "/metrics/", "/livez/..", "/../etc/passwd", "/%6detrics"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_there_are_no_other_paths(server: Server, path: str, method: str) -> None:
    status, text, _ = server.ask(path, method)
    assert (status, text) == (404, "there are only /metrics, /livez, /readyz\n")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW"])
def test_there_are_no_other_methods(server: Server, method: str) -> None:
    status, text, headers = server.ask("/metrics", method)
    assert (status, text) == (405, "only GET and HEAD are allowed\n")
    assert headers["Allow"] == "GET, HEAD"


def test_a_body_is_not_read_and_does_not_spoil_the_answer(server: Server) -> None:
    assert server.ask("/metrics", "POST", b"x" * 200_000)[0] == 405


@pytest.mark.parametrize(
    ("request_bytes", "body"),
    [
        (b"GET /metrics HTTP/1.1\r\nLong: " + b"x" * 20_000, b"a request may have 16384 bytes\n"),
        (b"GET /" + b"x" * 20_000, b"a request may have 16384 bytes\n"),
        (b"GET /metrics HTTP/1.1\r\n" + b"Many: x\r\n" * 101, b"Too many headers\n"),
    ],
)
def test_a_request_is_bounded(server: Server, request_bytes: bytes, body: bytes) -> None:
    head, _, given = server.send(request_bytes + b"\r\n\r\n").partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 ")
    assert given == body


@pytest.mark.parametrize(
    ("garbage", "answer"),
    [
        (b"\x16\x03\x01 \x02 x\r\n\r\n", b"Bad request version ('x')\n"),  # as of TLS
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"Invalid HTTP version (2.0)\n"),  # as of gRPC
        (b"\r\n", b""),
    ],
)
def test_garbage_is_refused(server: Server, garbage: bytes, answer: bytes) -> None:
    assert server.send(garbage) == answer
    assert server.ask("/livez")[:2] == (200, "alive\n")


def test_one_request_a_connection(server: Server) -> None:
    request = b"GET /livez HTTP/1.1\r\nConnection: keep-alive\r\n\r\n"
    assert server.send(request * 2).count(b"alive\n") == 1


def test_a_dribbling_client_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte comes soon enough, the whole request does not."""
    monkeypatch.setattr(http_endpoints, "REQUEST_SECONDS", 0.3)
    server = Server(tmp_path)
    with socket.create_connection(server.endpoints.address) as connection:
        connection.settimeout(0.05)
        answered = None
        for _ in range(1000):  # fifty seconds; the request is never complete
            try:
                connection.sendall(b"G")
                answered = connection.recv(1)
            except TimeoutError:
                continue
            except OSError as error:
                assert error.errno in (errno.ECONNRESET, errno.EPIPE)
                answered = b""
            break
        assert answered == b""
    assert server.ask("/livez")[0] == 200
    server.endpoints.close()


def test_who_waited_while_the_server_stood_still_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that a signal stops, or a machine that is frozen for its move to another."""
    stood_still_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + stood_still_s)
    monkeypatch.setattr(http_endpoints, "time", clock)
    server = Server(tmp_path)
    with socket.create_connection(server.endpoints.address, timeout=60) as connection:
        connection.sendall(b"GET /livez HTTP/1.1\r\n")
        assert server.ask("/livez")[0] == 200  # accepted after it
        stood_still_s = 1000.0
        for _ in range(2):  # the loop has looked at the clock when it accepts the second
            assert server.ask("/livez")[0] == 200
        connection.sendall(b"\r\n")
        assert received(connection).endswith(b"\r\n\r\nalive\n")
    server.endpoints.close()


def test_who_says_nothing_makes_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_endpoints, "MAX_CONNECTIONS", 2)
    server = Server(tmp_path)
    address = server.endpoints.address
    with socket.create_connection(address) as first, socket.create_connection(address) as second:
        assert server.ask("/livez")[0] == 200
        assert received(first) == b""  # the oldest
        second.sendall(b"GET /livez HTTP/1.1\r\n\r\n")
        assert received(second).endswith(b"\r\n\r\nalive\n")
    server.endpoints.close()


def test_connections_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(http_endpoints, "MAX_CONNECTIONS", 2)
    server = Server(tmp_path)
    address = server.endpoints.address
    render, entered, go_on = MetricsPage.render, threading.Semaphore(0), threading.Event()

    def slowly(page: MetricsPage, accept: str) -> tuple[bytes, str]:
        entered.release()
        go_on.wait(60)
        return render(page, accept)

    monkeypatch.setattr(MetricsPage, "render", slowly)
    with socket.create_connection(address) as first, socket.create_connection(address) as second:
        for connection in (first, second):
            connection.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            assert entered.acquire(timeout=60)
        with socket.create_connection(address, timeout=60) as third:
            assert received(third) == b""  # closed at once, while the others are served:
        go_on.set()
        for connection in (first, second):
            assert received(connection).startswith(b"HTTP/1.1 200")
    assert "2 HTTP connections are open: refused another one" in caplog.text
    server.endpoints.close()


def test_clients_that_go_away_leave_no_error(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    for data in (b"", b"GET /met", b"GET /metrics HTTP/1.1\r\n\r\n"):
        with socket.create_connection(server.endpoints.address) as connection:
            linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"  # close() sends a reset
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            connection.sendall(data)
    assert server.ask("/livez")[0] == 200
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []


def test_close_frees_the_port_though_a_client_is_connected(tmp_path: Path) -> None:
    server = Server(tmp_path)
    with socket.create_connection(server.endpoints.address, timeout=60) as connection:
        server.ask("/livez")
        server.endpoints.close()
        assert received(connection) == b""
    again = Server(tmp_path, settings=Settings(metrics_port=server.endpoints.address[1]))
    assert again.ask("/livez")[0] == 200
    again.endpoints.close()


def test_a_port_in_use_is_refused_by_name(server: Server) -> None:
    port = server.endpoints.address[1]
    allowed = r"a free port of 127.0.0.1 \(0 takes any, -1 turns the endpoints off\)"
    with pytest.raises(ConfigError, match=f"^metrics_port must be {allowed}, got {port}$"):
        Server(server.folder, settings=Settings(metrics_port=port))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (Settings(metrics_port=65536), "metrics_port must be from 0 to 65535, or -1"),
        (Settings(metrics_port=-2), "metrics_port must be from 0 to 65535, or -1"),
        (Settings("192.0.2.1"), "metrics_host must be an address of this machine, got '192.0.2.1'"),
        (Settings("no.such.host.invalid"), "metrics_host must be a host name or an address"),
        (Settings(metrics_compat="tgi"), "metrics_compat must be 'vllm', got 'tgi'"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, settings: Settings, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        Server(tmp_path, settings=settings)


@pytest.mark.parametrize("port", [None, -1])
def test_off(tmp_path: Path, port: int | None) -> None:
    settings = Settings(metrics_port=port)
    metrics = SupervisorMetrics()
    assert (
        start(settings, ServingState, metrics_folder=tmp_path, metrics=metrics, model_name="tiny")
        is None
    )


def test_ipv6(tmp_path: Path) -> None:
    try:
        server = Server(tmp_path, settings=Settings("::1"))
    except ConfigError:
        pytest.skip("this machine has no ::1")
    assert re.fullmatch(r"http://\[::1\]:\d+/metrics", server.endpoints.url)
    assert server.ask("/livez")[0] == 200
    server.endpoints.close()
