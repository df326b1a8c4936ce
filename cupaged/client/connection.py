"""Where the server is, how the channel to it is made, and what every call carries along.

Owns addresses, TLS, the token and the options of the channel. It makes no channel: the synchronous
and the asynchronous client make their own from what `Connection` holds.
"""

from __future__ import annotations

import ipaddress
import os
import re
import uuid
from pathlib import Path
from typing import Any, TypedDict

import grpc

from cupaged.errors import ConfigError, InvalidParameterError

DEFAULT_ADDRESS = "127.0.0.1:50051"
DEFAULT_PORT = 50051
DEFAULT_MAX_MESSAGE_BYTES = 64 * 2**20
API_KEY_VARIABLE = "CUPAGED_API_KEY"
MOST_ID_CHARACTERS = 256

PathLike = str | os.PathLike[str]

_ADDRESS = "host:port, grpc://host:port, grpcs://host:port, unix:/path or a target of gRPC"
_GRPC_SCHEMES = ("dns:", "ipv4:", "ipv6:", "unix-abstract:", "vsock:", "xds:")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}(-[0-9a-f]+){3}(-.*)?")


class ConnectionOptions(TypedDict, total=False):
    """TLS, token and options of the channel; see `Connection`."""

    ca_file: PathLike | None
    cert_file: PathLike | None
    key_file: PathLike | None
    token_file: PathLike | None
    insecure: bool
    keepalive_s: float | None
    max_message_bytes: int


