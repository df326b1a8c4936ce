"""`cupaged completion`: scripts by which a shell completes commands, options and file names.

They are generated from the parser, so they can promise nothing that it does not take.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_FILES = {"FILE", "PATH", "MODEL"}


def add_parser(verbs: Any) -> None:
    """Add the verb to the command."""
    parser = verbs.add_parser(
        "completion",
        help="print a script for completion by the shell",
        usage="cupaged completion {bash,zsh,fish}",
        description="Prints a script that makes the shell complete commands, options and file "
        "names: for bash in ~/.bashrc as shown below, for zsh in a file called _cupaged on its "
        "fpath, for fish in ~/.config/fish/completions/cupaged.fish.",
        example='eval "$(cupaged completion bash)"',
    )
    parser.add_argument("shell", choices=list(SCRIPTS), help="the shell")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    from cupaged.cli.main import build_parser

    print(SCRIPTS[args.shell](read_verbs(build_parser())))
    return 0


@dataclass(frozen=True, slots=True)
class Flag:
    """An option. takes_value: a word follows it; takes_file: and that is a file."""

    names: tuple[str, ...]
    help: str
    takes_value: bool
    takes_file: bool


@dataclass(frozen=True, slots=True)
class Verb:
    """A command. words: what may stand in place of a file name, as the names of shells."""

    name: str
    help: str
    flags: tuple[Flag, ...]
    words: tuple[str, ...]
    takes_file: bool


def read_verbs(parser: argparse.ArgumentParser) -> list[Verb]:
    """What a parser takes, by its commands."""
    (action,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    helps = {id(action.choices[a.dest]): a.help or "" for a in action._choices_actions}
    verbs = []
    for name, verb in action.choices.items():
        places = [a for a in verb._actions if not a.option_strings]
        verbs.append(
            Verb(
                name=name,
                help=_plain(helps[id(verb)]),  # an alias has the same parser
                flags=tuple(_flag(a) for a in verb._actions if a.option_strings),
                words=tuple(str(word) for place in places for word in place.choices or ()),
                takes_file=any(place.metavar in _FILES for place in places),
            )
        )
    return verbs


def _flag(action: argparse.Action) -> Flag:
    takes_value = action.nargs != 0
    return Flag(
        names=tuple(action.option_strings),
        help=_plain(action.help or ""),
        takes_value=takes_value,
        takes_file=takes_value and action.metavar in _FILES,
    )


def _plain(text: str) -> str:
    """A text that no shell finds anything in."""
    return re.sub(r"[^\w ,.;:/()<>=+-]", "", text.replace("%%", "%")).strip()


def bash(verbs: list[Verb]) -> str:
    """Words by `compgen`; readline completes file names where no word fits."""
    cases = []
    for verb in verbs:
        flags = " ".join(name for flag in verb.flags for name in flag.names)
        values = "|".join(n for f in verb.flags if f.takes_value for n in f.names)
        files = "|".join(n for f in verb.flags if f.takes_file for n in f.names)
        cases.append(
            f"    {verb.name}) flags='{flags}' values='{values}' files='{files}' "
            f"words='{' '.join(verb.words)}' place={'file' if verb.takes_file else 'word'} ;;"
        )
    names = " ".join(verb.name for verb in verbs)
    return f"""\
_cupaged() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}}
  local flags='--help --version' values='' files='' words='{names}' place=word
  COMPREPLY=()
  if ((COMP_CWORD > 1)); then
    case ${{COMP_WORDS[1]}} in
{chr(10).join(cases)}
    *) return ;;
    esac
  fi
  if [[ -n $files && "|$files|" == *"|$before|"* ]]; then
    mapfile -t COMPREPLY < <(compgen -f -- "$word")
  elif [[ -n $values && "|$values|" == *"|$before|"* ]]; then
    return
  elif [[ $word == -* ]]; then
    mapfile -t COMPREPLY < <(compgen -W "$flags" -- "$word")
  elif [[ $place == file ]]; then
    mapfile -t COMPREPLY < <(compgen -f -- "$word")
  else
    mapfile -t COMPREPLY < <(compgen -W "$words" -- "$word")
  fi
}}
complete -o filenames -F _cupaged cupaged"""


def zsh(verbs: list[Verb]) -> str:
    """One call of `_arguments` for each command."""
    cases = []
    for verb in verbs:
        specs = [
            f"'{name}[{_zsh_text(flag.help)}]{_zsh_value(flag)}'"
            for flag in verb.flags
            for name in flag.names
        ]
        if verb.takes_file:
            specs.append("'::model:_files'")
        if verb.words:
            specs.append(f"':word:({' '.join(verb.words)})'")
        body = " \\\n      ".join(specs)
        cases.append(f"    {verb.name})\n      _arguments \\\n      {body} ;;")
    commands = "\n".join(f"    '{verb.name}:{_zsh_text(verb.help)}'" for verb in verbs)
    return f"""\
#compdef cupaged
_cupaged() {{
  local -a commands
  commands=(
{commands}
  )
  if ((CURRENT == 2)); then
    _describe command commands
    return
  fi
  local verb=$words[2]
  shift words
  ((CURRENT--))
  case $verb in
{chr(10).join(cases)}
  esac
}}
if [[ $funcstack[1] == _cupaged ]]; then _cupaged "$@"; else compdef _cupaged cupaged; fi"""


def _zsh_text(text: str) -> str:
    return re.sub(r"([:\[\]])", r"\\\1", text)


def _zsh_value(flag: Flag) -> str:
    if not flag.takes_value:
        return ""
    return ":file:_files" if flag.takes_file else ":value:"


def fish(verbs: list[Verb]) -> str:
    """One `complete` for each option of each command."""
    lines = ["complete -c cupaged -f"]
    for verb in verbs:
        lines.append(
            f"complete -c cupaged -n __fish_use_subcommand -a {verb.name} -d '{verb.help}'"
        )
    for verb in verbs:
        inside = f"complete -c cupaged -n '__fish_seen_subcommand_from {verb.name}'"
        if verb.takes_file:
            lines.append(f"{inside} -F")
        if verb.words:
            lines.append(f"{inside} -a '{' '.join(verb.words)}'")
        for flag in verb.flags:
            names = " ".join(
                f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}"
                for name in flag.names
            )
            value = " -r -F" if flag.takes_file else " -x" if flag.takes_value else ""
            lines.append(f"{inside} {names}{value} -d '{flag.help}'")
    return "\n".join(lines)


SCRIPTS: dict[str, Callable[[list[Verb]], str]] = {"bash": bash, "zsh": zsh, "fish": fish}
