"""TLS of the server: certificates from files, checked at the start, read again when they change.

Renewed files count from the next connection on. Files that do not fit together, as in the middle of
a renewal, change nothing and are logged.
"""

from __future__ import annotations

import logging
import os
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from cupaged.errors import ConfigError

_CHECK_SECONDS = 1.0
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Where certificates lie.

    Args:
        certfile: the server's certificate and those between it and its root, PEM.
        keyfile: its private key, PEM, without a password.
        ca_certs: roots of the clients' certificates; with them, a client has to show one.
    """

    certfile: str | Path
    keyfile: str | Path
    ca_certs: str | Path | None = None

    def stamps(self) -> list[tuple[int, int, int] | None]:
        """What changes when a file does."""
        return [_stamp(path) for path in (self.certfile, self.keyfile, self.ca_certs) if path]

    def read(self) -> grpc.ServerCertificateConfiguration:
        """The content, after it has been checked.

        Raises:
            ConfigError: a file cannot be read, is no PEM, or they do not fit together.
        """
        chain = _bytes("ssl_certfile", self.certfile)
        key = _bytes("ssl_keyfile", self.keyfile)
        roots = None if self.ca_certs is None else _bytes("ssl_ca_certs", self.ca_certs)
        self._check(chain)
        return grpc.ssl_server_certificate_configuration([(key, chain)], roots)

    def _check(self, chain: bytes) -> None:
        if b"-----BEGIN CERTIFICATE-----" not in chain:
            raise ConfigError("ssl_certfile", str(self.certfile), "a file with a PEM certificate")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.certfile, self.keyfile, password=_no_password)
        except (ssl.SSLError, OSError) as error:
            reason = error.reason if isinstance(error, ssl.SSLError) else error.strerror
            allowed = f"the private key, in PEM, of {self.certfile} ({reason})"
            raise ConfigError("ssl_keyfile", str(self.keyfile), allowed) from None
        if self.ca_certs is None:
            return
        try:
            context.load_verify_locations(self.ca_certs)
        except (ssl.SSLError, OSError):
            allowed = "a file with PEM certificates"
            raise ConfigError("ssl_ca_certs", str(self.ca_certs), allowed) from None


class _Reloading:
    """Called by gRPC, on a thread of its own, for each new connection."""

    def __init__(
        self,
        files: TlsFiles,
        stamps: list[tuple[int, int, int] | None],
        clock: Callable[[], float],
    ) -> None:
        self._files = files
        self._stamps = stamps  # of the content in use
        self._clock = clock
        self._next_look = clock() + _CHECK_SECONDS

    def __call__(self) -> grpc.ServerCertificateConfiguration | None:
        """New certificates, or None to go on with those there are."""
        now = self._clock()
        if now < self._next_look:
            return None
        self._next_look = now + _CHECK_SECONDS
        stamps = self._files.stamps()
        if stamps == self._stamps:
            return None
        self._stamps = stamps
        try:
            configuration = self._files.read()
        except ConfigError as error:
            _logger.error("the certificates stay as they are: %s", error)
            return None
        _logger.info("the certificates were read again")
        return configuration


def server_credentials(
    files: TlsFiles, *, clock: Callable[[], float] = time.monotonic
) -> grpc.ServerCredentials:
    """Credentials that follow the files.

    Args:
        clock: seconds, monotonic; the files are looked at once a second at most.

    Raises:
        ConfigError: the files cannot be used.
    """
    stamps = files.stamps()
    first = files.read()
    fetch: Any = _Reloading(files, stamps, clock)  # None is allowed, whatever the stubs say
    return grpc.dynamic_ssl_server_credentials(
        first, fetch, require_client_authentication=files.ca_certs is not None
    )


def _bytes(name: str, path: str | Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        allowed = f"a file that can be read ({error.strerror})"
        raise ConfigError(name, str(path), allowed) from None


def _stamp(path: str | Path) -> tuple[int, int, int] | None:
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


def _no_password() -> str:
    """Instead of asking at the terminal: an encrypted key is refused."""
    return ""