class Connection:
    """How one server is reached; checked here, before anything is sent.

    Args:
        address: `host:port` (the port may be left out: 50051), `grpc://host:port`, `grpcs://...`
            for TLS with the certificate authorities of gRPC, `unix:/path/of/the.sock`, or a target
            that gRPC understands, such as `dns:///name:port`.
        ca_file: PEM with the authorities to trust; turns TLS on.
        cert_file, key_file: PEM of this client, for mutual TLS; turn TLS on, and go together.
        token_file: holds the bearer token; read again at every call, so that it can be replaced.
            Without it the token is that in CUPAGED_API_KEY, if any. There is no parameter for the
            token itself, so that none ends up in a command line or a traceback.
        insecure: send the token over plain text to another machine.
        keepalive_s: seconds between the pings of a call that is silent, None for no pings.
        max_message_bytes: largest answer that is taken.

    Raises:
        ConfigError: one of these is out of range, or a file of them is not what it must be.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        ca_file: PathLike | None = None,
        cert_file: PathLike | None = None,
        key_file: PathLike | None = None,
        token_file: PathLike | None = None,
        insecure: bool = False,
        keepalive_s: float | None = 30.0,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    ) -> None:
        self.target, wants_tls = _target(address)
        is_local = _is_local(self.target)
        if (cert_file is None) != (key_file is None):
            raise ConfigError("key_file", key_file, "given together with cert_file, or neither")
        self.uses_tls = wants_tls or ca_file is not None or cert_file is not None
        self._ca = _read(ca_file, "ca_file")
        self._cert, self._key = _read(cert_file, "cert_file"), _read(key_file, "key_file")
        _check_pem(ca_file, cert_file, key_file)
        self._token_file = token_file
        self._token = os.environ.get(API_KEY_VARIABLE) if token_file is None else None
        if self._bearer() and not (self.uses_tls or is_local or insecure):
            raise ConfigError(
                "insecure", insecure, f"True to send the token unencrypted to {self.target}"
            )
        if keepalive_s is not None and not 1 <= keepalive_s <= 86400:
            raise ConfigError("keepalive_s", keepalive_s, "None or in [1, 86400]")
        if not 1 <= max_message_bytes < 2**31:
            raise ConfigError("max_message_bytes", max_message_bytes, "in [1, 2147483647]")
        self.options: list[tuple[str, Any]] = [
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.enable_retries", 0),  # they are made here
            ("grpc.primary_user_agent", "cupaged-client"),
            # Between two attempts to connect every call fails at once, with what the last one
            # found; gRPC's own 1 s to 120 s would outlast the retries.
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 5_000),
        ]
        if is_local:
            self.options.append(("grpc.enable_http_proxy", 0))
        if keepalive_s is not None:
            self.options += [
                ("grpc.keepalive_time_ms", int(1000 * keepalive_s)),
                ("grpc.keepalive_timeout_ms", 10_000),
                ("grpc.http2.max_pings_without_data", 0),
            ]

    def credentials(self) -> grpc.ChannelCredentials | None:
        """Of the channel; None for plain text."""
        if not self.uses_tls:
            return None
        return grpc.ssl_channel_credentials(self._ca, self._key, self._cert)

    def metadata(
        self, request_id: str = "", traceparent: str | None = None
    ) -> tuple[tuple[str, str], ...]:
        """What a call carries: token, request id, trace context.

        Raises:
            ConfigError: the file of the token cannot be read, or holds none.
        """
        pairs = []
        if token := self._bearer():
            pairs.append(("authorization", f"Bearer {token}"))
        if request_id:
            pairs.append(("x-request-id", request_id))
        if traceparent is not None:
            if _TRACEPARENT.fullmatch(traceparent) is None:
                raise InvalidParameterError(
                    "traceparent", traceparent, "as W3C has it: version-trace-parent-flags"
                )
            pairs.append(("traceparent", traceparent))
        return tuple(pairs)

    def _bearer(self) -> str | None:
        if self._token_file is None:
            name, token = API_KEY_VARIABLE, self._token
        else:
            name = "token_file"
            token = (_read(self._token_file, name) or b"").decode("utf-8", "replace")
        if name == API_KEY_VARIABLE and not token:
            return None
        token = (token or "").strip()
        if not token or not token.isascii() or not token.isprintable() or " " in token:
            # The value is not shown: it is a secret.
            raise ConfigError(
                name, "<hidden>", "one line of printable ASCII without spaces: the token"
            )
        return token


def checked_request_id(request_id: str | None) -> str:
    """The id of a call: the given one, or a new one.

    Raises:
        InvalidParameterError: metadata cannot carry it.
    """
    if request_id is None:
        return uuid.uuid4().hex
    if (
        not isinstance(request_id, str)
        or not 0 < len(request_id) <= MOST_ID_CHARACTERS
        or not (request_id.isascii() and request_id.isprintable())
        or request_id != request_id.strip()
    ):
        raise InvalidParameterError(
            "request_id", request_id, f"1 to {MOST_ID_CHARACTERS} printable ASCII characters"
        )
    return request_id


def _target(address: str) -> tuple[str, bool]:
    """A target of gRPC, and whether the address asks for TLS."""
    if not isinstance(address, str) or not address.strip() or address != address.strip():
        raise ConfigError("address", address, _ADDRESS)
    if address.startswith(_GRPC_SCHEMES):
        return address, False
    if address.startswith("unix:"):
        if not address.removeprefix("unix:").strip("/"):
            raise ConfigError("address", address, _ADDRESS)
        return address, False
    scheme, separator, rest = address.rpartition("://")
    if separator and scheme not in ("grpc", "grpcs"):
        raise ConfigError("address", address, _ADDRESS)
    return _with_port(rest.rstrip("/") if separator else address, address), scheme == "grpcs"


def _with_port(place: str, address: str) -> str:
    """`host:port`, with the default port where there is none."""
    match = re.fullmatch(r"(\[[0-9a-fA-F:.%\w]+\]|[^\s:/\[\]]+)(?::(\d{1,5}))?", place)
    if match is None or not 0 < int(match[2] or DEFAULT_PORT) < 65536:
        raise ConfigError("address", address, _ADDRESS)
    return f"{match[1]}:{match[2] or DEFAULT_PORT}"


def _is_local(target: str) -> bool:
    """Whether a target is on this machine for sure."""
    if target.startswith(("unix:", "unix-abstract:")):
        return True
    host = target.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _read(path: PathLike | None, name: str) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(
            name, os.fspath(path), f"a file that can be read ({error.strerror})"
        ) from None


def _check_pem(
    ca_file: PathLike | None,
    cert_file: PathLike | None,
    key_file: PathLike | None,
) -> None:
    """Refuse by name what gRPC would only report as a failed connection."""
    if ca_file is None and cert_file is None:
        return
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if ca_file is not None:
        try:
            context.load_verify_locations(ca_file)
        except (ssl.SSLError, OSError):
            allowed = "a PEM file with at least one certificate"
            raise ConfigError("ca_file", os.fspath(ca_file), allowed) from None
    if cert_file is not None:
        try:
            # An encrypted key would make OpenSSL ask for its password at the terminal.
            context.load_cert_chain(cert_file, key_file, password="")
        except (ssl.SSLError, OSError, ValueError) as error:
            why = getattr(error, "reason", None) or "the key cannot be read"
            raise ConfigError(
                "cert_file",
                os.fspath(cert_file),
                f"a PEM certificate with its unencrypted key in key_file ({why})",
            ) from None
