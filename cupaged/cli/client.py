"""`cupaged client`: talk to a server of `cupaged serve`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cupaged.cli.chat import DESCRIPTION, add_talk_options
from cupaged.cli.options import add_sampling_options, token_ids
from cupaged.cli.parser import Parser, utf8_text
from cupaged.cli.streams import tell

if TYPE_CHECKING:
    from cupaged.client import Client, ClientError

_DEFAULT_ADDRESS = "127.0.0.1:50051"
FAILURE = 1


def add_parser(verbs: Any) -> None:
    """Add the verb to the command."""
    parser = verbs.add_parser(
        "client",
        help="talk to a server",
        usage="cupaged client COMMAND [options]",
        description="Talks to a server that `cupaged serve` runs, here or elsewhere: generates "
        "text, chats, and asks how the server is.",
        example='cupaged client generate -p "Once upon a time" --max-tokens 40',
    )
    parser.set_defaults(run=lambda args: _without_command(parser))
    commands = parser.add_subparsers(
        title="commands", metavar=f"{'COMMAND':14}", dest="client_verb", prog="cupaged client"
    )
    for add in (_add_generate, _add_chat, _add_health, _add_load):
        add(commands)


def reported(args: argparse.Namespace, run: Callable[[argparse.Namespace, Client], int]) -> int:
    """Connect, run, and tell a failed call on one line, with what can be done about it.

    Raises:
        ConfigError: an option of the connection is out of range, or a file of them is not what it
            must be.
    """
    # The core of gRPC writes its own lines about what the errors say; it reads this when imported.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from cupaged.client import Client, ClientError

    try:
        with Client(
            args.address,
            retries=args.retries,
            timeout=args.timeout,
            ca_file=args.ca_file,
            cert_file=args.cert_file,
            key_file=args.key_file,
            token_file=args.token_file,
            insecure=args.insecure,
        ) as client:
            return run(args, client)
    except ClientError as error:
        tell(f"cupaged: {explained(error, args.address)}")
        return FAILURE


def explained(error: ClientError, address: str) -> str:
    """An error of a call as a person needs it: what, where, and what to do."""
    from cupaged.client import errors

    text = str(error)
    # gRPC tells the whole way to the cause, and the cause comes last.
    if isinstance(error, errors.UnreachableError):
        text = f"{address}: cannot be reached: {error.message.rpartition(': ')[2].strip('[]')}"
    elif isinstance(error, errors.HandshakeError):
        cause = error.message.removesuffix(": OK").rpartition("OPENSSL_internal:")[2]
        cause = cause.removesuffix(": Invalid certificate verification context")
        text = f"{address}: TLS failed: {cause.rpartition('last error: ')[2]}"
    for violation in error.field_violations:
        if violation.field not in text:
            text += f"; {violation.field}: {violation.description}"
    return f"{text}; {error.advice}" if error.advice else text


def _without_command(parser: Parser) -> int:
    parser.error("a command is missing")


def _add_generate(commands: Any) -> None:
    parser = commands.add_parser(
        "generate",
        help="continue a prompt",
        usage="cupaged client generate [-p TEXT | --prompt-file FILE] [options]",
        description="Continues a prompt and prints the answer as it comes; several answers are "
        "printed when all are there, each under a heading. Without a prompt it is standard input; "
        "one line break at the end of a file is not part of it. Ctrl-C ends the request.",
        example='cupaged client generate -p "Once upon a time" -n 2 --max-tokens 40',
    )
    _add_connection(parser)
    group = parser.add_argument_group("prompt and answers")
    prompt = group.add_mutually_exclusive_group()
    prompt.add_argument("-p", "--prompt", metavar="TEXT", type=utf8_text, help="what to continue")
    prompt.add_argument(
        "-f", "--prompt-file", metavar="FILE", help="holds what to continue; - is standard input"
    )
    prompt.add_argument(
        "--prompt-token-ids", metavar="IDS", type=token_ids, help="the same as token ids: 5,17,2"
    )
    group.add_argument("-n", "--num-samples", type=int, metavar="N", help="answers (default: 1)")
    group.add_argument("--json", action="store_true", help="print a line of JSON for each event")
    add_sampling_options(parser, report=True)
    parser.set_defaults(run=_generate)


def _add_chat(commands: Any) -> None:
    parser = commands.add_parser(
        "chat",
        help="talk with the model of a server",
        usage="cupaged client chat [--system TEXT] [options]",
        description=DESCRIPTION,
        example='cupaged client chat --system "Answer in one sentence." --temperature 0.7',
    )
    _add_connection(parser)
    add_talk_options(parser)
    add_sampling_options(parser)
    parser.set_defaults(run=_chat)


def _add_health(commands: Any) -> None:
    parser = commands.add_parser(
        "health",
        help="ask whether a server takes requests",
        usage="cupaged client health [--watch] [options]",
        description="Prints what the server says of itself by grpc.health.v1. The exit code is 0 "
        "if that is SERVING, else 1.",
        example="cupaged client health --address 127.0.0.1:50051",
    )
    _add_connection(parser, model=False)
    parser.add_argument(
        "--service",
        metavar="NAME",
        type=utf8_text,
        default="",
        help="of this service (default: of the server as a whole)",
    )
    parser.add_argument(
        "--watch", action="store_true", help="print a line at every change, until Ctrl-C"
    )
    parser.set_defaults(run=_health)


def _add_load(commands: Any) -> None:
    parser = commands.add_parser(
        "load",
        help="ask how busy a server is",
        usage="cupaged client load [--watch] [options]",
        description="Prints what the engine of a server does: sequences, queue, KV cache, tokens.",
        example="cupaged client load --watch --interval 2",
    )
    _add_connection(parser)
    parser.add_argument("--watch", action="store_true", help="again and again, until Ctrl-C")
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="S", help="seconds between (default: 1)"
    )
    parser.add_argument("--json", action="store_true", help="print a line of JSON each time")
    parser.set_defaults(run=_load)


def _add_connection(parser: Parser, *, model: bool = True) -> None:
    parser.add_argument("-v", "--verbose", action="store_true", help="log what happens to stderr")
    group = parser.add_argument_group("server")
    group.add_argument(
        "-a",
        "--address",
        metavar="ADDRESS",
        default=_DEFAULT_ADDRESS,
        help=f"host:port, grpcs://host:port, unix:/path (default: {_DEFAULT_ADDRESS})",
    )
    if model:
        group.add_argument(
            "-m", "--model", metavar="NAME", type=utf8_text, default="",
            help="of a model that it serves (default: its only one)",
        )  # fmt: skip
    group.add_argument("--ca-file", metavar="FILE", help="PEM: whom to trust; turns TLS on")
    group.add_argument("--cert-file", metavar="FILE", help="PEM: certificate of this client")
    group.add_argument("--key-file", metavar="FILE", help="PEM: its key")
    group.add_argument(
        "--token-file", metavar="FILE", help="holds the token (default: that in CUPAGED_API_KEY)"
    )
    group.add_argument(
        "--insecure", action="store_true", help="send the token without TLS to another machine"
    )
    group.add_argument(
        "--timeout",
        type=float,
        metavar="S",
        help="seconds for a call with its retries (default: no limit; health, load: 5)",
    )
    group.add_argument(
        "--retries", type=int, default=3, metavar="N", help="of a call, before its first token "
        "(default: 3)",
    )  # fmt: skip


def _generate(args: argparse.Namespace) -> int:
    from cupaged.cli.client_generate import run

    return run(args)


def _chat(args: argparse.Namespace) -> int:
    from cupaged.cli.client_chat import run

    return run(args)


def _health(args: argparse.Namespace) -> int:
    from cupaged.cli.client_state import health

    return reported(args, health)


def _load(args: argparse.Namespace) -> int:
    from cupaged.cli.client_state import load

    return reported(args, load)
