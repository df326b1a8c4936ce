"""TLS: who is trusted by whom, certificates that are renewed, files that are refused."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from cupaged.errors import ConfigError
from cupaged.server.front_end import FrontEndOptions
from cupaged.server.tls import TlsFiles, server_credentials
from cupaged.v1 import generation_pb2 as pb
from cupaged.v1 import generation_pb2_grpc
from tests.server.asking import Started, failure, request, stream_request, tokens
from tests.server.local_server import SECONDS, LocalServer, wait_until

CERTS = Path(__file__).parent / "certs"
Code = grpc.StatusCode


def pem(name: str) -> bytes:
    return (CERTS / name).read_bytes()


def generate(
    server: LocalServer, credentials: grpc.ChannelCredentials | None
) -> pb.GenerateResponse:
    """Over a connection of its own; without credentials it speaks no TLS."""
    target = server.address
    channel = (
        grpc.insecure_channel(target, options=[("grpc.use_local_subchannel_pool", 1)])
        if credentials is None
        else grpc.secure_channel(
            target, credentials, options=[("grpc.use_local_subchannel_pool", 1)]
        )
    )
    with channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        answer: pb.GenerateResponse = stub.Generate(request(), timeout=SECONDS)
        return answer


TRUSTING = grpc.ssl_channel_credentials(pem("root.pem"))


@pytest.fixture(scope="module")
def private(tiny_model: str) -> Iterator[LocalServer]:
    tls = TlsFiles(CERTS / "server.pem", CERTS / "server.key")
    with LocalServer(tiny_model, FrontEndOptions(tls=tls)) as running:
        yield running


@pytest.fixture(scope="module")
def mutual(tiny_model: str) -> Iterator[LocalServer]:
    tls = TlsFiles(CERTS / "server.pem", CERTS / "server.key", CERTS / "root.pem")
    with LocalServer(tiny_model, FrontEndOptions(tls=tls)) as running:
        yield running


def test_a_client_that_trusts_the_server(private: LocalServer) -> None:
    assert generate(private, TRUSTING).samples[0].completion_tokens == 6


@pytest.mark.parametrize(
    "credentials", [None, grpc.ssl_channel_credentials(pem("stranger.pem"))], ids=["plain", "other"]
)
def test_clients_without_trust(
    private: LocalServer, credentials: grpc.ChannelCredentials | None
) -> None:
    status = failure(lambda: generate(private, credentials))
    assert status.code is Code.UNAVAILABLE
    assert generate(private, TRUSTING).samples


def test_clients_have_to_show_a_certificate(mutual: LocalServer) -> None:
    known = grpc.ssl_channel_credentials(pem("root.pem"), pem("client.key"), pem("client.pem"))
    assert generate(mutual, known).samples[0].completion_tokens == 6
    intruder = grpc.ssl_channel_credentials(
        pem("root.pem"), pem("intruder.key"), pem("intruder.pem")
    )
    expired = grpc.ssl_channel_credentials(pem("root.pem"), pem("expired.key"), pem("expired.pem"))
    for credentials in (TRUSTING, intruder, expired, None):
        status = failure(lambda: generate(mutual, credentials))  # noqa: B023 - called at once
        assert status.code is Code.UNAVAILABLE
    assert generate(mutual, known).samples


def served_name(server: LocalServer) -> str:
    """The common name of the certificate that a new connection is shown."""
    host, port = server.address.split(":")
    context = ssl.create_default_context(cafile=str(CERTS / "root.pem"))
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection((host, int(port)), SECONDS) as plain,
        context.wrap_socket(plain, server_hostname=host) as secure,
    ):
        certificate: Any = secure.getpeercert()
    return str({name: value for ((name, value),) in certificate["subject"]}["commonName"])


def test_renewed_certificates_are_used_without_a_restart(
    tiny_model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("server.pem", "server.key"):
        shutil.copy(CERTS / name, tmp_path / name)

    def replace(source: str, name: str) -> None:
        shutil.copy(CERTS / source, tmp_path / "fresh")
        os.replace(tmp_path / "fresh", tmp_path / name)

    tls = TlsFiles(tmp_path / "server.pem", tmp_path / "server.key")
    with LocalServer(tiny_model, FrontEndOptions(tls=tls)) as server:
        assert served_name(server) == "server 1"
        with grpc.secure_channel(server.address, TRUSTING) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            stream = stub.GenerateStream(stream_request(stopping=tokens(900)), timeout=SECONDS)
            next(stream)
            replace("renewed.pem", "server.pem")  # and the key is still the old one
            wait_until(lambda: served_name(server) == "server 1" and "stay as" in caplog.text)
            replace("renewed.key", "server.key")
            wait_until(lambda: served_name(server) == "server 2")
            assert sum(len(e.delta.token_ids) for e in stream) == 900  # no stream is cut
        assert generate(server, TRUSTING).samples


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (("none.pem", "server.key", None), "ssl_certfile must be a file that can be read"),
        (("server.pem", "none.key", None), "ssl_keyfile must be a file that can be read"),
        (("server.pem", "server.key", "none.pem"), "ssl_ca_certs must be a file that can be read"),
        (("server.key", "server.key", None), "ssl_certfile must be a file with a PEM certificate"),
        (("server.pem", "client.key", None), "ssl_keyfile must be the private key, in PEM, of"),
        (("server.pem", "server.pem", None), "ssl_keyfile must be the private key, in PEM, of"),
        (("server.pem", "encrypted.key", None), "ssl_keyfile must be the private key, in PEM, of"),
        (("server.pem", "server.key", "server.key"), "ssl_ca_certs must be a file with PEM"),
    ],
)
def test_files_that_are_refused(files: tuple[str, str, str | None], message: str) -> None:
    certfile, keyfile, ca_certs = (None if name is None else CERTS / name for name in files)
    assert certfile is not None and keyfile is not None
    with pytest.raises(ConfigError) as caught:
        server_credentials(TlsFiles(certfile, keyfile, ca_certs))
    assert str(caught.value).startswith(message)


def test_a_broken_certificate_is_refused(tmp_path: Path) -> None:
    broken = tmp_path / "broken.pem"
    broken.write_bytes(pem("server.pem").replace(b"M", b"!", 3))
    with pytest.raises(ConfigError, match="in PEM"):
        server_credentials(TlsFiles(broken, CERTS / "server.key"))


def test_streams_over_tls(private: LocalServer) -> None:
    with grpc.secure_channel(private.address, TRUSTING) as channel:
        private.generation = generation_pb2_grpc.GenerationServiceStub(channel)
        with Started(private):
            pass
        private.wait_idle()
