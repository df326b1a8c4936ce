"""Ports and sockets: free, held, shared by front ends, refused by name."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cupaged.errors import ConfigError
from cupaged.server.ports import check_unix_socket, hold_port
from cupaged.server.private_folder import PrivateFolder


@pytest.fixture
def busy() -> Iterator[int]:
    """A port at which somebody listens."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock.getsockname()[1]


def listen_beside(port: int) -> socket.socket:
    """As gRPC does."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    sock.bind(("127.0.0.1", port))
    sock.listen()
    return sock


def test_any_port_is_found_and_shared() -> None:
    held = hold_port("127.0.0.1", 0, "--port")
    assert held.port > 0
    assert held.address == f"127.0.0.1:{held.port}"
    with listen_beside(held.port) as first, listen_beside(held.port) as second:
        for _ in range(20):  # the socket that holds the port never takes a connection
            with socket.create_connection(("127.0.0.1", held.port), timeout=10):
                pass
        assert first.fileno() != second.fileno()
    held.close()


def test_a_named_port() -> None:
    held = hold_port("127.0.0.1", 0, "--port")
    number = held.port
    held.close()
    held = hold_port("127.0.0.1", number, "--port")
    assert held.port == number
    held.close()


def test_a_port_in_use_is_refused(busy: int) -> None:
    message = (
        f"--port must be a free port of 127.0.0.1: another program uses it; --port gives another "
        f"one, 0 any, got {busy}"
    )
    with pytest.raises(ConfigError) as caught:
        hold_port("127.0.0.1", busy, "--port")
    assert str(caught.value) == message


def test_a_port_of_another_server_is_refused_although_it_could_be_shared() -> None:
    held = hold_port("127.0.0.1", 0, "--port")  # it still loads: nobody listens
    with pytest.raises(ConfigError, match="another program uses it"):
        hold_port("127.0.0.1", held.port, "--port")
    with listen_beside(held.port), pytest.raises(ConfigError, match="another program uses it"):
        hold_port("127.0.0.1", held.port, "--port")
    held.close()


def test_a_port_with_connections_that_just_ended() -> None:
    """A server that is started again at once gets its port."""
    held = hold_port("127.0.0.1", 0, "--port")
    with listen_beside(held.port) as listener:
        client = socket.create_connection(("127.0.0.1", held.port), timeout=10)
        connection, _ = listener.accept()
        connection.close()  # the server's side closes first: TIME_WAIT is on our port
        assert client.recv(1) == b""
        client.close()
    held.close()
    hold_port("127.0.0.1", held.port, "--port").close()


@pytest.mark.parametrize("host", ["203.0.113.1", "no.such.host.invalid"])
def test_a_host_that_is_not_here(host: str) -> None:
    with pytest.raises(ConfigError, match=r"host must be .*address of this machine"):
        hold_port(host, 0, "--port")


def test_localhost_has_one_number() -> None:
    held = hold_port("localhost", 0, "--port")
    assert {s.getsockname()[1] for s in held.sockets} == {held.port}
    held.close()


# ---- unix sockets ------------------------------------------------------------------------------


def test_a_path_that_is_free(tmp_path: Path) -> None:
    check_unix_socket(str(tmp_path / "s"))
    with pytest.raises(ConfigError, match="a folder that exists and can be written"):
        check_unix_socket(str(tmp_path / "missing" / "s"))


def test_what_lies_at_a_path(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("precious")
    with pytest.raises(ConfigError, match="another file lies there"):
        check_unix_socket(str(path))
    assert path.read_text() == "precious"
    path.unlink()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))
        sock.listen()
        with pytest.raises(ConfigError, match="another server listens there"):
            check_unix_socket(str(path))
    assert path.exists()
    check_unix_socket(str(path))  # nobody listens any more
    assert not path.exists()


# ---- the private folder ------------------------------------------------------------------------


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Short, unlike `tmp_path`: the address of a socket has to fit."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr("tempfile.tempdir", folder)
        yield Path(folder)


def test_the_folder_is_private_and_goes(temporary: Path) -> None:
    with PrivateFolder() as folder:
        assert folder.path.parent == temporary
        assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
        assert folder.metrics.is_dir()
        assert folder.socket.parent == folder.path
    assert not any(temporary.iterdir())


def test_what_a_killed_server_left_is_removed(temporary: Path) -> None:
    old = time.time() - 3600
    stale, fresh, foreign = (temporary / f"cupaged-serve-{n}" for n in ("a", "b", "c"))
    for path in (stale, fresh, foreign):
        path.mkdir()
    (stale / "lock").touch()
    (fresh / "lock").touch()
    os.utime(stale, (old, old))
    os.utime(foreign, (old, old))
    with PrivateFolder() as alive:
        os.utime(alive.path, (old, old))
        with PrivateFolder():
            assert alive.path.is_dir()
            assert not stale.exists()
            assert fresh.exists()  # it may be about to take its lock
            assert foreign.exists()  # it has none


def test_a_long_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with PrivateFolder() as folder, socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(folder.socket))
