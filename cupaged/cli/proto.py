"""`cupaged proto`: the .proto files of the gRPC service, for clients in other languages."""

from __future__ import annotations

import argparse
import os
import re
import shlex
from pathlib import Path
from typing import Any

from cupaged.cli.parser import Parser, nearest
from cupaged.cli.streams import StreamError, reason
from cupaged.errors import ConfigError

_FOLDER = Path(__file__).resolve().parents[1] / "server" / "proto"
_PACKAGE = "cupaged/v1"
# A definition at the top of a file: its comment, its first line, all up to the closing brace.
_DEFINITION = re.compile(
    r"(?:^//[^\n]*\n)*^(?:message|enum|service) (\w+) \{(?:\}|.*?^\})\n", re.DOTALL | re.MULTILINE
)
_RPC = re.compile(r"^  rpc (\w+)\((\w+)\) returns \((stream )?(\w+)\)", re.MULTILINE)


def add_parser(verbs: Any) -> None:
    """Add the verb to the command."""
    parser = verbs.add_parser(
        "proto",
        help="give the .proto files of the gRPC service",
        usage="cupaged proto COMMAND [options]",
        description="Gives the definition of the gRPC service, from which protoc or buf make "
        "clients in other languages. Clients in Python are in cupaged.client, and the messages "
        "in cupaged.v1.",
        example="cupaged proto export protos",
    )
    parser.set_defaults(run=lambda args: _without_command(parser))
    commands = parser.add_subparsers(
        title="commands", metavar=f"{'COMMAND':14}", dest="proto_verb", prog="cupaged proto"
    )
    _add_export(commands)
    _add_show(commands)


def _without_command(parser: Parser) -> int:
    parser.error("a command is missing")


def _add_export(commands: Any) -> None:
    parser = commands.add_parser(
        "export",
        help="write the .proto files into a folder",
        usage="cupaged proto export DIR [--force]",
        description=f"Writes the .proto files into DIR/{_PACKAGE}. A file that is there with "
        "other contents is left alone, and then nothing is written.",
        example="cupaged proto export protos",
    )
    parser.add_argument("folder", metavar="DIR", help="where; made if it is not there")
    parser.add_argument("--force", action="store_true", help="replace files that differ")
    parser.set_defaults(run=_export)


def _add_show(commands: Any) -> None:
    parser = commands.add_parser(
        "show",
        help="print what the service takes and gives",
        usage="cupaged proto show [NAME]",
        description="Prints the services with their RPCs; with a name that file, service, message "
        "or enum, with the comments that tell units, defaults and what is refused.",
        example="cupaged proto show SamplingOptions",
    )
    parser.add_argument(
        "name", metavar="NAME", nargs="?", help="a file, or anything that is defined in one"
    )
    parser.set_defaults(run=_show)


def _export(args: argparse.Namespace) -> int:
    folder = Path(args.folder)
    target = folder / _PACKAGE
    files = {target / name: text for name, text in proto_files().items()}
    differing = [path for path, text in files.items() if _differs(path, text)]
    if differing and not args.force:
        raise StreamError(
            f"{differing[0]}: is there already and differs; nothing was written; "
            "--force replaces it"
        )
    target.mkdir(parents=True, exist_ok=True)
    for path, text in files.items():
        is_new = not path.exists()
        if is_new or path in differing:
            _write(path, text)
        print(f"{'wrote' if is_new else 'replaced' if path in differing else 'unchanged'} {path}")
    root, package = shlex.quote(str(folder)), shlex.quote(str(target))
    print(f"\nfor example: protoc -I {root} --java_out=. {package}/*.proto")
    return 0


def _differs(path: Path, text: str) -> bool:
    """True when something else stands there already."""
    try:
        return path.read_bytes() != text.encode()
    except FileNotFoundError:
        return False


def _write(path: Path, text: str) -> None:
    """All or nothing, also for whoever reads it meanwhile."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8", newline="\n")
        unfinished.replace(path)
    except OSError as error:
        raise StreamError(f"{path}: cannot be written: {reason(error)}") from None
    finally:
        unfinished.unlink(missing_ok=True)


def _show(args: argparse.Namespace) -> int:
    print(_overview() if args.name is None else _text_of(args.name).rstrip("\n"))
    return 0


def proto_files() -> dict[str, str]:
    """Texts of the .proto files by their names; they are in the folder `cupaged/v1`."""
    paths = sorted((_FOLDER / _PACKAGE).glob("*.proto"))
    return {path.name: path.read_text(encoding="utf-8") for path in paths}


def definitions() -> dict[str, str]:
    """What the files define, by its name: services, messages, enums, with their comments."""
    texts = proto_files().values()
    return {found[1]: found[0] for text in texts for found in _DEFINITION.finditer(text)}


def _overview() -> str:
    lines = []
    for file, text in proto_files().items():
        for found in _DEFINITION.finditer(text):
            rpcs = _RPC.findall(found[0])
            if rpcs:
                lines.append(f"{_PACKAGE}/{file}: {found[1]}")
                width = max(len(rpc[0]) for rpc in rpcs)
                lines += [f"  {name:{width}}  {q} -> {s}{r}" for name, q, s, r in rpcs]
    return "\n".join(lines)


def _text_of(name: str) -> str:
    """A file, or a definition; ConfigError names the most like one there is."""
    known = {**proto_files(), **definitions()}
    plain = name.removeprefix("cupaged.v1.").removeprefix(f"{_PACKAGE}/")
    for word in (plain, f"{plain}.proto"):
        if word in known:
            return known[word]
    hint = nearest(plain, {word: word for word in known})
    raise ConfigError("NAME", name, f"a file or a name that the files define{hint}")
