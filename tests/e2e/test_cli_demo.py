"""The demo, with and without a terminal."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.e2e.cli import Terminal, environment, plain


def check_demo(text: str) -> None:
    """What the demo's last lines must say, whatever the model."""
    assert re.search(r"^requests +8 \(10 answers\)", text, re.M)
    preemptions = re.search(r"^preemptions +(\d+)", text, re.M)
    assert preemptions is not None and int(preemptions[1]) > 0
    assert re.search(r"^blocks still in use +0\s*$", text, re.M)
    shared = re.search(r"^blocks shared +at most (\d+)", text, re.M)
    assert shared is not None and int(shared[1]) > 0
    assert len(re.findall(r"^  prompt \d: same, ", text, re.M)) == 8
    assert "try next:" in text


def test_demo_without_a_terminal(cli_model: str) -> None:
    command = [sys.executable, "-m", "cupaged.examples.demo", cli_model]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout and "pool [....................] at the end" in done.stdout
    check_demo(done.stdout)


def test_demo_on_a_terminal_stays_within_it(cli_model: str) -> None:
    terminal = Terminal(sys.executable, "-m", "cupaged.examples.demo", cli_model)
    assert terminal.end(seconds=60) == 0
    text = terminal.written
    check_demo(plain(text))
    frame = text[: text.rindex("\x1b[?25h")]
    assert max(len(line) for line in plain(frame).split("\n")) <= 80
    assert "▓" in frame  # a shared block was seen
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor comes back


@pytest.mark.slow
def test_demo_with_the_real_model() -> None:
    command = [sys.executable, "-m", "cupaged.examples.demo"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    check_demo(done.stdout)
    assert "The capital of France is Paris." in done.stdout
