"""`cupaged generate`: continue prompts and print the text."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cupaged.cli.options import (
    BEAMS,
    add_engine_options,
    add_groups,
    add_model,
    add_sampling_options,
    beam_search_params,
    engine_options,
    sampling_params,
)
from cupaged.cli.parser import utf8_text
from cupaged.cli.records import completion_record, json_line, request_record
from cupaged.cli.streams import STDIN, read_text, tell
from cupaged.errors import ConfigError

if TYPE_CHECKING:
    from cupaged.llm import LLM
    from cupaged.outputs import RequestOutput
    from cupaged.sampling_params import SamplingParams

# Fields that only a JSON answer can show, and what they are when nobody asked for them.
_ONLY_IN_JSON = {"logprobs": None, "prompt_logprobs": None, "detokenize": True}


def add_parser(verbs: Any) -> None:
    """Add the verb to the command."""
    parser = verbs.add_parser(
        "generate",
        help="continue prompts",
        usage="cupaged generate [MODEL] [-p TEXT | -f FILE ...] [options]",
        description="Continue one prompt or several, all at the same time. One answer is printed "
        "as it comes; several are printed in order, each under a heading. Without -p and -f the "
        "prompt is standard input; one line break at the end of a file is not part of it.",
        example='cupaged generate -p "Once upon a time" -n 2 --temperature 0.8 --max-tokens 40',
    )
    add_model(parser)
    group = parser.add_argument_group("prompts and answers")
    for flags, settings in (
        (("-p", "--prompt"), {"metavar": "TEXT", "type": _literal, "help": "what to continue"}),
        (("-f", "--file"), {"metavar": "FILE", "type": _in_file, "help": "holds a prompt"}),
    ):
        settings["help"] = f"{settings['help']} (may be repeated)"
        group.add_argument(*flags, dest="prompts", action="append", **settings)
    group.add_argument(
        "-n",
        "--num-samples",
        type=int,
        metavar="N",
        help="answers a prompt (default: 1)",
    )
    group.add_argument("--json", action="store_true", help="print a line of JSON for each answer")
    add_sampling_options(parser, report=True)
    add_groups(parser, BEAMS)
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Load the model, generate, print."""
    from cupaged.llm import LLM

    params = sampling_params(args)  # a wrong one is refused before the model is read
    beams = beam_search_params(args)
    if not args.json:
        refuse_what_only_json_shows(params)
    options = engine_options(args)
    prompts = [read() for read in args.prompts or [_standard_input]]
    llm = LLM(**options)
    params = sampling_params(args, llm.engine.generation_defaults)
    if beams is None and not args.json and len(prompts) == params.n == 1:
        _print_stream(llm, prompts, params)
        return 0
    outputs = llm.generate(prompts, params) if beams is None else llm.beam_search(prompts, beams)
    (_print_json if args.json else _print_headed)(outputs)
    return 0


def refuse_what_only_json_shows(params: SamplingParams) -> None:
    """ConfigError for a parameter whose effect text cannot show."""
    for name, neutral in _ONLY_IN_JSON.items():
        if getattr(params, name) != neutral:
            raise ConfigError(name, getattr(params, name), "given together with --json")


def _print_stream(llm: LLM, prompts: list[str], params: SamplingParams) -> None:
    for output in llm.stream(prompts, params):
        print(output.outputs[0].delta, end="", flush=True)
    print()


def _print_headed(outputs: list[RequestOutput]) -> None:
    for number, output in enumerate(outputs, start=1):
        for sample in output.outputs:
            heading = f"{number}.{sample.index + 1}" if len(output.outputs) > 1 else f"{number}"
            print(f"--- {heading} ({sample.finish_reason})")
            print(sample.text)


def _print_json(outputs: list[RequestOutput]) -> None:
    for number, output in enumerate(outputs):
        head = {"prompt_index": number, **request_record(output)}
        for sample in output.outputs:
            sys.stdout.write(json_line({**head, **completion_record(sample)}))


def _literal(text: str) -> Callable[[], str]:
    prompt = utf8_text(text)
    return lambda: prompt


def _in_file(path: str) -> Callable[[], str]:
    return lambda: read_text(path)


def _standard_input() -> str:
    if sys.stdin is not None and sys.stdin.isatty():
        tell("reading the prompt from standard input; end it with Ctrl-D")
    return read_text(STDIN)
