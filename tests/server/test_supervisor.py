"""The supervisor over children that pretend: starting, deaths, restarts, draining, force."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

SECONDS = 30.0


class Server:
    """A supervisor process and the lines that it prints."""

    def __init__(self, folder: Path, *settings: str, engine: str, frontend: str) -> None:
        self.folder = folder
        self.seen: list[str] = []
        self._lines: queue.Queue[str | None] = queue.Queue()
        self.become(engine=engine, frontend=frontend)
        (folder / "tmp").mkdir()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.server.fake_children", "supervise", *settings],
            env={**os.environ, "FAKE_CHILDREN": str(folder), "TMPDIR": str(folder / "tmp")},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def become(self, **modes: str) -> None:
        """What children do that start from now on."""
        for role, mode in modes.items():
            (self.folder / role).write_text(mode)

    def until(self, pattern: str) -> re.Match[str]:
        """Wait for a line of the log from here on."""
        try:
            while (line := self._lines.get(timeout=SECONDS)) is not None:
                self.seen.append(line)
                if match := re.search(pattern, line):
                    return match
        except queue.Empty:
            pass
        raise AssertionError(f"no line {pattern!r} in\n{''.join(self.seen)}")

    def until_pid(self, name: str) -> int:
        """Wait until a child has started."""
        return int(self.until(rf"^{name}: pid (\d+)")[1])

    def until_serving(self) -> str:
        """Wait for the line on standard output."""
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def signal(self, number: signal.Signals) -> None:
        """To the supervisor alone."""
        self.process.send_signal(number)

    def end(self) -> int:
        """Wait for the end; the exit code."""
        code = self.process.wait(SECONDS)
        self._reader.join(SECONDS)
        while not self._lines.empty():
            self.seen.append(self._lines.get() or "")
        return code

    def close(self) -> None:
        """Leave nothing behind."""
        self.process.kill()
        self.end()
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()

    @property
    def log(self) -> str:
        """All lines so far."""
        return "".join(self.seen)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._lines.put(line)
        self._lines.put(None)


class Start:
    """Starts servers and closes them at the end of the test."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.servers: list[Server] = []

    def __call__(self, *settings: str, engine: str = "ok", frontend: str = "ok") -> Server:
        self.servers.append(Server(self._folder, *settings, engine=engine, frontend=frontend))
        return self.servers[-1]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    start = Start(tmp_path)
    yield start
    for server in start.servers:
        server.close()


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=SECONDS) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_a_whole_life(start: Start) -> None:
    server = start("frontends=2", "admin_port=0", "served_model_name=tiny")
    line = server.until_serving()
    match = re.fullmatch(
        r"cupaged serving tiny on grpc://127\.0\.0\.1:(\d+) "
        r"\(metrics (http://127\.0\.0\.1:\d+)/metrics\)\n",
        line,
    )
    assert match, line
    port, page = match[1], match[2]
    server.until(r"^frontend-\d: state ready  False")
    server.until(r"^frontend-\d: state ready  False")
    starts = re.findall(r"^(\S+): pid (\d+) port (\S+) admin (\S+)", server.log, re.M)
    assert sorted((name, number) for name, _, number, _ in starts) == [
        ("engine", port),
        ("frontend-1", port),
        ("frontend-2", port),
    ]
    admins = {name: admin for name, _, _, admin in starts}
    assert admins["engine"] == admins["frontend-2"] == "None"
    assert int(admins["frontend-1"]) > 0
    assert get(f"{page}/livez") == (200, "alive\n")
    assert get(f"{page}/readyz") == (200, "ready\n")
    (private,) = (server.folder / "tmp").iterdir()
    assert private.stat().st_mode & 0o777 == 0o700

    server.signal(signal.SIGTERM)
    for _ in range(2):
        server.until(r"^frontend-\d: state draining")
    assert server.end() == 0
    assert "frontend-1: drain 30.0" in server.log
    assert "frontend-2: drain 30.0" in server.log
    assert server.log.index("drain 30.0") < server.log.index("engine: stop")
    assert not any(is_alive(int(pid)) for _, pid, _, _ in starts)
    assert not any((server.folder / "tmp").iterdir())
    assert server.process.stdout is not None
    assert server.process.stdout.read() == ""  # that one line is all


def test_the_engine_cannot_begin(start: Start) -> None:
    """The engine's own error is the command's; the front end does not stay."""
    server = start(engine="refused")
    assert server.end() != 0
    assert "cupaged.errors.ConfigError: max_model_len must be an integer >= 2, got 1" in server.log
    pids = re.findall(r": pid (\d+)", server.log)  # the front end may end before it says its own
    assert pids and not any(is_alive(int(pid)) for pid in pids)


def test_a_front_end_cannot_begin(start: Start) -> None:
    server = start(frontend="refused")
    assert server.end() != 0
    assert "ConfigError: max_model_len must be an integer >= 2" in server.log


def test_an_engine_that_crashes_while_it_loads(start: Start) -> None:
    server = start("restart_engine=1", engine="crashing")
    assert server.end() != 0
    expected = "ended with exit code 7; its last line: engine: about to crash; it is not restarted"
    assert f"EngineDeadError: the engine has ended: {expected}" in server.log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_while_loading_ends_at_once(start: Start, number: signal.Signals) -> None:
    server = start("drain_delay=20", engine="loading")
    pids = [server.until_pid("(?:engine|frontend-1)") for _ in range(2)]
    server.signal(number)
    assert server.end() == 0
    assert server.process.stdout is not None
    assert server.process.stdout.read() == ""
    assert not any(map(is_alive, pids))
    assert not any((server.folder / "tmp").iterdir())


