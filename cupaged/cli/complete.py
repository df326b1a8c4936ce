"""`cupaged complete`: each line is a text to continue, without a chat template and a history."""

from __future__ import annotations

import argparse
from typing import Any

from cupaged.cli.answers import Answers
from cupaged.cli.console import Console
from cupaged.cli.options import (
    add_engine_options,
    add_model,
    add_sampling_options,
    engine_options,
    sampling_params,
)
from cupaged.cli.parser import utf8_text
from cupaged.errors import CupagedError


def add_parser(verbs: Any) -> None:
    """Add the verb to the command."""
    parser = verbs.add_parser(
        "complete",
        help="continue each line",
        usage="cupaged complete [MODEL] [options]",
        description="Each line of input is a text to continue, by itself: there is no chat "
        "template and no history. At a terminal Ctrl-C stops an answer (and at the prompt the "
        "program), and Ctrl-D ends.",
        example="cupaged complete --max-tokens 40 --stop .",
    )
    add_model(parser)
    parser.add_argument(
        "-q", "--quick", metavar="TEXT", type=utf8_text, help="continue this text and end"
    )
    add_sampling_options(parser)
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Load the model and continue lines until the input ends."""
    from cupaged.llm import LLM

    sampling_params(args)  # a wrong one is refused before the model is read
    console = Console(args.quick)
    llm = LLM(**engine_options(args))
    params = sampling_params(args, llm.engine.generation_defaults)
    answers = Answers(llm, console)
    for line in console.lines():
        try:
            answers.give(line, params)
        except CupagedError as error:
            console.fail(error)
    return int(console.failed)
