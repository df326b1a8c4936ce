"""`cupaged chat`: a conversation in the terminal, or line by line through a pipe."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any

from cupaged.cli.options import (
    add_model_options,
    add_sampling_options,
    engine_options,
    sampling_options,
)
from cupaged.errors import PromptError


def add_parser(verbs: Any) -> None:
    """Add the verb to the command."""
    parser = verbs.add_parser(
        "chat",
        help="talk with a model",
        description="Each line of input is a message; the answer is printed as it comes. "
        "Ctrl-D ends the conversation, Ctrl-C the program.",
    )
    add_model_options(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message that opens the talk")
    add_sampling_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Load the model and answer until the input ends."""
    from cupaged.llm import LLM
    from cupaged.sampling_params import SamplingParams

    params = SamplingParams(**sampling_options(args))
    llm = LLM(**engine_options(args))
    history = [{"role": "system", "content": args.system}] if args.system else []
    for line in _lines():
        history.append({"role": "user", "content": line})
        answer = ""
        try:
            for output in llm.stream(llm.render_chat(history), params):
                answer = output.outputs[0].text
                print(output.outputs[0].delta, end="", flush=True)
        except PromptError as error:  # the conversation no longer fits
            print(f"cupaged: {error}", file=sys.stderr)
            history.pop()
            continue
        print()
        history.append({"role": "assistant", "content": answer})
    return 0


def _lines() -> Iterator[str]:
    """Messages; empty lines are passed over. A terminal gets a prompt."""
    prompt = "> " if sys.stdin.isatty() and sys.stdout.isatty() else ""
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            return
        if line:
            yield line
