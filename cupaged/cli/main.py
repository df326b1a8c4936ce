"""The command `cupaged`: picks the verb, turns errors into exit codes, configures logging.

Exit codes: 0 done, 1 failure, 2 wrong usage, 130 interrupted. Heavy imports wait until a verb runs.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from cupaged._version import __version__
from cupaged.cli import chat, generate
from cupaged.errors import ConfigError, CupagedError, InvalidParameterError, NotSupportedError

_USAGE_ERRORS = (ConfigError, InvalidParameterError, NotSupportedError)
INTERRUPTED = 130


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command."""
    parser = argparse.ArgumentParser(
        prog="cupaged", description="Serve large language models with paged attention."
    )
    parser.add_argument("--version", action="version", version=f"cupaged {__version__}")
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    generate.add_parser(verbs)
    chat.add_parser(verbs)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and give its exit code."""
    args = build_parser().parse_args(argv)
    level = logging.INFO if args.verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")
    try:
        return int(args.run(args))
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED
    except _USAGE_ERRORS as error:
        print(f"cupaged: {error}", file=sys.stderr)
        return 2
    except CupagedError as error:
        print(f"cupaged: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of our output has gone; nobody is left to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
