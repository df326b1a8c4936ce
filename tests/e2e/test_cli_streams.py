"""What can happen to files and standard streams: each has its one line and its exit code."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.e2e.cli import SHORT, Inline, command, environment, process, shell

TALKING = ("generate", "chat", "complete")


@pytest.mark.parametrize("verb", TALKING)
def test_input_that_is_not_utf8(cupaged: Inline, cli_model: str, verb: str) -> None:
    done = cupaged(verb, cli_model, *SHORT, stdin=b"ab\xffcd\n")
    assert (done.code, done.out) == (1, "")
    place = "standard input" if verb == "generate" else "standard input, line 1"
    assert done.err == f"cupaged: {place}: is not UTF-8: byte 0xff at position 2\n"


@pytest.mark.parametrize("verb", [*TALKING, "run-batch"])
def test_standard_input_that_is_closed(cli_model: str, verb: str) -> None:
    done = shell(f'"$@" {verb} {cli_model} <&-')
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr == b"cupaged: standard input is closed\n"


def test_standard_input_that_is_empty(cupaged: Inline, cli_model: str) -> None:
    done = cupaged("generate", cli_model)
    assert (done.code, done.err) == (1, "cupaged: standard input: is empty; it must hold a text\n")
    for verb in ("chat", "complete"):
        assert cupaged(verb, cli_model).code == 0  # nobody said anything


@pytest.mark.parametrize("verb", ["generate -p a", "chat -q a", "complete -q a", "models"])
def test_a_disk_that_is_full(cli_model: str, verb: str) -> None:
    model = "" if verb == "models" else f"-m {cli_model} --max-tokens 2"
    done = shell(f'"$@" {verb} {model} >/dev/full')
    assert done.returncode == 1
    assert done.stderr == b"cupaged: standard output: No space left on device\n"


@pytest.mark.parametrize("arguments", ["--help", "--version", "help chat"])
def test_help_on_a_full_disk(arguments: str) -> None:
    done = shell(f'"$@" {arguments} >/dev/full')
    assert done.returncode == 1
    assert done.stderr == b"cupaged: standard output: No space left on device\n"


def test_standard_output_that_is_closed(cli_model: str) -> None:
    done = shell(f'"$@" generate {cli_model} -p a >&-')
    assert (done.returncode, done.stderr) == (1, b"cupaged: standard output is closed\n")


def test_standard_error_that_is_closed(cli_model: str) -> None:
    done = shell(f'"$@" generate {cli_model} -p a --top-p 3 2>&-')
    assert (done.returncode, done.stdout) == (2, b"")


@pytest.mark.parametrize("verb", [("generate", "-p", "a"), ("complete", "-q", "a")])
def test_a_reader_that_goes_away_is_no_traceback(cli_model: str, verb: tuple[str, ...]) -> None:
    name, *rest = verb
    line = command(name, cli_model, *rest, "--ignore-eos")
    running = subprocess.Popen(
        line, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert running.stdout is not None and running.stderr is not None
    running.stdout.read(1)
    running.stdout.close()
    assert running.wait(timeout=20) == 1
    assert running.stderr.read() == b""
    running.stderr.close()


def test_a_reader_that_wants_only_the_head_of_the_help() -> None:
    done = shell('"$@" generate --help | head -1')
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_prompt_file_that_cannot_be_read(cupaged: Inline, cli_model: str, tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes("Größe".encode("latin-1"))
    (tmp_path / "empty").touch()
    for name, reason in (
        ("missing", "cannot be read: No such file or directory"),
        (".", "cannot be read: Is a directory"),
        ("latin", "is not UTF-8: byte 0xf6 at position 2"),
        ("empty", "is empty; it must hold a text"),
    ):
        path = str(tmp_path / name)
        done = cupaged("generate", cli_model, "-f", path)
        assert (done.code, done.err) == (1, f"cupaged: {path}: {reason}\n")


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is unreadable for root")
def test_a_prompt_file_without_permission(cupaged: Inline, cli_model: str, tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("x")
    path.chmod(0)
    done = cupaged("generate", cli_model, "-f", str(path))
    assert (done.code, done.err) == (1, f"cupaged: {path}: cannot be read: Permission denied\n")


def test_characters_that_the_output_has_not_are_replaced(cli_model: str) -> None:
    done = subprocess.run(
        command("generate", cli_model, "-p", "a", "--trace-decode-token-ids", "360", *SHORT),
        env=environment(PYTHONIOENCODING="ascii"), capture_output=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, b"") and done.stdout.isascii()


def test_a_program_through_a_pipe_sees_no_terminal(cli_model: str) -> None:
    done = process("chat", cli_model, *SHORT, stdin=b"hello\n/foo\n")
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"\x1b" not in done.stdout and b"> " not in done.stdout[:2]
