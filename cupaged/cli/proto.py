"""`cupaged proto`: the .proto files of the gRPC services, for clients in other languages."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path
from typing import Any

from cupaged.cli.parser import Parser, nearest
from cupaged.cli.streams import StreamError, reason
from cupaged.errors import ConfigError
from cupaged.server.proto_files import all_files

_OWN = "cupaged/v1"


def add_parser(verbs: Any) -> None:
    """Add the verb to the command."""
    parser = verbs.add_parser(
        "proto",
        help="give the .proto files of the gRPC services",
        usage="cupaged proto COMMAND [options]",
        description="Gives the definitions of the gRPC services, from which protoc or buf make "
        "clients in other languages, and which programs such as grpcurl or Envoy load as they "
        "are. Clients in Python are in cupaged.client, and the messages in cupaged.v1.",
        example="cupaged proto export protos",
    )
    parser.set_defaults(run=lambda args: _without_command(parser))
    commands = parser.add_subparsers(
        title="commands", metavar=f"{'COMMAND':14}", dest="proto_verb", prog="cupaged proto"
    )
    _add_export(commands)
    _add_descriptors(commands)
    _add_show(commands)


def _without_command(parser: Parser) -> int:
    parser.error("a command is missing")


def _add_export(commands: Any) -> None:
    parser = commands.add_parser(
        "export",
        help="write the .proto files into a folder",
        usage="cupaged proto export DIR [--force]",
        description=f"Writes the .proto files of cupaged.v1 into DIR/{_OWN}, and those of other "
        "servers' services into DIR. A file that is there with other contents is left alone, and "
        "then nothing is written.",
        example="cupaged proto export protos",
    )
    parser.add_argument("folder", metavar="DIR", help="where; made if it is not there")
    parser.add_argument("--force", action="store_true", help="replace files that differ")
    parser.set_defaults(run=_export)


def _add_descriptors(commands: Any) -> None:
    parser = commands.add_parser(
        "descriptors",
        help="write all services as one descriptor set",
        usage="cupaged proto descriptors FILE [--force]",
        description="Writes a descriptor set of all services, also those of other servers, with "
        "all that they import, the details of errors, and the HTTP paths of cupaged.v1: for "
        "grpcurl, or for Envoy's gRPC-JSON transcoder. A file that is there with other contents "
        "is left alone.",
        example="cupaged proto descriptors cupaged.binpb",
    )
    parser.add_argument("file", metavar="FILE", help="where; its folder has to be there")
    parser.add_argument("--force", action="store_true", help="replace a file that differs")
    parser.set_defaults(run=_descriptors)


def _add_show(commands: Any) -> None:
    parser = commands.add_parser(
        "show",
        help="print what the services take and give",
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
    files = {folder / file.name: file.text.encode() for file in all_files()}
    _check(files, args.force)
    (folder / _OWN).mkdir(parents=True, exist_ok=True)
    _save(files)
    root, package = shlex.quote(str(folder)), shlex.quote(str(folder / _OWN))
    print(f"\nfor example: protoc -I {root} --java_out=. {package}/*.proto")
    return 0


def _descriptors(args: argparse.Namespace) -> int:
    from cupaged.server.descriptor_set import descriptor_set

    files = {Path(args.file): descriptor_set().SerializeToString(deterministic=True)}
    _check(files, args.force)
    _save(files)
    print(f"\nfor example: grpcurl -protoset {shlex.quote(args.file)} list")
    return 0


def _check(files: dict[Path, bytes], force: bool) -> None:
    """Refuse to lose what stands there already."""
    for path, data in files.items():
        if _differs(path, data) and not force:
            raise StreamError(
                f"{path}: is there already and differs; nothing was written; --force replaces it"
            )


def _save(files: dict[Path, bytes]) -> None:
    for path, data in files.items():
        is_new, differs = not path.exists(), _differs(path, data)
        if is_new or differs:
            _write(path, data)
        print(f"{'wrote' if is_new else 'replaced' if differs else 'unchanged'} {path}")


def _differs(path: Path, data: bytes) -> bool:
    """True when something else stands there already."""
    try:
        return path.read_bytes() != data
    except FileNotFoundError:
        return False


def _write(path: Path, data: bytes) -> None:
    """All or nothing, also for whoever reads it meanwhile."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_bytes(data)
        unfinished.replace(path)
    except OSError as error:
        raise StreamError(f"{path}: cannot be written: {reason(error)}") from None
    finally:
        unfinished.unlink(missing_ok=True)


def _show(args: argparse.Namespace) -> int:
    print(_overview() if args.name is None else _text_of(args.name).rstrip("\n"))
    return 0


def _overview() -> str:
    lines = []
    for file in all_files():
        for name, rpcs in file.services().items():
            lines.append(f"{file.name}: {name}")
            width = max(len(rpc[0]) for rpc in rpcs)
            lines += [f"  {rpc:{width}}  {q} -> {r}" for rpc, q, r in rpcs]
    return "\n".join(lines)


def _text_of(name: str) -> str:
    """A file, or a definition; ConfigError names the most like one there is.

    Of definitions that share a name, that of `cupaged.v1` is meant where no package stands before.
    """
    known: dict[str, str] = {}
    for file in all_files():
        found = {file.name: file.text, file.name.rpartition("/")[2]: file.text}
        found |= {full.rpartition(".")[2]: text for full, text in file.definitions().items()}
        known = {**found, **file.definitions(), **known}
    for word in (name, f"{name}.proto"):
        if word in known:
            return known[word]
    hint = nearest(name, {word: word for word in known})
    raise ConfigError("NAME", name, f"a file or a name that the files define{hint}")
