"""The verbs that talk, in a terminal of 80 columns and 24 lines."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.e2e.cli import Inline, Terminal, command

RATE = r"([\d.]+ tokens/s, )?"  # of two tokens and more
FIGURES = rf"\[\d+ tokens?, {RATE}first \d+\.\d\d s, context \d+/\d+(, [a-z_ ]+)?\]\n"
ANSWERING = r"hello\n[^\x1b]{3}"  # some of an answer to hello
LONG = ("--ignore-eos",)  # an answer that ends only with the context


@contextmanager
def talking(verb: str, model: str, *arguments: str) -> Iterator[Terminal]:
    """A conversation whose prompt has appeared; it must have ended itself at the end."""
    terminal = Terminal(*command(verb, model, *arguments))
    try:
        terminal.wait_for_prompt()
        yield terminal
    finally:
        if terminal.process.poll() is None:
            terminal.process.kill()
            terminal.process.wait()


def test_a_conversation(cli_model: str, tmp_path: Path, cupaged: Inline) -> None:
    file = tmp_path / "talk.json"
    with talking("chat", cli_model, "--max-tokens", "6", "--ignore-eos") as terminal:
        terminal.type("hello\r")
        shown = terminal.wait_for_prompt(FIGURES)
        answer = cupaged("chat", cli_model, "--max-tokens", "6", "--ignore-eos", "-q", "hello").out
        assert shown.startswith(f"hello\n{answer}") and "cut at max_tokens]" in shown
        terminal.type("/regen\r")
        again = terminal.wait_for_prompt(FIGURES)
        assert "the answer will be the same: --temperature is 0" in again and answer in again
        terminal.type("/regne\r")
        assert "no such command: /regne; perhaps /regen" in terminal.wait_for_prompt("\n")
        terminal.type(f"/save {file}\r")
        assert f"saved 2 messages to {file}" in terminal.wait_for_prompt("\n").replace("\n", "")
        terminal.type("first half \\\rsecond half\r")
        assert "... second half" in terminal.wait_for_prompt(FIGURES)
        terminal.type("\x1b[A\x1b[A")  # the history of this conversation
        terminal.wait_for(r"first half")
        terminal.type("\x15\x04")  # Ctrl-U, Ctrl-D
        assert terminal.end() == 0
    (question, said) = json.loads(file.read_text("utf-8"))["messages"]
    assert question["content"] == "hello" and said["content"] + "\n" == answer


def test_ctrl_c_stops_an_answer_and_the_prompt_comes_back(cli_model: str) -> None:
    with talking("chat", cli_model, *LONG, "--max-model-len", "1024") as terminal:
        terminal.type("hello\r")
        terminal.wait_for(ANSWERING)
        terminal.type("\x03")
        stopped = terminal.wait_for_prompt(FIGURES)
        assert ", stopped]" in stopped and "context full" not in stopped
        terminal.type("/exit\r")
        assert terminal.end() == 0


def test_ctrl_c_twice_ends_the_program(cli_model: str) -> None:
    with talking("chat", cli_model, *LONG) as terminal:
        terminal.type("hello\r")
        terminal.wait_for(ANSWERING)
        terminal.type("\x03")
        time.sleep(0.05)
        terminal.type("\x03")
        assert terminal.end() == 130
    assert terminal.written.rstrip().endswith("interrupted")


def test_ctrl_c_at_the_prompt_ends_the_program(cli_model: str) -> None:
    with talking("complete", cli_model) as terminal:
        terminal.type("\x03")
        assert terminal.end() == 130


def test_a_full_context_is_told(cli_model: str) -> None:
    limits = ("--max-model-len", "96", "--max-tokens", "24", "--ignore-eos")
    with talking("chat", cli_model, *limits) as terminal:
        for _ in range(3):
            terminal.type("some words that take room\r")
            shown = terminal.wait_for_prompt(FIGURES)
        assert "the context is full: the oldest turn was dropped" in shown
        terminal.type(f"{'word ' * 80}\r")
        shown = terminal.wait_for_prompt(r"token of output\), got \d+\n")
        assert "cupaged: prompt length in tokens must be at most 95" in shown.replace("\n", "")
        terminal.type("/reset\r")
        terminal.wait_for_prompt("forgotten; the system message stays\n")
        terminal.type("\x04")
        assert terminal.end() == 0


def test_complete(cli_model: str, cupaged: Inline) -> None:
    answer = cupaged("generate", cli_model, "-p", "the cat", "--max-tokens", "4", "--ignore-eos")
    with talking("complete", cli_model, "--max-tokens", "4", "--ignore-eos") as terminal:
        terminal.type("the cat\r")
        assert answer.out in terminal.wait_for_prompt(FIGURES)
        terminal.type("\x04")
        assert terminal.end() == 0


def test_no_colours_where_none_are_wanted(cli_model: str) -> None:
    terminal = Terminal("env", "NO_COLOR=1", *command("complete", cli_model, "-q", "the cat"))
    assert terminal.end() == 0 and "\x1b" not in terminal.written
