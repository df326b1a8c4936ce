"""`cupaged serve --openai`: a program `smg` that only pretends, found, watched and ended."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from cupaged.errors import ConfigError
from cupaged.server.openai_gateway import OpenAIGateway
from cupaged.server.settings import ServeSettings
from tests.server.local_server import wait_until
from tests.server.test_supervisor import Start, is_alive

# It says who it is and what it was told, and dies of its own when a file appears.
FAKE = """#!{python}
import os, signal, sys, time
def end(*_):
    print("smg: asked to end", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("smg: pid", os.getpid(), *sys.argv[1:], flush=True)
while not os.path.exists("{folder}/die"):
    time.sleep(0.01)
sys.exit(5)
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    start = Start(tmp_path)
    yield start
    for server in start.servers:
        server.close()


@pytest.fixture
def smg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "smg"
    program.write_text(FAKE.format(python=sys.executable, folder=tmp_path))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return program


def test_it_is_started_with_the_address_and_ends_with_the_server(start: Start, smg: Path) -> None:
    server = start("openai=true", "openai_port=0")
    port = re.search(r"grpc://127\.0\.0\.1:(\d+)", server.until_serving())
    assert port is not None
    shown = server.until(
        r"an OpenAI API is about to be at http://127\.0\.0\.1:(\d+)/v1: smg launch"
    )
    found = server.until(r"^smg: pid (\d+) (.*)")
    words = found[2].split()
    assert words[0] == "launch"
    told = dict(zip(words[1::2], words[2::2], strict=True))
    assert told["--worker-urls"] == f"grpc://127.0.0.1:{port[1]}"
    assert (told["--host"], told["--port"]) == ("127.0.0.1", shown[1])
    assert told["--prometheus-host"] == "127.0.0.1"
    server.signal(signal.SIGTERM)
    assert server.end() == 0
    assert not is_alive(int(found[1]))
    assert "smg: asked to end\n" in server.log


def test_its_death_changes_nothing_else(start: Start, smg: Path) -> None:
    server = start("openai=true", "openai_port=0")
    server.until(r"^smg: pid")
    (smg.parents[1] / "die").touch()
    server.until(r"the OpenAI API is gone: the gateway has ended with exit code 5")
    engine = int(re.findall(r"^engine: pid (\d+)", server.log, re.M)[0])
    assert is_alive(engine) and server.process.poll() is None
    server.signal(signal.SIGTERM)
    assert server.end() == 0
    assert server.log.count("the OpenAI API is gone") == 1


@pytest.mark.skipif(sys.platform != "linux", reason="the system has to kill it")
def test_a_killed_server_does_not_leave_it_behind(start: Start, smg: Path) -> None:
    server = start("openai=true", "openai_port=0")
    pid = int(server.until(r"^smg: pid (\d+)")[1])
    server.signal(signal.SIGKILL)
    try:
        wait_until(lambda: not is_alive(pid))
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_it_is_not_installed(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    server = start("openai=true", "openai_port=0")
    server.until_serving()
    server.until(r"there is no OpenAI API.*not installed: `pip install smg`.*as: smg launch")
    assert server.process.poll() is None
    server.signal(signal.SIGTERM)
    assert server.end() == 0


def test_it_cannot_be_run(start: Start, smg: Path) -> None:
    smg.write_text("#!/nowhere/python\n")
    server = start("openai=true", "openai_port=0")
    server.until(r"the OpenAI API is gone")
    assert server.process.poll() is None


def test_addresses(smg: Path) -> None:
    for host, worker in (("0.0.0.0", "127.0.0.1"), ("localhost", "localhost"), ("::1", "[::1]")):
        settings = ServeSettings(openai=True, openai_port=0, host=host, insecure=True)
        gateway = OpenAIGateway(settings)
        arguments = gateway._arguments(50051)
        assert arguments[2] == f"grpc://{worker}:50051"
        assert arguments[4] == host
    json = ServeSettings(openai=True, openai_port=0, log_format="json", log_level="debug")
    assert OpenAIGateway(json)._arguments(1)[-3:] == ["--log-level", "debug", "--log-json"]


def test_a_port_in_use_is_refused_by_name() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match="--openai-port"):
            OpenAIGateway(ServeSettings(openai=True, openai_port=port))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"services": ("v1",)}, "services must be with 'vllm'"),
        ({"uds": "/tmp/x.sock"}, "left out where uds is given"),
        ({"api_key_file": __file__}, "left out where api_key_file is given"),
        ({"has_api_key": True}, "left out where CUPAGED_API_KEY is given"),
        ({"ssl_certfile": __file__, "ssl_keyfile": __file__}, "where ssl_certfile is given"),
        ({"openai_port": 50051}, "openai_port must be different from port"),
        ({"openai_port": 70000}, "openai_port must be an integer"),
    ],
)
def test_what_it_does_not_go_with(settings: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        ServeSettings(openai=True, **settings)  # type: ignore[arg-type]