def test_the_second_signal_forces(start: Start) -> None:
    server = start(frontend="busy")
    server.until_serving()
    server.signal(signal.SIGTERM)
    server.until("frontend-1: drain")
    server.signal(signal.SIGHUP)  # no second one: the terminal has gone, too
    server.signal(signal.SIGINT)
    assert server.end() == 130
    assert "SIGINT again: the server is killed" in server.log
    pids = re.findall(r": pid (\d+)", server.log)
    assert len(pids) == 2
    assert not any(is_alive(int(pid)) for pid in pids)


def test_front_ends_that_do_not_end_in_time(start: Start, tmp_path: Path) -> None:
    server = start("drain_timeout=0", frontend="deaf")
    server.until_serving()
    server.signal(signal.SIGTERM)
    assert server.end() == 1
    assert "the front ends have not ended in time" in server.log


def test_an_engine_that_is_not_restarted(start: Start) -> None:
    server = start()
    page = server.until_serving().split("metrics ")[1].removesuffix("/metrics)\n")
    server.until("frontend-1: state ready")
    os.kill(int(re.findall(r"^engine: pid (\d+)", server.log, re.M)[0]), signal.SIGKILL)
    told = server.until("^frontend-1: state dead (.*)")
    assert told[1] == "killed by SIGKILL (perhaps by the system, for want of memory) False"
    status, body = get(f"{page}/livez")
    assert status == 503
    assert "killed by SIGKILL" in body
    assert server.end() == 1
    assert "frontend-1: stop" in server.log
    assert not any((server.folder / "tmp").iterdir())


def test_an_engine_that_is_restarted(start: Start) -> None:
    server = start("restart_engine=true")
    page = server.until_serving().split("metrics ")[1].removesuffix("/metrics)\n")
    server.until("frontend-1: state ready")
    os.kill(int(re.findall(r"^engine: pid (\d+)", server.log, re.M)[0]), signal.SIGSEGV)
    server.become(engine="crashing")  # the next one does not come up either
    server.until("the engine is started again in 0.25 s")
    assert get(f"{page}/livez") == (200, "alive\n")
    status, body = get(f"{page}/readyz")
    assert (status, body.partition(":")[0]) == (503, "not ready")
    server.until("frontend-1: state loading")
    server.until("the engine is started again in 0.5 s")
    server.become(engine="ok")
    server.until("frontend-1: state ready")
    assert re.search("^frontend-1: state dead killed by SIGSEGV.* True$", server.log, re.M)
    assert re.search("^frontend-1: state dead ended with exit code 7;.* True$", server.log, re.M)
    assert get(f"{page}/readyz") == (200, "ready\n")
    assert "cupaged_engine_restarts_total 2.0" in re.sub(r"\{.*\}", "", get(f"{page}/metrics")[1])
    server.signal(signal.SIGTERM)
    assert server.end() == 0


def test_front_ends_are_restarted_until_it_is_too_much(start: Start) -> None:
    server = start("frontends=2", "admin_port=0")
    server.until_serving()
    server.until("frontend-.: state ready")
    server.until("frontend-.: state ready")
    first = re.search(r"^frontend-1: pid (\d+) port (\d+) admin (\d+)", server.log, re.M)
    assert first
    pid = int(first[1])
    for _ in range(4):
        os.kill(pid, signal.SIGKILL)
        again = server.until(r"^frontend-1: pid (\d+) port (\d+) admin (\d+)")
        assert again.groups()[1:] == first.groups()[1:]
        server.until("^frontend-1: state ready")
        pid = int(again[1])
    os.kill(pid, signal.SIGKILL)
    server.until("frontend-1 has ended 5 times in 60 s: the server gives up")
    assert server.end() == 1


def test_no_child_outlives_a_killed_supervisor(start: Start) -> None:
    server = start()
    server.until_serving()
    server.until("frontend-1: state ready")
    pids = [int(pid) for pid in re.findall(r": pid (\d+)", server.log)]
    assert len(pids) == 2
    server.signal(signal.SIGKILL)
    assert server.end() == -signal.SIGKILL
    deadline = time.monotonic() + SECONDS
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_front_ends_ask_for(start: Start) -> None:
    """The log level for all, and the end."""
    server = start(frontend="asking")
    server.until("frontend-1: drain 2.5")
    server.signal(signal.SIGTERM)  # it is the second request
    assert server.end() == 143
    for name in ("engine", "frontend-1"):
        assert f"{name}: log_level debug" in server.log


def test_an_engine_that_does_not_answer(start: Start) -> None:
    """It is not ready, and need not be started again."""
    server = start(frontend="complaining")
    page = server.until_serving().split("metrics ")[1].removesuffix("/metrics)\n")
    deadline = time.monotonic() + SECONDS
    while get(f"{page}/readyz") != (503, "not ready: the engine does not answer\n"):
        assert time.monotonic() < deadline
    assert get(f"{page}/livez") == (200, "alive\n")


def test_a_unix_socket(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "grpc.sock"
    server = start(f"uds={path}", "metrics_port=-1")
    assert server.until_serving() == f"cupaged serving fake on unix:{path}\n"
    server.until("frontend-1: pid .* port None admin None")


def test_a_port_in_use(start: Start) -> None:
    port = re.search(r":(\d+) ", start().until_serving())
    assert port
    command = [sys.executable, "-m", "cupaged", "serve", "--port", port[1], "--metrics-port", "-1"]
    taken = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert taken.returncode == 2
    assert taken.stderr == (
        "cupaged: --port must be a free port of 127.0.0.1: another program uses it; --port gives "
        f"another one, 0 any, got {port[1]}\n"
    )
