"""`cupaged client generate`: the options made into a request, its events printed."""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from cupaged.cli.client import FAILURE, reported
from cupaged.cli.generate import refuse_what_only_json_shows
from cupaged.cli.options import sampling_params
from cupaged.cli.records import alternatives_record, finite, json_line
from cupaged.cli.streams import STDIN, read_text, tell
from cupaged.sampling_params import SamplingParams

if TYPE_CHECKING:
    from cupaged.client import Client, Event, Finished, GenerationStream, ModelInfo

_NEED_ASKING = ("logprobs", "cumulative_logprob", "prompt", "prompt_token_ids")
_NOT_SENT = {"spaces_between_special_tokens", "structured_outputs"}


def run(args: argparse.Namespace) -> int:
    """Read the prompt, generate, print."""
    params = sampling_params(args)  # a wrong one is refused before anything is sent
    if not args.json:
        refuse_what_only_json_shows(params)
    prompt = _prompt(args)
    return reported(args, lambda args, client: _generate(args, client, prompt))


def options_of(params: SamplingParams) -> dict[str, Any]:
    """Every parameter that has a value, as keyword arguments of the client.

    Also those with their default values: the server would take what the model's authors recommend.
    """
    options = {name: getattr(params, name) for name in params.field_names()}
    return {
        name: value
        for name, value in options.items()
        if name not in _NOT_SENT and value is not None and value not in ((), {})
    }


def params_for(args: argparse.Namespace, model: ModelInfo) -> SamplingParams:
    """What was given, else what the model's authors recommend, else greedy and unlimited."""
    return sampling_params(args, model.default_sampling)


def _generate(args: argparse.Namespace, client: Client, prompt: str | list[int]) -> int:
    params = params_for(args, client.model_info(args.model))
    with client.stream(prompt, model=args.model, **options_of(params)) as stream:
        if args.json:
            for event in stream:
                sys.stdout.write(json_line(event_record(event)))
                sys.stdout.flush()
        elif params.n == 1:
            _print_stream(stream)
        else:
            _print_headed(stream)
        return _verdict(stream.finished)


def event_record(event: Event) -> dict[str, Any]:
    """An event as JSON: its kind, and its fields; those that need asking for only if asked for."""
    from cupaged.client import Delta, Finished, PromptLogprobs

    kind = type(event).__name__
    record = {"event": "".join(f"_{c.lower()}" if c.isupper() else c for c in kind).lstrip("_")}
    if isinstance(event, PromptLogprobs):
        positions = [None if p is None else alternatives_record(p) for p in event.positions]
        return {**record, "positions": positions}
    fields = {
        name: value
        for name, value in asdict(event).items()
        if value is not None or name not in _NEED_ASKING
    }
    if isinstance(event, Delta) and event.logprobs is not None:
        fields["logprobs"] = [alternatives_record(position) for position in event.logprobs]
    if isinstance(event, Finished) and event.cumulative_logprob is not None:
        fields["cumulative_logprob"] = finite(event.cumulative_logprob)
    return {**record, **fields}


def _print_stream(stream: GenerationStream) -> None:
    for piece in stream.texts():
        print(piece, end="", flush=True)
    print()


def _print_headed(stream: GenerationStream) -> None:
    from cupaged.client import Delta

    texts: defaultdict[int, str] = defaultdict(str)
    for event in stream:
        if isinstance(event, Delta):
            texts[event.index] += event.text
    for index, end in sorted(stream.finished.items()):
        print(f"--- {index + 1} ({end.finish_reason})")
        print(texts[index])


def _verdict(finished: dict[int, Finished]) -> int:
    """The exit code; an answer that was cut by the server is a failure."""
    cut = {end.finish_reason for end in finished.values()} & {"abort", "error"}
    if "error" in cut:
        tell("cupaged: the server could not compute the answer to its end; see the server's log")
    elif cut:
        tell("cupaged: the request was aborted on the server")
    return FAILURE if cut else 0


def _prompt(args: argparse.Namespace) -> str | list[int]:
    if args.prompt is not None:
        return str(args.prompt)
    if args.prompt_token_ids is not None:
        return list(args.prompt_token_ids)
    if args.prompt_file is not None and args.prompt_file != STDIN:
        return read_text(args.prompt_file)
    if sys.stdin is not None and sys.stdin.isatty():
        tell("reading the prompt from standard input; end it with Ctrl-D")
    return read_text(STDIN)
