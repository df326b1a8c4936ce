"""The README's chapter on the service: every command runs, every figure's name and reason is real.

The server of the tests listens elsewhere than the README's; otherwise the commands are as printed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from shutil import copy

import pytest

from cupaged.examples.demo_serve import end_now
from cupaged.server.error_status import TABLE
from cupaged.server.settings_sources import load_settings
from tests.e2e.cli import ROOT, environment
from tests.server.local_server import LocalServer

README_ADDRESS = "127.0.0.1:50051"
CHAPTER = re.search(
    r"^## Serve over gRPC\n.*?(?=^## )", (ROOT / "README.md").read_text("utf-8"), re.M | re.S
)
assert CHAPTER is not None
TEXT = CHAPTER[0]
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", TEXT, re.M | re.S)
CERTS = Path(__file__).parent / "certs"
SECONDS = 60


def blocks(language: str) -> list[str]:
    return [code for name, code in BLOCKS if name == language]


COMMANDS = [
    line for code in blocks("") for line in code.replace("\\\n", " ").splitlines()
]  # fmt: skip
SERVES = [line for line in COMMANDS if line.startswith("cupaged serve")]
# For the servers with TLS and with a unix socket; then those for a server that is plain.
OTHERS = [line for line in COMMANDS if re.search(r" -a (grpcs|unix):", line)]
CALLS = [line for line in COMMANDS if line not in (*SERVES, *OTHERS)]
(TOML,) = blocks("toml")
(BENCH,) = blocks("text")


def run(line: str, folder: Path, address: str = README_ADDRESS) -> str:
    """What a line of the README prints; it must succeed."""
    functions = f"""
        ADDRESS={address}
        python() {{ {sys.executable} "$@"; }}
        cupaged() {{
            case "$1 $*" in
                "client "*" -a "*) ;;
                "client "* | "bench "*) set -- "$1" "$2" -a $ADDRESS "${{@:3}}" ;;
            esac
            {sys.executable} -m cupaged "$@"
        }}
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", functions + line.replace(README_ADDRESS, address)],
        cwd=folder, env=environment(PATH=path), stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    return done.stdout


class Served:
    """One of the README's servers, on free ports."""

    def __init__(self, line: str, model: str, folder: Path) -> None:
        words = line.replace("MODEL", model).split()[1:]
        free = ("--metrics-port", "0", "--device", "cpu")
        port = () if "--uds" in words else ("--port", "0")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "cupaged", *words, *port, *free],
            cwd=folder, env=environment(), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert self._process.stdout is not None
        self.line = self._process.stdout.readline()

    def end(self) -> tuple[int, str]:
        """The exit code after SIGTERM, and the log."""
        self._process.terminate()
        _, log = self._process.communicate(timeout=SECONDS)
        return self._process.returncode, log

    def kill(self) -> None:
        """End it at once, if it has not ended."""
        if self._process.returncode is None:
            end_now(self._process)
            self._process.communicate()


@pytest.fixture(scope="module")
def folder(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the files that the commands name; short, for the socket's sake."""
    folder = tmp_path_factory.mktemp("readme")
    for name in ("server.pem", "server.key", "root.pem"):
        copy(CERTS / name, folder)
    (folder / "tokens").write_text("a-token\n")
    (folder / "serve.toml").write_text(TOML.replace("MODEL", tiny_model))
    return folder


@pytest.fixture(scope="module")
def served(tiny_model: str, folder: Path) -> Iterator[dict[str, Served]]:
    """All of the README's servers with options, by their lines."""
    with ThreadPoolExecutor() as pool:
        started = pool.map(lambda line: Served(line, tiny_model, folder), SERVES[1:])
        running = dict(zip(SERVES[1:], started, strict=True))
    yield running
    for server in running.values():
        server.kill()


def test_the_chapter_has_all_that_is_tested_here() -> None:
    assert SERVES[0] == "cupaged serve"
    assert len(SERVES) == 5 and len(OTHERS) == 2 and len(CALLS) == 5


def test_servers_and_the_commands_that_ask_them(served: dict[str, Served], folder: Path) -> None:
    for line, server in served.items():
        scheme = "unix:" if "--uds" in line else "grpcs://" if "--ssl" in line else "grpc://"
        name = "small" if "--config" in line else "tiny"
        place = re.match(rf"cupaged serving {name} on {scheme}(\S+) \(metrics http:", server.line)
        assert place is not None, (line, server.line)
        if "--ssl" in line:
            port = place[1].rpartition(":")[2]
            asked = OTHERS[0].replace(":50051", f":{port}")
        elif "--uds" in line:
            asked = OTHERS[1]
        else:
            asked = f"cupaged client health -a {place[1]}"
        assert run(asked, folder) == "SERVING\n"
    for line, server in served.items():
        if "--drain-delay" not in line:
            code, log = server.end()
            assert code == 0, log


@pytest.mark.parametrize("line", CALLS)
def test_a_command(line: str, server: LocalServer, folder: Path, tiny_model: str) -> None:
    assert run(line.replace("MODEL", tiny_model), folder, server.address).strip()


def test_python(server: LocalServer, folder: Path) -> None:
    code = blocks("python")[0]  # others are run by the tests of their clients
    (folder / "ask.py").write_text(code.replace(README_ADDRESS, server.address))
    assert run("python ask.py", folder).strip()


def test_toml(folder: Path) -> None:
    settings = load_settings({"config": str(folder / "serve.toml")}, {})
    assert settings.model_names == ("small", "default")
    assert (settings.frontends, settings.engine["max_num_seqs"]) == (2, 128)


def test_grafana_lies_where_the_chapter_says(folder: Path) -> None:
    (line,) = re.findall(r"`(python -c '.*?')`", TEXT)
    assert Path(run(line, folder).strip()).is_file()


def test_bench_prints_these_lines(server: LocalServer, folder: Path) -> None:
    command, _, shown = BENCH.removeprefix("$ ").partition("\n")
    printed = run(command, folder, server.address)
    assert masked(printed) == masked(shown)


def masked(report: str) -> list[str]:
    """The lines without what differs from run to run."""
    return [re.sub(r"\s+[\d.]+$", "", line) for line in report.strip().splitlines()]


def test_reasons_of_the_table_are_those_of_the_service() -> None:
    rows = re.findall(r"^\| ([A-Z_]+) \| ([A-Z_, ]+) \|", TEXT, re.M)
    assert len(rows) == 11
    stated = {(code, reason) for code, reasons in rows for reason in reasons.split(", ")}
    real = {(row.code.name, row.reason) for row in TABLE.values()}
    assert stated - real == {("UNAVAILABLE", "ENGINE_DEAD")}  # while it is restarted
