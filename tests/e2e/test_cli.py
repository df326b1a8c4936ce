"""The command line as a person meets it: output, errors, exit codes, interrupts, a terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cupaged import __version__
from tests.tiny_models import TINY, write_hf_folder

ROOT = Path(__file__).resolve().parents[2]
SHORT = ("--max-tokens", "6", "--ignore-eos")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model with a chat template."""
    return str(write_hf_folder(tmp_path_factory.mktemp("model"), TINY))


def environment(**changes: str) -> dict[str, str]:
    """This process's, with the checkout importable and one BLAS thread."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1", **changes}


def cupaged(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run the command without a terminal."""
    command = [sys.executable, "-m", "cupaged", *arguments]
    return subprocess.run(command, input=stdin, env=environment(), capture_output=True, text=True)


def test_version() -> None:
    done = cupaged("--version")
    assert (done.returncode, done.stdout) == (0, f"cupaged {__version__}\n")


def test_generate_is_the_same_from_flag_and_standard_input(model: str) -> None:
    flag = cupaged("generate", model, "--prompt", "the cat sat", *SHORT)
    piped = cupaged("generate", model, *SHORT, stdin="the cat sat\n")
    assert flag.returncode == 0 and flag.stderr == ""
    assert flag.stdout == piped.stdout != "\n"


def test_several_answers_stand_under_headings(model: str) -> None:
    sampled = ("-n", "2", "--temperature", "0.9", "--seed", "3")
    done = cupaged("generate", model, "-p", "a", "-p", "b", *sampled, *SHORT)
    headings = [line for line in done.stdout.splitlines() if line.startswith("--- ")]
    assert headings == [f"--- {name} (length)" for name in ("1.1", "1.2", "2.1", "2.2")]
    assert done.stdout == cupaged("generate", model, "-p", "a", "-p", "b", *sampled, *SHORT).stdout


def test_chat_answers_each_line_and_keeps_the_history(model: str) -> None:
    both = cupaged("chat", model, *SHORT, stdin="hello\n\nand then?\n")
    first = cupaged("chat", model, *SHORT, stdin="hello\n")
    fresh = cupaged("chat", model, *SHORT, stdin="and then?\n")
    assert both.returncode == 0 and both.stdout.startswith(first.stdout)
    assert both.stdout != first.stdout + fresh.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "the following arguments are required: COMMAND"),
        (("generate", "/no/such/model", "-p", "a"), 1, "'/no/such/model': no such file or folder"),
        (("generate", "MODEL", "-p", "a", "--top-p", "1.5"), 2, "top_p must be a number in [0, 1]"),
        (("generate", "MODEL", "-p", "a", "--max-tokens", "0"), 2, "max_tokens must be an integer"),
        (("generate", "MODEL", "-p", "a", "--device", "cuda"), 2, "device='cuda' is not supported"),
        (("generate", "MODEL", "-p", "a", "--block-size", "12"), 2, "block_size must be one of"),
        (
            ("generate", "MODEL", "-p", "a b c " * 2000),
            1,
            "prompt length in tokens must be at most",
        ),
        (("generate", "MODEL"), 1, "prompt on standard input must be a text"),
    ],
)
def test_failures_have_one_line_and_an_exit_code(
    model: str, arguments: tuple[str, ...], code: int, message: str
) -> None:
    done = cupaged(*(model if a == "MODEL" else a for a in arguments))
    assert done.returncode == code
    assert message in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1 or code == 2


def test_interrupt_stops_cleanly(model: str) -> None:
    command = [sys.executable, "-u", "-m", "cupaged", "generate", model, "-p", "a", "--ignore-eos"]
    process = subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.read(1)  # it generates now
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert errors.decode().strip() == "interrupted"


def test_reader_that_goes_away_is_no_traceback(model: str) -> None:
    command = [sys.executable, "-u", "-m", "cupaged", "generate", model, "-p", "a", "--ignore-eos"]
    process = subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.wait(timeout=20) == 1
    assert process.stderr.read() == b""
    process.stderr.close()


def run_in_terminal(command: list[str], seconds: float) -> tuple[str, int]:
    """What a command writes to a terminal of 80 columns and 24 lines, and its exit code."""
    leader, follower = pty.openpty()
    size = {"COLUMNS": "80", "LINES": "24", "TERM": "xterm"}
    process = subprocess.Popen(
        command, env=environment(**size), stdin=follower, stdout=follower, stderr=follower
    )
    os.close(follower)
    written = b""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if select.select([leader], [], [], 0.1)[0]:
            try:
                piece = os.read(leader, 65536)
            except OSError:  # the other side has closed
                break
            written += piece
        elif process.poll() is not None:
            break
    code = process.wait(timeout=5)
    os.close(leader)
    return written.decode(), code


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


def test_demo_without_a_terminal(model: str) -> None:
    command = [sys.executable, "-m", "cupaged.examples.demo", model]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout and "pool [....................] at the end" in done.stdout
    check_demo(done.stdout)


def test_demo_on_a_terminal_stays_within_it(model: str) -> None:
    command = [sys.executable, "-m", "cupaged.examples.demo", model]
    text, code = run_in_terminal(command, seconds=60)
    assert code == 0
    plain = re.sub(r"\x1b\[[?0-9]*[a-zA-Z]", "", text).replace("\r", "")
    check_demo(plain)
    frame = text[: text.rindex("\x1b[?25h")]
    lines = re.sub(r"\x1b\[[?0-9]*[a-zA-Z]", "", frame).replace("\r", "").split("\n")
    assert max(len(line) for line in lines) <= 80
    assert "▓" in frame  # a shared block was seen
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor comes back


@pytest.mark.slow
def test_demo_with_the_real_model() -> None:
    command = [sys.executable, "-m", "cupaged.examples.demo"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    check_demo(done.stdout)
    assert "The capital of France is Paris." in done.stdout
