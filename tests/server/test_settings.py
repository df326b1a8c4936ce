"""Settings: what is taken from where, and what is refused by name."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cupaged.engine_args import EngineArgs
from cupaged.errors import ConfigError, NotSupportedError
from cupaged.loading.model_files import DEFAULT_MODEL_REPO
from cupaged.server.settings import DEFAULT_MODEL_NAME, SERVICES, ServeSettings, is_loopback
from cupaged.server.settings_sources import ENGINE_KEYS, load_settings, setting_keys
from cupaged.server.wire import FrameReader, encode_frame


def load(
    flags: dict[str, Any] | None = None, environment: dict[str, str] | None = None
) -> ServeSettings:
    return load_settings(flags or {}, environment or {})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "serve.toml"


def from_file(file: Path, content: str) -> ServeSettings:
    file.write_text(content)
    return load({"config": str(file)})


def test_defaults() -> None:
    settings = load()
    assert (settings.host, settings.port, settings.metrics_port) == ("127.0.0.1", 50051, 9090)
    assert settings.metrics_host == "127.0.0.1"
    assert settings.engine == {"max_num_queued_reqs": 256, "max_num_queued_tokens": 1_000_000}
    assert settings.max_message_bytes == 64 * 2**20
    assert not settings.insecure and not settings.restart_engine


def test_flags_go_before_the_environment_and_that_before_the_file(file: Path) -> None:
    file.write_text("port = 1\nfrontends = 2\ndrain-timeout = 3\nmax_num_seqs = 4\n")
    environment = {
        "CUPAGED_CONFIG": str(file),
        "CUPAGED_FRONTENDS": "5",
        "CUPAGED_DRAIN_TIMEOUT": "6.5",
        "CUPAGED_MAX_NUM_SEQS": "8",
        "CUPAGED_MAX_NUM_QUEUED_REQS": "9",
        "OTHER_PORT": "77",
    }
    settings = load({"drain_timeout": 10.0, "config": None}, environment)
    assert (settings.port, settings.frontends, settings.drain_timeout) == (1, 5, 10.0)
    assert settings.engine["max_num_seqs"] == 8
    assert settings.engine["max_num_queued_reqs"] == 9


def test_every_type_of_value(file: Path) -> None:
    settings = from_file(
        file,
        'served-model-name = ["a", "b"]\nrestart_engine = true\nmax_message_bytes = "2MiB"\n'
        'watermark = 0\nkv_cache_memory_bytes = 1000\nhost = "::1"\nmetrics_port = -1\n',
    )
    assert settings.served_model_name == ("a", "b")
    assert settings.restart_engine is True
    assert settings.max_message_bytes == 2 * 2**20
    assert settings.engine["watermark"] == 0.0
    assert settings.engine["kv_cache_memory_bytes"] == 1000
    assert settings.metrics_host == "::1"
    assert not settings.has_metrics
    environment = {
        "CUPAGED_SERVED_MODEL_NAME": "a, b",
        "CUPAGED_RESTART_ENGINE": "Yes",
        "CUPAGED_LOG_PROMPTS": "off",
        "CUPAGED_KV_CACHE_MEMORY_BYTES": "1.5GB",
        "CUPAGED_NULL_STEPS_PER_S": "50",
        "CUPAGED_RUNNER": "null",
    }
    settings = load({}, environment)
    assert settings.served_model_name == ("a", "b")
    assert settings.restart_engine and not settings.log_prompts
    assert settings.engine["kv_cache_memory_bytes"] == 1_500_000_000
    assert settings.null_steps_per_s == 50.0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("prot = 1", "serve.toml: key must be a known setting; perhaps 'port', got 'prot'"),
        ("zzz = 1", "serve.toml: key must be a known setting; one of model, served_model_name"),
        ("port = '1'", "serve.toml: port must be an integer, got '1'"),
        ("port = true", "serve.toml: port must be an integer, got True"),
        ("port = 70000", r"serve.toml: port must be an integer in \[0, 65535\], got 70000"),
        ("drain-delay = 'x'", "serve.toml: drain-delay must be a number"),
        ("insecure = 1", "serve.toml: insecure must be true or false, got 1"),
        ("host = 3", "serve.toml: host must be a text"),
        ("served_model_name = [1]", "served_model_name must be a text or a list of texts"),
        ("max_message_bytes = '2 bags'", "max_message_bytes must be a number of bytes"),
        ("port = ", "config must be a TOML file"),
        ("[serve]\nport = 1", "serve.toml: key must be a known setting; .*, got 'serve'"),
        ("api_key = 'secret'", "api_key must be left out: a secret is not written here"),
        ("has_api_key = true", "known setting; perhaps 'api_key_file', got 'has_api_key'"),
        ("engine = 1", "known setting.*, got 'engine'"),
    ],
)
def test_mistakes_in_a_file(content: str, message: str, file: Path) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        from_file(file, content)
    assert "secret'" not in str(caught.value)


def test_an_option_that_is_not_built(file: Path) -> None:
    with pytest.raises(NotSupportedError, match="tensor_parallel_size=2 is not supported"):
        from_file(file, "tensor_parallel_size = 2")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a file that can be read \(No such file"):
        load({"config": str(tmp_path / "missing.toml")})


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("CUPAGED_PROT", "1", "CUPAGED_PROT must be a known setting; perhaps CUPAGED_PORT"),
        ("CUPAGED_PORT", "x", "CUPAGED_PORT must be an integer, got 'x'"),
        ("CUPAGED_INSECURE", "maybe", "CUPAGED_INSECURE must be one of 1, true"),
        ("CUPAGED_FRONTENDS", "0", r"CUPAGED_FRONTENDS must be an integer in \[1, 64\], got 0"),
        ("CUPAGED_LOG_FORMAT", "xml", "CUPAGED_LOG_FORMAT must be 'text' or 'json', got 'xml'"),
    ],
)
def test_mistakes_in_the_environment(variable: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load({}, {variable: text})


def test_variables_that_are_somebody_elses() -> None:
    """Those of Kubernetes for a service called cupaged, and ours for other purposes."""
    environment = {
        "CUPAGED_PORT": "tcp://10.0.0.7:50051",
        "CUPAGED_SERVICE_HOST": "10.0.0.7",
        "CUPAGED_SERVICE_PORT": "50051",
        "CUPAGED_SERVICE_PORT_GRPC": "50051",
        "CUPAGED_PORT_50051_TCP": "tcp://10.0.0.7:50051",
        "CUPAGED_PORT_50051_TCP_ADDR": "10.0.0.7",
        "CUPAGED_CACHE_DIR": "x",
        "CUPAGED_NVDISASM": "x",
    }
    assert load({}, environment) == load()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"port": -1}, "--port must be an integer in"),
        ({"metrics_port": -2}, "--metrics-port must be"),
        ({"metrics_port": 50051}, "--metrics-port must be different from port, got 50051"),
        ({"admin_port": 50051}, "--admin-port must be different from port"),
        ({"uds": ""}, "--uds must be a path"),
        ({"uds": "x" * 108}, "--uds must be a path of at most 107 bytes"),
        ({"uds": "s", "frontends": 2}, "--frontends must be 1 with uds"),
        ({"drain_timeout": -1.0}, "--drain-timeout must be seconds in"),
        ({"drain_delay": float("nan")}, "--drain-delay must be seconds in"),
        ({"max_message_bytes": 3}, "--max-message-bytes must be an integer in"),
        ({"stream_buffer_tokens": 0}, "--stream-buffer-tokens must be"),
        ({"metrics_compat": "tgi"}, "--metrics-compat must be 'vllm', got 'tgi'"),
        ({"null_steps_per_s": 5.0}, "--null-steps-per-s must be given with runner='null'"),
        ({"runner": "null", "null_steps_per_s": 0.0}, "--null-steps-per-s must be a number in"),
        ({"served_model_name": ("",)}, "--served-model-name must be not empty"),
        ({"api_key_file": "missing"}, "--api-key-file must be a file that can be read"),
        ({"ssl_ca_certs": __file__}, "--ssl-ca-certs must be given with ssl_certfile"),
        ({"ssl_certfile": __file__}, "ssl_keyfile must be a file, since ssl_certfile is given"),
        ({"ssl_keyfile": __file__}, "ssl_certfile must be a file, since ssl_keyfile is given"),
        ({"max_connection_age": 0.0}, "--max-connection-age must be seconds"),
        ({"keepalive_time": 0.0}, "--keepalive-time must be seconds"),
    ],
)
def test_what_is_out_of_range(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(flags)


TLS = {"ssl_certfile": __file__, "ssl_keyfile": __file__}


@pytest.mark.parametrize(
    ("flags", "allowed"),
    [
        ({}, False),
        (TLS, False),
        ({"api_key_file": __file__}, False),
        ({**TLS, "api_key_file": __file__}, True),
        ({**TLS, "ssl_ca_certs": __file__}, True),
        ({"insecure": True}, True),
        ({"uds": "socket"}, True),
    ],
)
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.3", "example.org"])
def test_a_public_address_needs_care(flags: dict[str, Any], allowed: bool, host: str) -> None:
    if allowed:
        assert load({"host": host, **flags}).host == host
        return
    with pytest.raises(ConfigError, match=r"--host must be a loopback address .* insecure is set"):
        load({"host": host, **flags})


def test_a_key_in_the_environment_counts() -> None:
    settings = load({"host": "0.0.0.0", **TLS}, {"CUPAGED_API_KEY": "s3cret"})
    assert settings.has_api_key
    assert "s3cret" not in repr(settings) + repr(settings.to_wire())


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "[::1]", "localhost"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)


def test_the_names_of_the_model(tmp_path: Path) -> None:
    assert DEFAULT_MODEL_NAME == DEFAULT_MODEL_REPO
    assert load().model_names == (DEFAULT_MODEL_REPO,)
    assert load({"model": "org/name"}).model_names == ("org/name",)
    (tmp_path / "small.gguf").touch()
    assert load({"model": str(tmp_path / "small.gguf")}).model_names == ("small",)
    assert load({"model": f"{tmp_path}/"}).model_names == (tmp_path.name,)
    assert load({"served_model_name": ("a", "b")}).model_names == ("a", "b")


def test_every_option_of_the_engine_is_a_setting() -> None:
    types = {f.name: str(f.type).removesuffix(" | None") for f in dataclasses.fields(EngineArgs)}
    del types["model"]
    types |= {"tokenizer": "str", "trace": "str", "kv_cache_memory_bytes": "bytes"}
    assert types == ENGINE_KEYS
    assert set(setting_keys().values()) == {"int", "float", "bool", "str", "names", "bytes"}


def test_settings_cross_to_the_children() -> None:
    settings = load({"model": "m", "served_model_name": ("a",), "max_num_seqs": 3})
    (message,) = FrameReader().feed(encode_frame(["settings", settings.to_wire()]))
    assert ServeSettings.from_wire(message[1]) == settings


def test_the_supervisor_needs_neither_numpy_nor_grpc() -> None:
    code = (
        "import sys; from cupaged.server import supervisor, settings_sources;"
        "settings_sources.load_settings({}, {}); print(*sorted(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in run.stdout.split()}
    assert not loaded & {"numpy", "grpc", "google", "tokenizers", "jinja2"}


def test_services_are_known_and_named_once() -> None:
    assert load().services == SERVICES
    assert load({}, {"CUPAGED_SERVICES": "v1, kserve"}).services == ("v1", "kserve")
    for services in ((), ("v1", "v1"), ("v2",)):
        with pytest.raises(ConfigError, match="one or more of v1, kserve"):
            ServeSettings(services=services)
