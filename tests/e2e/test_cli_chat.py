"""`chat` and `complete` through a pipe, and the conversation by itself."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from cupaged.cli.conversation import Conversation, Message
from cupaged.cli.streams import StreamError
from tests.e2e.cli import SHORT, Inline


def test_chat_answers_each_line_and_keeps_the_history(cupaged: Inline, cli_model: str) -> None:
    both = cupaged("chat", cli_model, *SHORT, stdin="hello\n\nand then?\n")
    first = cupaged("chat", cli_model, *SHORT, stdin="hello\n")
    fresh = cupaged("chat", cli_model, *SHORT, stdin="and then?\n")
    assert (both.code, both.err) == (0, "") and both.out.startswith(first.out)
    assert both.out != first.out + fresh.out
    again = cupaged("chat", cli_model, *SHORT, stdin="hello\n/reset\nand then?")
    assert again.out == first.out + fresh.out
    assert cupaged("chat", cli_model, *SHORT, "-q", "hello") == first


def test_commands_work_through_a_pipe(cupaged: Inline, cli_model: str, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    lines = f"/system Be kind.\nhello\n/regen\n/save {file}\n/help\n/exit\nnever read\n"
    done = cupaged("chat", cli_model, *SHORT, stdin=lines)
    assert done.code == 0
    assert [line.split()[0] for line in done.err.splitlines()] == [
        "/reset", "/system", "/regen", "/save", "/help", "/exit",
    ]  # fmt: skip
    answer, _, again = done.out.removesuffix("\n").partition("\n")
    assert answer == again
    assert json.loads(file.read_text("utf-8")) == {
        "messages": [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": answer},
        ]
    }
    by_flag = cupaged("chat", cli_model, *SHORT, "--system", "Be kind.", "-q", "hello")
    assert by_flag.out == f"{answer}\n"


def test_another_answer_has_another_seed(cupaged: Inline, cli_model: str) -> None:
    hot = ("--temperature", "5", "--seed", "1")
    done = cupaged("chat", cli_model, *SHORT, *hot, stdin="hello\n/regen\n")
    next_seed = cupaged("chat", cli_model, *SHORT, *hot[:3], "2", "-q", "hello")
    assert done.out.endswith(next_seed.out) and done.out != 2 * next_seed.out


def test_a_slash_that_is_no_command_is_a_message(cupaged: Inline, cli_model: str) -> None:
    plain = cupaged("chat", cli_model, *SHORT, stdin="/foo bar\n")
    assert (plain.code, plain.err) == (0, "")
    assert cupaged("chat", cli_model, *SHORT, stdin="/exit now\n").out == ""
    assert cupaged("chat", cli_model, *SHORT, stdin=" /exit now\n").out != ""


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/regen", "/regen: there is no answer yet"),
        ("/save", "/save: name a file behind it"),
        ("/save /no/such/folder/x", "/no/such/folder/x: cannot be written: No such file or"),
        ("/save .", ".: "),
        ("word " * 2000, "prompt length in tokens must be at most 1023"),
    ],
)
def test_a_line_that_fails_is_told_and_the_others_go_on(
    cupaged: Inline, cli_model: str, line: str, message: str
) -> None:
    done = cupaged("chat", cli_model, *SHORT, stdin=f"{line}\nhello\n")
    assert done.code == 1 and done.err.startswith(f"cupaged: {message}")
    assert len(done.err.splitlines()) == 1
    assert done.out == cupaged("chat", cli_model, *SHORT, "-q", "hello").out


def test_the_oldest_turns_are_dropped_when_the_context_is_full(
    cupaged: Inline, cli_model: str, tmp_path: Path
) -> None:
    file = tmp_path / "talk.json"
    lines = "".join(f"message {i} has some words in it\n" for i in range(6))
    limits = ("--max-model-len", "128", "--max-tokens", "8", "--ignore-eos")
    arguments = ("chat", cli_model, *limits, "--system", "Be kind.")
    done = cupaged(*arguments, stdin=f"{lines}/save {file}\n")
    assert done.code == 0
    notices = done.err.splitlines()
    assert notices[0] == "the context is full: the oldest turn was dropped"
    messages = json.loads(file.read_text("utf-8"))["messages"]
    assert messages[0] == {"role": "system", "content": "Be kind."}
    kept = [m["content"] for m in messages if m["role"] == "user"]
    assert 1 <= len(kept) < 6 and kept[-1] == "message 5 has some words in it"
    assert len(notices) == 6 - len(kept)


def test_a_message_that_can_never_fit_costs_no_history(
    cupaged: Inline, cli_model: str, tmp_path: Path
) -> None:
    file = tmp_path / "talk.json"
    long = "word " * 2000
    done = cupaged("chat", cli_model, *SHORT, stdin=f"one\ntwo\n{long}\n/save {file}\n")
    assert done.code == 1 and len(done.err.splitlines()) == 1
    messages = json.loads(file.read_text("utf-8"))["messages"]
    assert [m["content"] for m in messages if m["role"] == "user"] == ["one", "two"]


def count(messages: list[Message]) -> int:
    """A made-up tokenizer: one token a message."""
    return len(messages)


def test_conversation_drops_and_has_back() -> None:
    talk = Conversation("system")
    for i in range(3):
        talk.ask(f"question {i}")
        talk.answer(f"answer {i}")
    talk.ask("question 3")
    assert len(talk.messages) == 8
    assert talk.make_room(count, 8) == 0
    assert talk.make_room(count, 5) == 2  # 6 would be one turn less, and too many
    assert [m["content"] for m in talk.messages[:2]] == ["system", "question 2"]
    talk.withdraw()
    assert [m["content"] for m in talk.messages[:2]] == ["system", "question 0"]
    talk.ask("question 3")
    assert talk.make_room(count, 0) == 3  # the turn that has begun stays
    talk.answer("answer 3")
    talk.ask("question 4")
    talk.withdraw()
    assert [m["content"] for m in talk.messages] == ["system", "question 3", "answer 3"]
    assert talk.reopen() and talk.messages[-1]["content"] == "question 3"


def test_conversation_is_saved_again_but_over_nothing_else(tmp_path: Path) -> None:
    file, other = tmp_path / "a.json", tmp_path / "b.json"
    other.write_text("mine")
    talk = Conversation()
    talk.ask("hello")
    talk.save(file)
    talk.answer("hi")
    talk.save(file)
    assert len(json.loads(file.read_text())["messages"]) == 2
    with pytest.raises(StreamError, match="is there already"):
        talk.save(other)
    assert other.read_text() == "mine"


def test_complete_has_no_history_and_no_template(cupaged: Inline, cli_model: str) -> None:
    both = cupaged("complete", cli_model, *SHORT, stdin="the cat\n\n  def add(\n")
    one, two = (
        cupaged("generate", cli_model, *SHORT, "-p", text) for text in ("the cat", "  def add(")
    )
    assert (both.code, both.err, both.out) == (0, "", one.out + two.out)
    assert cupaged("complete", cli_model, *SHORT, "-q", "the cat").out == one.out


def test_complete_goes_on_after_a_line_that_is_too_long(cupaged: Inline, cli_model: str) -> None:
    done = cupaged("complete", cli_model, *SHORT, stdin="word " * 2000 + "\nthe cat\n")
    assert done.code == 1 and "prompt length in tokens" in done.err
    assert done.out == cupaged("generate", cli_model, *SHORT, "-p", "the cat").out


def test_chat_needs_a_template_and_takes_one_from_a_file(
    cupaged: Inline, cli_model: str, tmp_path: Path
) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}\n")
    done = cupaged("chat", cli_model, *SHORT, "--chat-template", str(file), "-q", "the cat")
    assert done.out == cupaged("generate", cli_model, *SHORT, "-p", "the cat").out
    config = json.loads(Path(cli_model, "tokenizer_config.json").read_text("utf-8"))
    bare = tmp_path / "bare"
    shutil.copytree(cli_model, bare)
    del config["chat_template"]
    (bare / "tokenizer_config.json").write_text(json.dumps(config))
    refused = cupaged("chat", str(bare), stdin="one\ntwo\n")
    assert refused.code == 1 and "`cupaged complete` needs none" in refused.err
    assert len(refused.err.splitlines()) == 1  # told once, not once a message
    assert cupaged("chat", str(bare), "--chat-template", str(file), "-q", "a", *SHORT).code == 0
    missing = cupaged("chat", cli_model, "--chat-template", str(tmp_path / "none"), "-q", "a")
    assert missing.code == 1 and "none: cannot be read: No such file" in missing.err
