"""`cupaged chat`: a conversation in the terminal, or line by line through a pipe."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from cupaged.cli.answers import Answers
from cupaged.cli.console import Console
from cupaged.cli.conversation import Conversation, Message
from cupaged.cli.options import (
    add_chat_template,
    add_engine_options,
    add_model,
    add_sampling_options,
    engine_options,
    sampling_params,
)
from cupaged.cli.parser import nearest, utf8_text
from cupaged.errors import ChatTemplateError, CupagedError

if TYPE_CHECKING:
    from cupaged.sampling_params import SamplingParams

_ANSWER_SHARE = 4  # a quarter of the context is kept free for the answer
DESCRIPTION = (
    "Each line of input is a message; the answer is printed as it comes. At a terminal a line "
    "that ends with a backslash goes on in the next one, Ctrl-C stops an answer (and at the "
    "prompt the program), Ctrl-D ends the conversation, and /help lists the commands. When the "
    "context is full the oldest turns are dropped, with a notice."
)


def add_parser(verbs: Any) -> None:
    """Add the verb to the command."""
    parser = verbs.add_parser(
        "chat",
        help="talk with a model",
        usage="cupaged chat [MODEL] [--system TEXT] [options]",
        description=DESCRIPTION,
        example='cupaged chat --system "Answer in one sentence." --temperature 0.7',
    )
    add_model(parser)
    add_talk_options(parser)
    add_chat_template(parser)
    add_sampling_options(parser)
    add_engine_options(parser)
    parser.set_defaults(run=run)


def add_talk_options(parser: argparse.ArgumentParser) -> None:
    """How a talk begins."""
    parser.add_argument(
        "--system", metavar="TEXT", type=utf8_text, help="system message that opens the talk"
    )
    parser.add_argument(
        "-q", "--quick", metavar="TEXT", type=utf8_text, help="answer this message and end"
    )


def run(args: argparse.Namespace) -> int:
    """Load the model and answer until the input ends."""
    from cupaged.llm import LLM

    sampling_params(args)  # a wrong one is refused before the model is read
    console = Console(args.quick, [f"/{name}" for name in COMMANDS])
    llm = LLM(**engine_options(args))
    answers = Answers(llm, console)
    _check_template(answers, args.system)
    console.note("/help lists the commands, Ctrl-C stops an answer, Ctrl-D ends")
    params = sampling_params(args, llm.engine.generation_defaults)
    return Chat(answers, params, args.system, console).run()


class Answering(Protocol):
    """Who answers: a model in this process, or a server."""

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and answer together."""

    def render(self, messages: list[Message]) -> dict[str, Any]:
        """The prompt that the chat template makes, with its `prompt_token_ids`."""

    def give(self, prompt: Any, params: SamplingParams) -> str:
        """Print an answer to such a prompt as it comes; returns its text."""


def _check_template(answers: Answering, system: str | None) -> None:
    """Say before the first message that there can be no answer to any."""
    trial = Conversation(system)
    trial.ask("hello")
    try:
        answers.render(trial.messages)
    except ChatTemplateError as error:
        hint = "--chat-template gives another one, and `cupaged complete` needs none"
        raise ChatTemplateError(f"{error} ({hint})") from None


class Chat:
    """Messages and commands in, answers out.

    Args:
        answers: who answers.
        system: the system message, None for none.
    """

    def __init__(
        self, answers: Answering, params: SamplingParams, system: str | None, console: Console
    ) -> None:
        self.conversation = Conversation(system)
        self.console = console
        self.ended = False
        self._params = params
        self._answers = answers

    def run(self) -> int:
        """Until the input ends or somebody leaves. The exit code."""
        for line in self.console.lines():
            try:
                self._handle(line)
            except CupagedError as error:
                self.console.fail(error)
            if self.ended:
                break
        return int(self.console.failed)

    def say(self) -> None:
        """Answer the turn that has begun, with as much of the others as fits."""
        limit = self._answers.max_model_len
        reserved = min(self._params.max_tokens or limit, limit // _ANSWER_SHARE)
        try:
            dropped = self.conversation.make_room(self._num_tokens, limit - reserved)
            prompt = self._answers.render(self.conversation.messages)
            if dropped and len(prompt["prompt_token_ids"]) < limit:
                self.console.warn(f"the context is full: the oldest {_turns(dropped)} dropped")
            self.conversation.answer(self._answers.give(prompt, self._params))
        except CupagedError:
            self.conversation.withdraw()
            raise

    def say_again(self) -> None:
        """The last message once more, with other random numbers."""
        if not self.conversation.reopen():
            raise CupagedError("/regen: there is no answer yet")
        if self._params.seed is not None:
            self._params = replace(self._params, seed=(self._params.seed + 1) % 2**64)
        if self._params.is_greedy:
            self.console.note("the answer will be the same: --temperature is 0")
        self.say()

    def _handle(self, line: str) -> None:
        """A command begins with a slash; a space before it makes it a message."""
        word, _, rest = line.partition(" ")
        command = COMMANDS.get(word.removeprefix("/")) if word.startswith("/") else None
        if command is not None:
            command.run(self, rest.strip())
        elif word.startswith("/") and self.console.interactive:
            hint = nearest(word, {f"/{name}": f"/{name}" for name in COMMANDS})
            self.console.note(
                f"no such command: {word}{hint or '; /help lists them'}. "
                "A space before it makes it a message."
            )
        else:
            self.conversation.ask(line.strip())
            self.say()

    def _num_tokens(self, messages: list[Message]) -> int:
        return len(self._answers.render(messages)["prompt_token_ids"])


class _Command:
    """A word that begins with a slash: what it does, with the rest of its line."""

    def __init__(self, usage: str, help: str, run: Callable[[Chat, str], None]) -> None:
        self.usage = usage
        self.help = help
        self.run = run


def _reset(chat: Chat, rest: str) -> None:
    chat.conversation.reset()
    chat.console.note("forgotten; the system message stays")


def _system(chat: Chat, rest: str) -> None:
    chat.conversation.system = rest or None
    chat.console.note("the system message is set" if rest else "there is no system message now")


def _save(chat: Chat, rest: str) -> None:
    if not rest:
        raise CupagedError("/save: name a file behind it")
    chat.conversation.save(Path(rest).expanduser())
    chat.console.note(f"saved {len(chat.conversation.messages)} messages to {rest}")


def _help(chat: Chat, rest: str) -> None:
    for command in COMMANDS.values():
        chat.console.warn(f"  {command.usage:14}{command.help}")


def _exit(chat: Chat, rest: str) -> None:
    chat.ended = True


def _turns(number: int) -> str:
    return "turn was" if number == 1 else f"{number} turns were"


COMMANDS = {
    "reset": _Command("/reset", "forget the conversation, keep the system message", _reset),
    "system": _Command("/system TEXT", "set the system message; without TEXT, have none", _system),
    "regen": _Command("/regen", "answer the last message again", lambda chat, _: chat.say_again()),
    "save": _Command("/save FILE", "write the messages to a new file, as JSON", _save),
    "help": _Command("/help", "this list", _help),
    "exit": _Command("/exit", "end, as Ctrl-D does", _exit),
}
