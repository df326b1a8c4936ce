"""The command `cupaged`: picks the verb, turns errors into exit codes, configures logging.

Exit codes: 0 done, 1 failure, 2 wrong usage, 130 interrupted. Heavy imports wait until a verb runs.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence

from cupaged._version import __version__
from cupaged.cli import (
    bench,
    chat,
    client,
    complete,
    completion,
    doctor,
    estimate,
    generate,
    kernel,
    models,
    proto,
    pull,
    serve,
    trace,
)
from cupaged.cli import run_batch as batch
from cupaged.cli.parser import (
    OTHER_VERBS,
    USAGE_ERROR,
    Parser,
    flags_of,
    known_spelling,
    nearest,
    refuse_unknown,
)
from cupaged.cli.streams import check_standard_output, discard_output, reason, tell
from cupaged.errors import ConfigError, CupagedError, InvalidParameterError, NotSupportedError

_USAGE_ERRORS = (ConfigError, InvalidParameterError, NotSupportedError)
FAILURE = 1
INTERRUPTED = 130


def build_parser() -> Parser:
    """The parser of the whole command."""
    parser = Parser(
        prog="cupaged",
        usage="cupaged COMMAND [options]",
        description="Serve large language models with paged attention.",
        example='cupaged generate -p "Once upon a time" --max-tokens 40\n  cupaged chat --help',
    )
    parser.add_argument("--version", action="store_true", help="show the version and end")
    parser.set_defaults(verbose=False)
    verbs = parser.add_subparsers(
        title="commands",
        metavar=f"{'COMMAND':14}",  # argparse makes the column of the names as wide as this
        dest="verb",
        prog="cupaged",
    )
    modules = (
        generate, chat, complete, batch, serve, client, bench, proto, pull, models, estimate,
        kernel, trace, doctor, completion,
    )  # fmt: skip
    for module in modules:
        module.add_parser(verbs)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and give its exit code."""
    code = _guarded(lambda: _run(list(sys.argv[1:] if argv is None else argv)))
    if sys.stdout is None:
        return code
    flushed = _guarded(_flush)  # a full disk shows here at the latest, not when Python ends
    return code or flushed


def _run(argv: list[str]) -> int:
    parser = build_parser()
    args = _parse(parser, argv)
    if args.version:
        check_standard_output()
        print(f"cupaged {__version__}")
        return 0
    if args.verb is None:
        parser.print_help(sys.stderr)
        return USAGE_ERROR
    check_standard_output()
    level = logging.INFO if args.verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")
    return int(args.run(args))


def _parse(parser: Parser, argv: list[str]) -> argparse.Namespace:
    """The options; SystemExit after a line about what is wrong, or after `--help`."""
    if argv[:1] == ["help"]:
        argv = [*argv[1:2], "--help"]
    argv = [OTHER_VERBS.get(word, word) for word in argv[:1]] + argv[1:]
    asked = _asked(parser, argv)
    args, unknown = parser.parse_known_args(known_spelling(argv))
    if unknown:
        refuse_unknown(asked, unknown)
    return args


def _asked(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.ArgumentParser:
    """The parser of the innermost command that the words begin with; refuses an unknown one."""
    verbs, first = _verbs(parser), argv[0] if argv else ""
    if not verbs or not first:
        return parser
    if first in verbs:
        return _asked(verbs[first], argv[1:])
    if not first.startswith("-"):
        parser.error(f"unknown command {first!r}{nearest(first, {verb: verb for verb in verbs})}")
    if first not in flags_of(parser):
        parser.error(f"unknown option {first}; a command comes first")
    return parser


def _verbs(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parsers of a command's own commands by their names."""
    actions = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    return {name: verb for action in actions for name, verb in action.choices.items()}


def _flush() -> int:
    sys.stdout.flush()
    return 0


def _guarded(run: Callable[[], int]) -> int:
    """The exit code of a function, with its error on one line of standard error."""
    try:
        return run()
    except SystemExit as done:  # argparse has said all
        return int(done.code or 0)
    except KeyboardInterrupt:
        tell("\ninterrupted")
        return INTERRUPTED
    except _USAGE_ERRORS as error:
        tell(f"cupaged: {error}")
        return USAGE_ERROR
    except CupagedError as error:
        tell(f"cupaged: {error}")
        return FAILURE
    except BrokenPipeError:  # the reader of our output has gone; nobody is left to tell
        discard_output()
        return FAILURE
    except OSError as error:
        tell(f"cupaged: {error.filename or 'standard output'}: {reason(error)}")
        if error.filename is None:
            discard_output()
        return FAILURE
