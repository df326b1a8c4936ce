"""The argument parser: how help reads, and what a mistyped word gets for an answer.

Spellings of the field are understood: `_` for `-` in a flag, and what other programs call the same
thing. An unknown word is refused with the nearest known one.
"""

from __future__ import annotations

import argparse
import difflib
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

_MAX_COLUMNS = 100
_HELP_COLUMN = 28
USAGE_ERROR = 2

# What transformers and llama.cpp call options that have vLLM's names here.
OTHER_NAMES = {
    "--ctx-size": "--max-model-len",
    "--max-new-tokens": "--max-tokens",
    "--n-predict": "--max-tokens",
    "--predict": "--max-tokens",
    "--repeat-penalty": "--repetition-penalty",
    "--system-prompt": "--system",
    "--target": "--address",
    "--temp": "--temperature",
}


OTHER_VERBS = {"collect-env": "doctor"}


class Parser(argparse.ArgumentParser):
    """Help that fits a terminal, and errors of one line.

    Args:
        example: a command line that is shown below the help.
        settings: of `argparse.ArgumentParser`.
    """

    def __init__(self, *, example: str = "", **settings: Any) -> None:
        if settings.get("description"):
            settings["description"] = textwrap.fill(settings["description"], 78)
        if example:
            settings["epilog"] = f"example:\n  {example}"
        super().__init__(**{"formatter_class": _Formatter, "allow_abbrev": False, **settings})

    def print_help(self, file: SupportsWrite[str] | None = None) -> None:
        """Write the help; unlike argparse's own, this does not hide that it cannot."""
        (file or sys.stdout or sys.stderr).write(self.format_help())

    def error(self, message: str) -> NoReturn:
        """End with exit code 2 and one line on standard error."""
        if message.endswith("expected one argument"):
            message += "; a value that begins with '-' is written --flag=VALUE"
        self.exit(USAGE_ERROR, f"{self.prog}: {message} (see {self.prog} --help)\n")


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str, **settings: Any) -> None:
        width = min(_MAX_COLUMNS, shutil.get_terminal_size().columns) - 2
        super().__init__(
            prog, **{"max_help_position": _HELP_COLUMN, "width": max(40, width), **settings}
        )


def flags_of(parser: argparse.ArgumentParser) -> list[str]:
    """Every flag that a parser knows."""
    return [flag for action in parser._actions for flag in action.option_strings]


def known_spelling(argv: Sequence[str]) -> list[str]:
    """The words with each long flag spelt as it is here; what follows `--` is left alone."""
    end = argv.index("--") if "--" in argv else len(argv)
    words = []
    for word in argv[:end]:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            flag = flag.replace("_", "-")
            word = OTHER_NAMES.get(flag, flag) + equals + value
        words.append(word)
    return [*words, *argv[end:]]


def nearest(word: str, known: Mapping[str, str]) -> str:
    """`; perhaps X` for the known word that is most like this one, or nothing.

    known: words, and what each is called here.
    """
    found = difflib.get_close_matches(word, list(known), 1)
    return f"; perhaps {known[found[0]]}" if found else ""


def refuse_unknown(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> NoReturn:
    """End with a line on the first word that the parser of a verb did not know."""
    flags = [word.partition("=")[0] for word in unknown if word.startswith("-")]
    if flags:
        if _is_not_built(flags[0]):
            parser.error(f"{flags[0]} is not supported in this version")
        known = {flag: flag for flag in flags_of(parser)}
        others = {other: flag for other, flag in OTHER_NAMES.items() if flag in known}
        parser.error(f"unknown option {flags[0]}{nearest(flags[0], {**known, **others})}")
    hint = "; a text is given with -p" if "--prompt" in flags_of(parser) else ""
    parser.error(f"unexpected argument {unknown[0]!r}{hint}")


def utf8_text(value: str) -> str:
    """The type of an option that is a text for the model."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError("must be UTF-8 text") from None
    return value


def _is_not_built(flag: str) -> bool:
    """True for an engine option that the field knows and this version refuses."""
    from cupaged.engine_args import NOT_BUILT  # costs an import, and only a mistake needs it

    return flag.removeprefix("--").replace("-", "_") in NOT_BUILT
