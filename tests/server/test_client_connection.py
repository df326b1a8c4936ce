"""Addresses, TLS, tokens and what calls carry along."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from cupaged.client import Client, errors
from cupaged.client.connection import Connection, checked_request_id
from cupaged.errors import ConfigError, InvalidParameterError
from tests.server.client_tools import CLIENTS
from tests.server.fake_service import FakeServer


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUPAGED_API_KEY", raising=False)


@pytest.mark.parametrize(
    ("address", "target"),
    [
        ("localhost", "localhost:50051"),
        ("localhost:7", "localhost:7"),
        ("10.0.0.1", "10.0.0.1:50051"),
        ("[::1]", "[::1]:50051"),
        ("[fe80::1%eth0]:80", "[fe80::1%eth0]:80"),
        ("grpc://127.0.0.1:50051", "127.0.0.1:50051"),
        ("grpc://name.example/", "name.example:50051"),
        ("grpcs://name.example:443", "name.example:443"),
        ("unix:/run/cupaged.sock", "unix:/run/cupaged.sock"),
        ("unix:///run/cupaged.sock", "unix:///run/cupaged.sock"),
        ("dns:///name.example:50051", "dns:///name.example:50051"),
    ],
)
def test_addresses(address: str, target: str) -> None:
    connection = Connection(address)
    assert connection.target == target
    assert connection.uses_tls is address.startswith("grpcs://")


@pytest.mark.parametrize(
    "address",
    ["", " ", "a b", "http://x:1", "https://x", "x:0", "x:65536", "x:y", ":50051", "unix:", "a:1/b",
     "::1", "grpc://", 5, None],
)  # fmt: skip
def test_what_is_no_address(address: Any) -> None:
    with pytest.raises(ConfigError, match=r"^address must be host:port, "):
        Connection(address)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keepalive_s": 0}, "keepalive_s must be None or in"),
        ({"keepalive_s": 1e9}, "keepalive_s must be None or in"),
        ({"max_message_bytes": 0}, "max_message_bytes must be in"),
        ({"cert_file": "a"}, "key_file must be given together with cert_file"),
        ({"key_file": "a"}, "key_file must be given together with cert_file"),
        ({"ca_file": "/no/such"}, r"ca_file must be a file that can be read \(No such file"),
        ({"token_file": "/no/such"}, r"token_file must be a file that can be read \(No such"),
    ],
)
def test_options_out_of_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Connection("localhost", **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"retries": -1}, "retries must be in"),
        ({"retries": True}, "retries must be an integer"),
        ({"retries": 1.0}, "retries must be an integer"),
    ],
)
def test_retries_out_of_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Client("localhost", **settings)


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), float("inf"), "1", True])
def test_timeouts_out_of_range(timeout: Any) -> None:
    with pytest.raises(InvalidParameterError, match="timeout must be None, or a number"):
        Client("localhost", timeout=timeout)


def test_a_token_comes_from_the_environment_or_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert Connection("localhost").metadata() == ()
    monkeypatch.setenv("CUPAGED_API_KEY", "from-environment\n")
    assert Connection("localhost").metadata() == (("authorization", "Bearer from-environment"),)
    file = tmp_path / "token"
    file.write_text("from-file\n")
    connection = Connection("localhost", token_file=file)
    assert connection.metadata() == (("authorization", "Bearer from-file"),)
    file.write_text("replaced")
    assert connection.metadata() == (("authorization", "Bearer replaced"),)
    file.unlink()
    with pytest.raises(ConfigError, match="token_file must be a file that can be read"):
        connection.metadata()


@pytest.mark.parametrize("text", ["", "\n", "two words", "t\xf6ken", "a\nb"])
def test_what_is_no_token_is_refused_and_not_shown(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="token_file must be one line of") as raised:
        Connection("localhost", token_file=file)
    assert "hidden" in str(raised.value)
    if text.strip():
        assert text not in str(raised.value)
        monkeypatch.setenv("CUPAGED_API_KEY", text)
        with pytest.raises(ConfigError, match="CUPAGED_API_KEY must be one line of"):
            Connection("localhost")


@pytest.mark.parametrize(
    ("address", "is_safe"),
    [
        ("localhost", True), ("127.8.9.1:5", True), ("[::1]:5", True), ("unix:/x", True),
        ("grpcs://far.example", True), ("10.0.0.1", False), ("far.example", False),
        ("dns:///localhost:1", False), ("localhost.far.example:1", False),
    ],
)  # fmt: skip
def test_a_token_does_not_travel_unencrypted(
    address: str, is_safe: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    Connection(address)
    monkeypatch.setenv("CUPAGED_API_KEY", "secret")
    if is_safe:
        Connection(address)
    else:
        with pytest.raises(ConfigError, match="insecure must be True to send the token unenc"):
            Connection(address)
        assert Connection(address, insecure=True).metadata()


def test_request_ids() -> None:
    assert checked_request_id("my-id 7") == "my-id 7"
    made = {checked_request_id(None) for _ in range(10)}
    assert len(made) == 10
    for wrong in ("", "x" * 257, "a\nb", "ü", " a", 5):
        with pytest.raises(InvalidParameterError, match="request_id must be 1 to 256"):
            checked_request_id(wrong)  # type: ignore[arg-type]


def test_what_a_call_carries() -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    pairs = Connection("localhost").metadata("id-1", trace)
    assert pairs == (("x-request-id", "id-1"), ("traceparent", trace))
    with pytest.raises(InvalidParameterError, match="traceparent must be as W3C has it"):
        Connection("localhost").metadata("id-1", "abc")


@pytest.mark.parametrize("make", CLIENTS.values(), ids=CLIENTS)
def test_a_unix_socket(make: Any, tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s"
    with FakeServer(address=address), make(address) as client:
        assert client.generate("a b").text == "a b"


CERTS = Path(__file__).parent / "certs"  # the server's is for localhost and 127.0.0.1
ROOT, STRANGER = CERTS / "root.pem", CERTS / "stranger.pem"
PAIR = ((CERTS / "server.key").read_bytes(), (CERTS / "server.pem").read_bytes())


@pytest.fixture(scope="module")
def tls_server() -> Iterator[FakeServer]:
    with FakeServer(grpc.ssl_server_credentials([PAIR])) as server:
        yield server


@pytest.fixture(scope="module")
def mutual_server() -> Iterator[FakeServer]:
    credentials = grpc.ssl_server_credentials([PAIR], ROOT.read_bytes(), True)
    with FakeServer(credentials) as server:
        yield server


@pytest.mark.parametrize("make", CLIENTS.values(), ids=CLIENTS)
def test_tls(make: Any, tls_server: FakeServer, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    with make(tls_server.address, ca_file=ROOT, token_file=token) as client:
        assert client.generate("a b").text == "a b"
    assert tls_server.seen[-1].metadata["authorization"] == "Bearer secret"


@pytest.mark.parametrize("make", CLIENTS.values(), ids=CLIENTS)
def test_mutual_tls(make: Any, mutual_server: FakeServer) -> None:
    keys = {"cert_file": CERTS / "client.pem", "key_file": CERTS / "client.key"}
    with make(mutual_server.address, ca_file=ROOT, **keys) as client:
        assert client.health() == "SERVING"
    with (
        make(mutual_server.address, ca_file=ROOT, retries=0) as client,
        pytest.raises(errors.UnavailableError),
    ):
        client.generate("a")


@pytest.mark.parametrize("make", CLIENTS.values(), ids=CLIENTS)
def test_a_failed_handshake_is_told_and_not_tried_again(make: Any, tls_server: FakeServer) -> None:
    with (
        make(tls_server.address, ca_file=STRANGER) as client,
        pytest.raises(errors.HandshakeError, match="CERTIFICATE_VERIFY_FAILED"),
    ):
        client.generate("a")
    with (
        make(tls_server.address, retries=0) as client,
        pytest.raises(errors.UnreachableError) as raised,
    ):
        client.generate("a")
    assert "does it use TLS" in raised.value.advice


@pytest.mark.parametrize("make", CLIENTS.values(), ids=CLIENTS)
def test_a_certificate_for_another_host(make: Any) -> None:
    with FakeServer(grpc.ssl_server_credentials([PAIR]), "127.0.0.2:0") as server:
        address = f"127.0.0.2:{server.port}"
        with (
            make(address, ca_file=ROOT) as client,
            pytest.raises(errors.HandshakeError, match="Hostname Verification"),
        ):
            client.generate("a")


@pytest.mark.parametrize(
    ("cert", "key"),
    [("client.pem", "server.key"), ("client.pem", "encrypted.key"), ("client.key", "client.key"),
     ("client.pem", "make_certs.sh")],
)  # fmt: skip
def test_files_that_are_no_certificate_with_its_key(cert: str, key: str) -> None:
    with pytest.raises(ConfigError, match="cert_file must be a PEM certificate with its unenc"):
        Connection("localhost", cert_file=CERTS / cert, key_file=CERTS / key)


def test_a_file_without_authorities() -> None:
    with pytest.raises(ConfigError, match="ca_file must be a PEM file with at least one cert"):
        Connection("localhost", ca_file=CERTS / "server.key")
