"""`cupaged trace`: look at what `--trace FILE` has recorded, and run it again."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from cupaged.cli.parser import Parser
from cupaged.errors import ConfigError

if TYPE_CHECKING:
    from cupaged.engine.trace_file import TraceReader
    from cupaged.engine.trace_replay import Replayed

_MAX_SHOWN = 300


def add_parser(verbs: Any) -> None:
    """Add the verb to the command."""
    parser = verbs.add_parser(
        "trace",
        help="show or replay what --trace has recorded",
        usage="cupaged trace COMMAND [options]",
        description="Reads the file that an engine wrote with --trace FILE: every step, with what "
        "was scheduled, what became of the KV blocks, and how long it took.",
        example="cupaged trace show steps.trace --every 10",
    )
    parser.set_defaults(run=lambda args: _without_command(parser))
    commands = parser.add_subparsers(
        title="commands", metavar=f"{'COMMAND':14}", dest="trace_verb", prog="cupaged trace"
    )
    _add_show(commands)
    _add_replay(commands)


def _without_command(parser: Parser) -> int:
    parser.error("a command is missing")


def _add_show(commands: Any) -> None:
    parser = commands.add_parser(
        "show",
        help="print a timeline of the steps",
        usage="cupaged trace show FILE [--every N] [--from STEP] [--to STEP] [--request ID]",
        description="Prints one line a step, with a bar of the KV pool as the step finds it, and a "
        "summary.",
        example="cupaged trace show steps.trace --request req-7",
    )
    parser.add_argument("file", metavar="FILE", help="what --trace wrote")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="one line for N steps")
    parser.add_argument("--from", dest="first", type=int, metavar="STEP", help="the first step")
    parser.add_argument("--to", dest="last", type=int, metavar="STEP", help="the last step")
    parser.add_argument("--request", metavar="ID", help="the life of one request instead")
    parser.set_defaults(run=_show)


def _add_replay(commands: Any) -> None:
    parser = commands.add_parser(
        "replay",
        help="run the same requests through scheduler and block manager again",
        usage="cupaged trace replay FILE",
        description="Runs the recorded requests through the real scheduler and block manager, with "
        "the recorded tokens in place of the model, and compares every step. The exit code is 1 "
        "at the first difference.",
        example="cupaged trace replay steps.trace",
    )
    parser.add_argument("file", metavar="FILE", help="what --trace wrote")
    parser.set_defaults(run=_replay)


def _show(args: argparse.Namespace) -> int:
    if args.every < 1:
        raise ConfigError("--every", args.every, "an integer >= 1")
    if None not in (args.first, args.last) and args.first > args.last:
        raise ConfigError("--from", args.first, f"at most --to {args.last}")
    from cupaged.cli import trace_request, trace_timeline
    from cupaged.engine.trace_file import TraceReader

    with TraceReader(args.file) as trace:
        if args.request is not None:
            lines = trace_request.lines(trace, args.request)
        else:
            lines = trace_timeline.lines(trace, args.every, args.first, args.last)
        for line in lines:
            print(line)
        _note_cut(trace)
    return 0


def _replay(args: argparse.Namespace) -> int:
    from cupaged.engine.trace_file import TraceReader
    from cupaged.engine.trace_replay import Replay

    with TraceReader(args.file) as trace:
        replayed = Replay(trace.header).run(trace)
        print("\n".join(_verdict(replayed)))
        _note_cut(trace)
    return int(replayed.difference is not None)


def _verdict(replayed: Replayed) -> list[str]:
    equal = f"equal: {replayed.num_steps} steps"
    if replayed.broken:
        return [equal, f"then the recorded engine was ended by {replayed.broken}"]
    if replayed.difference is None:
        return [equal]
    place, recorded, now = replayed.difference
    lines = [
        f"different at {replayed.where}: {place}",
        f"  recorded  {_short(repr(recorded))}",
        f"  now       {_short(repr(now))}",
    ]
    if replayed.plans is not None:
        then, plan = replayed.plans
        lines += [f"  the plan was  {_short(then)}", f"  and is now    {_short(plan)}"]
    return [*lines, f"{equal} before it"]


def _short(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}... ({len(text)} characters)"


def _note_cut(trace: TraceReader) -> None:
    if trace.num_cut_bytes:
        print(f"the last record is cut: {trace.num_cut_bytes} bytes were not read")
