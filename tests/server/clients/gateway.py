"""Envoy with the configuration of our example in front of a server, and HTTP requests to it."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from cupaged.server.descriptor_set import descriptor_set
from tests.e2e.cli import ROOT
from tests.server.local_server import SECONDS, wait_until

EXAMPLE = ROOT / "cupaged" / "examples" / "envoy"
OPTIONS = ("--disable-hot-restart", "--concurrency", "1", "--log-level", "error")
# So that a test can ask where Envoy listens.
ADMIN = "admin: {address: {socket_address: {address: 127.0.0.1, port_value: 0}}}"


@dataclass(frozen=True)
class Reply:
    """An answer over HTTP, whole."""

    status: int
    headers: http.client.HTTPMessage
    text: str

    @property
    def json(self) -> Any:
        assert self.headers["content-type"] == "application/json"
        return json.loads(self.text)

    def reason(self) -> str:
        """Of the ErrorInfo in a google.rpc.Status."""
        kinds = {detail["@type"].rpartition(".")[2]: detail for detail in self.json["details"]}
        assert kinds["ErrorInfo"]["domain"] == "cupaged"
        return str(kinds["ErrorInfo"]["reason"])


class Gateway:
    """A context in which Envoy runs.

    Args:
        envoy: the program.
        folder: where its files are written.
        upstream: "127.0.0.1:PORT" of the server.
        changes: what is replaced in the configuration.
    """

    def __init__(
        self, envoy: Path, folder: Path, upstream: str, changes: tuple[tuple[str, str], ...] = ()
    ) -> None:
        self._admin = folder / "admin"
        self._admin.unlink(missing_ok=True)
        (folder / "cupaged.binpb").write_bytes(descriptor_set().SerializeToString())
        text = (EXAMPLE / "envoy.yaml").read_text(encoding="utf-8")
        ports = (("50051", upstream.rpartition(":")[2]), ("8080", "0"))
        for old, new in (*(("port_value: " + a, "port_value: " + b) for a, b in ports), *changes):
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        (folder / "envoy.yaml").write_text(text, encoding="utf-8")
        files = ("-c", "envoy.yaml", "--config-yaml", ADMIN, "--admin-address-path", "admin")
        self._command: list[str | Path] = [envoy, *files, *OPTIONS]
        self._folder = folder

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(self._command, cwd=self._folder)
        try:
            wait_until(self._has_told_its_admin)
            wait_until(self._listens)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()

    def _has_told_its_admin(self) -> bool:
        assert self._process.poll() is None, "Envoy has ended"
        return self._admin.exists() and ":" in self._admin.read_text()

    def _listens(self) -> bool:
        assert self._process.poll() is None, "Envoy has ended"
        told = ask(self._admin.read_text(), "/listeners?format=json")
        for found in json.loads(told.text).get("listener_statuses", []):
            place = found["local_address"]["socket_address"]
            self.address = f"{place['address']}:{place['port_value']}"
            with suppress(ConnectionRefusedError):  # it has a port before it takes connections
                self.ask("/readyz")
                return True
        return False

    def ask(self, path: str, body: Any = None, **headers: str) -> Reply:
        """A POST of a body, or a GET without one."""
        return ask(self.address, path, body, **headers)

    def wait_ready(self) -> None:
        """Return when it has found the server healthy."""
        wait_until(lambda: self.ask("/readyz").status == 200)


def ask(address: str, path: str, body: Any = None, **headers: str) -> Reply:
    """A POST of a body, as JSON unless it is a text, or a GET without one."""
    with Asked(address, path, body, **headers) as asked:
        response = asked.response()
        return Reply(response.status, response.headers, response.read().decode())


class Asked:
    """A request whose answer has still to be read; leaving the context closes the connection."""

    def __init__(self, address: str, path: str, body: Any = None, **headers: str) -> None:
        host, _, port = address.rpartition(":")
        self._connection = http.client.HTTPConnection(host, int(port), timeout=SECONDS)
        data = body if body is None or isinstance(body, str) else json.dumps(body)
        named = {key.replace("_", "-"): value for key, value in headers.items()}
        self._connection.request("GET" if body is None else "POST", path, data, named)
        assert self._connection.sock is not None
        self.socket: socket.socket = self._connection.sock

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._connection.close()
        self.socket.close()

    def response(self) -> http.client.HTTPResponse:
        """Wait for the head of the answer."""
        self._response = self._connection.getresponse()
        return self._response

    def leave(self) -> None:
        """Close the connection while the answer is still coming."""
        self.socket.shutdown(socket.SHUT_RDWR)
