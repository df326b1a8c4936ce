"""What `cupaged serve` can be told: `ServeSettings`, checked once, then never changed.

It crosses to the children as plain values. The options of the engine are kept as they were given;
`EngineArgs` checks them in the engine's process, so that nothing here needs NumPy. Where values
come from is `settings_sources`.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cupaged.errors import ConfigError

DEFAULT_MODEL_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
API_KEY_VARIABLE = "CUPAGED_API_KEY"
QUEUE_DEFAULTS: Mapping[str, int] = MappingProxyType(
    {"max_num_queued_reqs": 256, "max_num_queued_tokens": 1_000_000}
)
MAX_FRONTENDS = 64
SERVICES = ("v1", "kserve", "vllm")  # cupaged.v1, and those of other servers (`server/compat`)
_MAX_PORT = 65535
_MAX_SOCKET_PATH_BYTES = 107  # of a unix socket's address
MAX_SECONDS = 10**6
_NAMES = ("served_model_name", "services")  # settings of several names
_CHOICES = {
    "log_format": ("text", "json"),
    "log_level": ("debug", "info", "warning", "error"),
    "runner": ("model", "null"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """Everything the supervisor and its children go by.

    Args:
        model: a folder, a .gguf file or a name on the hub; None for the default model.
        served_model_name: names that requests may use; by default what `model` is called.
        services: what is served, by the names in SERVICES; all by default.
        chat_template: a file, the name of one of the model's templates, or Jinja source.
        host, port: where gRPC listens; port 0 takes any free one.
        uds: path of a unix socket to listen on instead; one front end only.
        insecure: listen on a public address although not everybody there is known.
        frontends: processes that speak gRPC, in [1, 64].
        metrics_host, metrics_port: plain HTTP; by default the same host; port 0 takes any free
            one, None or -1 turns it off.
        admin_port: of AdminService; None leaves it out. It listens on `host`, too.
        ssl_certfile, ssl_keyfile: PEM files, both or none. ssl_ca_certs: clients have to show a
            certificate of one of these.
        api_key_file: a bearer token a line; calls have to bring one of them.
        has_api_key: a token is in the environment.
        openai, openai_port: start the SMG gateway, which makes an OpenAI API of the service "vllm";
            port 0 takes any free one.
        restart_engine: start the engine again when it dies.
        drain_delay, drain_timeout: seconds of answering DRAINING before the port is closed, and
            seconds that calls may still take then.
        max_message_bytes: the largest message of a client, and to one.
        stream_buffer_tokens: most tokens of a stream that may wait for its reader.
        keepalive_time, keepalive_timeout, min_ping_interval, max_connection_age: seconds, see
            `GrpcOptions`.
        debug_errors: INTERNAL errors carry a stack.
        log_format, log_level: text or json; debug, info, warning or error.
        log_prompts: prompts may stand in the log.
        disable_log_stats: no line of numbers every ten seconds.
        otlp_endpoint: where traces are sent; None for none.
        metrics_compat: "vllm" shows the metrics under vLLM's names, too.
        runner: "null" computes nothing, for measurements; null_steps_per_s paces it.
        engine: options of `EngineArgs` that were given.

    Raises:
        ConfigError: a value is out of range, or does not go with another one.
    """

    model: str | None = None
    served_model_name: tuple[str, ...] = ()
    services: tuple[str, ...] = SERVICES
    chat_template: str | None = None
    host: str = "127.0.0.1"
    port: int = 50051
    uds: str | None = None
    insecure: bool = False
    frontends: int = 1
    metrics_host: str = ""
    metrics_port: int | None = 9090
    admin_port: int | None = None
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_ca_certs: str | None = None
    api_key_file: str | None = None
    has_api_key: bool = False
    openai: bool = False
    openai_port: int = 8000
    restart_engine: bool = False
    drain_delay: float = 0.0
    drain_timeout: float = 30.0
    max_message_bytes: int = 64 * 2**20
    stream_buffer_tokens: int = 16384
    keepalive_time: float = 60.0
    keepalive_timeout: float = 20.0
    min_ping_interval: float = 10.0
    max_connection_age: float | None = None
    debug_errors: bool = False
    log_format: str = "text"
    log_level: str = "info"
    log_prompts: bool = False
    disable_log_stats: bool = False
    otlp_endpoint: str | None = None
    metrics_compat: str | None = None
    runner: str = "model"
    null_steps_per_s: float | None = None
    engine: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not self.metrics_host:
            object.__setattr__(self, "metrics_host", self.host)
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                listed = " or ".join(map(repr, allowed))
                raise ConfigError(name, getattr(self, name), listed)
        if self.metrics_compat not in (None, "vllm"):
            raise ConfigError("metrics_compat", self.metrics_compat, "'vllm'")
        _check_integer("port", self.port, 0, _MAX_PORT)
        _check_integer("openai_port", self.openai_port, 0, _MAX_PORT)
        _check_integer("frontends", self.frontends, 1, MAX_FRONTENDS)
        if self.metrics_port is not None:
            _check_integer("metrics_port", self.metrics_port, -1, _MAX_PORT)
        if self.admin_port is not None:
            _check_integer("admin_port", self.admin_port, 0, _MAX_PORT)
        _check_integer("max_message_bytes", self.max_message_bytes, 1024, 2**31 - 1)
        _check_integer("stream_buffer_tokens", self.stream_buffer_tokens, 1, 2**31 - 1)
        for name in ("drain_delay", "drain_timeout"):
            _check_seconds(name, getattr(self, name), low=0)
        for name in ("keepalive_time", "keepalive_timeout", "min_ping_interval"):
            _check_seconds(name, getattr(self, name), low=0.001)
        if self.max_connection_age is not None:
            _check_seconds("max_connection_age", self.max_connection_age, low=1)
        if not all(self.served_model_name):
            raise ConfigError("served_model_name", list(self.served_model_name), "not empty")
        wanted = set(self.services)
        if not wanted or wanted - set(SERVICES) or len(wanted) < len(self.services):
            listed = f"one or more of {', '.join(SERVICES)}, each once"
            raise ConfigError("services", ", ".join(self.services), listed)
        self._check_ports()
        self._check_socket()
        self._check_runner()
        self._check_security()
        self._check_gateway()

    @property
    def model_names(self) -> tuple[str, ...]:
        """Under which the model is served; the first one is what answers carry."""
        if self.served_model_name:
            return self.served_model_name
        if self.model is None:
            return (DEFAULT_MODEL_NAME,)
        path = os.path.expanduser(self.model)
        if os.path.exists(path):  # where it lies is nobody's business
            return (Path(path).resolve().name.removesuffix(".gguf"),)
        return (self.model,)

    @property
    def has_metrics(self) -> bool:
        """True when there is an HTTP port."""
        return self.metrics_port not in (None, -1)

    @property
    def has_tls(self) -> bool:
        """True when connections are encrypted."""
        return self.ssl_certfile is not None

    def to_wire(self) -> dict[str, Any]:
        """As plain values; there are no secrets among them."""
        form = {f.name: getattr(self, f.name) for f in fields(self)}
        names = {name: [*form[name]] for name in _NAMES}
        return form | names | {"engine": {**self.engine}}

    @classmethod
    def from_wire(cls, form: Mapping[str, Any]) -> ServeSettings:
        """Back from plain values."""
        return cls(**{**form, **{name: tuple(form[name]) for name in _NAMES}})

    def _check_ports(self) -> None:
        """Ports that are named have to differ."""
        seen: dict[int, str] = {}
        for name in ("port", "admin_port", "metrics_port", "openai_port"):
            number = getattr(self, name)
            if number in (None, 0, -1) or (name == "port" and self.uds is not None):
                continue
            if name == "openai_port" and not self.openai:
                continue
            if number in seen:
                raise ConfigError(name, number, f"different from {seen[number]}")
            seen[number] = name

    def _check_socket(self) -> None:
        if self.uds is None:
            return
        if not self.uds or len(os.fsencode(self.uds)) > _MAX_SOCKET_PATH_BYTES:
            allowed = f"a path of at most {_MAX_SOCKET_PATH_BYTES} bytes"
            raise ConfigError("uds", self.uds, allowed)
        if self.frontends > 1:
            allowed = "1 with uds: processes cannot share a unix socket"
            raise ConfigError("frontends", self.frontends, allowed)

    def _check_runner(self) -> None:
        rate = self.null_steps_per_s
        if rate is None:
            return
        if self.runner != "null":
            raise ConfigError("null_steps_per_s", rate, "given with runner='null' only")
        if not 0 < rate <= 10**6:
            raise ConfigError("null_steps_per_s", rate, "a number in (0, 1000000]")

    def _check_gateway(self) -> None:
        """The gateway calls by plain TCP and brings no token."""
        if not self.openai:
            return
        needs = {
            "services": "vllm" in self.services,
            "uds": self.uds is None,
            "ssl_certfile": not self.has_tls,
            "api_key_file": self.api_key_file is None,
            API_KEY_VARIABLE: not self.has_api_key,
        }
        wrong = next((name for name, is_met in needs.items() if not is_met), None)
        if wrong == "services":
            raise ConfigError("services", ", ".join(self.services), "with 'vllm' for openai")
        if wrong is not None:
            raise ConfigError("openai", True, f"left out where {wrong} is given")

    def _check_security(self) -> None:
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            given = "ssl_keyfile" if self.ssl_certfile is None else "ssl_certfile"
            missing = "ssl_certfile" if self.ssl_certfile is None else "ssl_keyfile"
            raise ConfigError(missing, None, f"a file, since {given} is given")
        if self.ssl_ca_certs is not None and not self.has_tls:
            allowed = "given with ssl_certfile and ssl_keyfile only"
            raise ConfigError("ssl_ca_certs", self.ssl_ca_certs, allowed)
        for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "api_key_file"):
            path = getattr(self, name)
            if path is not None and not os.access(path, os.R_OK):
                raise ConfigError(name, path, "a file that can be read")
        knows_clients = self.ssl_ca_certs or self.api_key_file or self.has_api_key
        listens_on_host = self.uds is None or self.admin_port is not None
        if (
            listens_on_host
            and not self.insecure
            and not is_loopback(self.host)
            and not (self.has_tls and knows_clients)
        ):
            raise ConfigError(
                "host",
                self.host,
                "a loopback address such as 127.0.0.1, unless ssl_certfile and ssl_keyfile are "
                f"given with api_key_file, {API_KEY_VARIABLE} or ssl_ca_certs, or insecure is set",
            )


def is_loopback(host: str) -> bool:
    """True when only this machine reaches the address."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _check_integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(name, value, f"an integer in [{low}, {high}]")


def _check_seconds(name: str, value: float, *, low: float) -> None:
    if not low <= value <= MAX_SECONDS:
        raise ConfigError(name, value, f"seconds in [{low:g}, {MAX_SECONDS}]")
