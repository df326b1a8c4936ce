"""Machines, disks and managers that are not as one would like them: it serves, or says why not."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2

from cupaged.engine.core import EngineCore
from cupaged.errors import ConfigError
from cupaged.server import engine_client, http_endpoints, metrics
from cupaged.server.auth import Tokens
from cupaged.server.metrics import SupervisorMetrics
from cupaged.server.ports import hold_port
from cupaged.server.serving_state import ServingState
from cupaged.server.settings import ServeSettings
from cupaged.server.settings_sources import load_settings
from tests.server.asking import health, request, stream_request, tokens
from tests.server.local_server import SECONDS, LocalServer
from tests.server.watched_server import WatchedServer

SERVING, NOT_SERVING = 1, 2
NOWHERE = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("2001:db8::1", 0, 0, 0))
HERE = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))


def resolve_to(monkeypatch: pytest.MonkeyPatch, *found: Any) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: [*found])


def test_a_name_whose_first_address_this_machine_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As localhost is ::1, too, in containers without IPv6."""
    resolve_to(monkeypatch, NOWHERE, HERE)
    held = hold_port("localhost", 0, "--port")
    assert [sock.getsockname() for sock in held.sockets] == [("127.0.0.1", held.port)]
    held.close()
    resolve_to(monkeypatch, NOWHERE)
    with pytest.raises(ConfigError, match="host must be an address of this machine"):
        hold_port("localhost", 0, "--port")


def test_metrics_at_such_a_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def start() -> http_endpoints.HttpEndpoints | None:
        return http_endpoints.start(
            ServeSettings(metrics_host="localhost", metrics_port=0),
            ServingState,
            metrics_folder=tmp_path,
            metrics=SupervisorMetrics(),
            model_name="m",
        )

    resolve_to(monkeypatch, NOWHERE, HERE)
    endpoints = start()
    assert endpoints is not None and endpoints.address[0] == "127.0.0.1"
    endpoints.close()
    resolve_to(monkeypatch, NOWHERE)
    with pytest.raises(ConfigError, match="metrics_host must be an address of this machine"):
        start()


def test_a_unix_socket_does_not_open_the_admin_port_to_everybody() -> None:
    ServeSettings(uds="/tmp/x.sock", host="0.0.0.0")
    with pytest.raises(ConfigError, match="host must be a loopback address"):
        ServeSettings(uds="/tmp/x.sock", host="0.0.0.0", admin_port=5)
    ServeSettings(uds="/tmp/x.sock", host="0.0.0.0", admin_port=5, insecure=True)


@pytest.mark.parametrize("service", ["", "ADMIN_", "METRICS_", "METRICS_HOST_"])
def test_variables_of_kubernetes(service: str) -> None:
    """It sets these for services that are named cupaged, cupaged-admin, ..."""
    start = f"CUPAGED_{service}"
    url = "tcp://10.0.0.1:9090"
    environment = {
        f"{start}SERVICE_HOST": "10.0.0.1",
        f"{start}SERVICE_PORT": "9090",
        f"{start}SERVICE_PORT_GRPC": "9090",
        f"{start}PORT": url,
        f"{start}PORT_9090_TCP": url,
        f"{start}PORT_9090_TCP_PROTO": "tcp",
        f"{start}PORT_9090_TCP_PORT": "9090",
        f"{start}PORT_9090_TCP_ADDR": "10.0.0.1",
    }
    assert load_settings({}, environment) == load_settings({}, {})
    settings = load_settings({}, {"CUPAGED_ADMIN_PORT": "7", "CUPAGED_PORT": "8"})
    assert (settings.admin_port, settings.port) == (7, 8)
    with pytest.raises(ConfigError, match="perhaps CUPAGED_METRICS_PORT is meant"):
        load_settings({}, {"CUPAGED_METRIC_PORT": "9"})


def test_a_token_of_the_environment_with_a_line_break() -> None:
    assert Tokens(secret="secret\n").find("secret")
    for bad in ("", " \n", "two words", "s\u00e9cret"):
        with pytest.raises(
            ConfigError, match=r"CUPAGED_API_KEY must be a token.*got '...'"
        ) as told:
            Tokens(secret=bad)
        assert bad.strip() == "" or bad not in str(told.value)


def test_room_for_metrics_is_taken_at_once(tmp_path: Path) -> None:
    """A hole in a mapped file would be a SIGBUS once the disk is full."""
    child = [sys.executable, "-m", "tests.server.metrics_child", str(tmp_path)]
    for process in ("engine", "frontend-1"):
        subprocess.run([*child, process], stdin=subprocess.DEVNULL, check=True, timeout=60)
    files = [path.stat() for path in tmp_path.glob("*.db")]
    assert len(files) == 6
    assert all(file.st_blocks * 512 >= file.st_size > 0 for file in files)


def test_no_room_for_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*counter_engine.db'"):
        metrics.store_in(tmp_path, "engine")


def test_signals_to_all_processes_let_streams_finish(tiny_model: str, tmp_path: Path) -> None:
    """systemd sends SIGTERM to every process of a service, `timeout` sends it twice."""
    null = ("--runner", "null", "--null-steps-per-s", "50")
    with WatchedServer(tmp_path, tiny_model, *null) as server:
        message = stream_request(stopping=tokens(80))
        call = server.generation.GenerateStream(message, timeout=SECONDS)
        events = [next(call), next(call)]
        for name in ("engine", "frontend-1"):
            os.kill(server.pid(name), signal.SIGTERM)
        server.terminate()
        server.terminate()
        events += call
        assert events[-1].finished.completion_tokens == 80
        assert server.end() == 0
        server.check_gone()


def test_an_engine_that_hangs(tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Health says so, the supervisor hears of it, and all is well when it goes on."""
    monkeypatch.setattr(engine_client, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(engine_client, "QUIET_LOOKS", 200)
    go_on = threading.Event()
    with LocalServer(tiny_model, runner="null") as server:
        watch = health(server.channel).Watch(health_pb2.HealthCheckRequest(), timeout=SECONDS)
        assert next(watch).status == SERVING
        assert server.engine is not None
        step = server.engine.core.step
        monkeypatch.setattr(EngineCore, "step", lambda core: (go_on.wait(SECONDS), step())[1])
        answer = server.generation.Generate.future(request(), timeout=SECONDS)
        assert next(watch).status == NOT_SERVING
        assert server.told == [("engine_silent", True)]
        go_on.set()
        assert next(watch).status == SERVING
        assert server.told[1:] == [("engine_silent", False)]
        assert answer.result(SECONDS).samples[0].completion_tokens == 6
        watch.cancel()
