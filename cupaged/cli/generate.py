"""`cupaged generate`: continue prompts and print the text."""

from __future__ import annotations

import argparse
import sys
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
        "generate",
        help="continue prompts",
        description="Continue one prompt or several, all at the same time. One answer is printed "
        "as it comes; several are printed in order, each under a heading.",
    )
    add_model_options(parser)
    parser.add_argument(
        "-p",
        "--prompt",
        metavar="TEXT",
        action="append",
        help="what to continue (may be repeated; default: standard input)",
    )
    parser.add_argument(
        "-n", "--num-samples", type=int, default=1, metavar="N", help="answers a prompt"
    )
    add_sampling_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Load the model, generate, print."""
    from cupaged.llm import LLM
    from cupaged.sampling_params import SamplingParams

    params = SamplingParams(n=args.num_samples, **sampling_options(args))
    prompts = args.prompt or [_from_stdin()]
    llm = LLM(**engine_options(args))
    if len(prompts) == 1 and params.n == 1:
        for output in llm.stream(prompts, params):
            print(output.outputs[0].delta, end="", flush=True)
        print()
        return 0
    for number, output in enumerate(llm.generate(prompts, params), start=1):
        for sample in output.outputs:
            heading = f"{number}.{sample.index + 1}" if params.n > 1 else f"{number}"
            print(f"--- {heading} ({sample.finish_reason})")
            print(sample.text)
    return 0


def _from_stdin() -> str:
    if sys.stdin.isatty():
        print("reading the prompt from standard input; end it with Ctrl-D", file=sys.stderr)
    text = sys.stdin.read()
    if not text:
        raise PromptError("prompt on standard input", text, "a text; or use --prompt")
    return text.removesuffix("\n")
