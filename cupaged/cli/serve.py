"""`cupaged serve`: the gRPC service of one model. Its options, as a table; the rest is `server`."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from cupaged.cli.options import (
    ENGINE,
    Option,
    add_groups,
    add_model,
    chosen_model,
    given_options,
    size_in_bytes,
)

_INT: dict[str, Any] = {"type": int, "metavar": "N"}
_PORT: dict[str, Any] = {"type": int, "metavar": "PORT"}
_SECONDS: dict[str, Any] = {"type": float, "metavar": "S"}
_FILE: dict[str, Any] = {"metavar": "FILE"}
_NAME: dict[str, Any] = {"metavar": "NAME"}
_ON: dict[str, Any] = {"action": "store_const", "const": True}

SERVE = {
    "where it listens": (
        Option("--host", "address (default: 127.0.0.1)", {"metavar": "ADDRESS"}),
        Option("--port", "of gRPC, 0 for any free one (default: 50051)", _PORT),
        Option("--uds", "a unix socket instead", {"metavar": "PATH"}),
        Option("--frontends", "processes that speak gRPC (default: 1)", _INT),
        Option("--admin-port", "of AdminService on that host (default: none)", _PORT),
        Option(
            "--services",
            "which are served: v1, kserve, vllm (may be repeated; default: all)",
            {"metavar": "NAME", "action": "append"},
        ),
        Option("--openai", "an OpenAI API over HTTP, by the gateway smg (pip install smg)", _ON),
        Option("--openai-port", "of it, 0 for any free one (default: 8000)", _PORT),
        Option("--insecure", "allow a public address without TLS and tokens", _ON),
    ),
    "who may call": (
        Option("--ssl-certfile", "certificate of the server, PEM", _FILE),
        Option("--ssl-keyfile", "its private key, PEM", _FILE),
        Option("--ssl-ca-certs", "clients have to show a certificate of one of these", _FILE),
        Option(
            "--api-key-file", "bearer tokens, one a line (or one in CUPAGED_API_KEY)", _FILE
        ),
    ),
    "the model's name and template": (
        Option(
            "--served-model-name",
            "name for requests (may be repeated; default: what MODEL is called)",
            {"metavar": "NAME", "action": "append"},
        ),
        Option("--chat-template", "Jinja file, or name of one of the model's", _FILE),
    ),
    "starting again, and ending": (
        Option("--restart-engine", "start the engine again when it dies", _ON),
        Option(
            "--drain-delay",
            "after SIGTERM, refuse requests for so long before the port closes (default: 0)",
            _SECONDS,
        ),
        Option(
            "--drain-timeout", "most seconds that requests may then still take (default: 30)",
            _SECONDS,
        ),
    ),
    "connections": (
        Option(
            "--max-message-bytes",
            "largest message (default: 64MiB)",
            {"type": size_in_bytes, "metavar": "SIZE"},
        ),
        Option(
            "--stream-buffer-tokens",
            "tokens that may wait for a slow reader, then it is cut off (default: 16384)",
            _INT,
        ),
        Option("--keepalive-time", "ping a silent client after so long (default: 60)", _SECONDS),
        Option("--keepalive-timeout", "and wait so long for an answer (default: 20)", _SECONDS),
        Option("--min-ping-interval", "clients may ping so often (default: 10)", _SECONDS),
        Option("--max-connection-age", "then clients connect anew (default: no limit)", _SECONDS),
    ),
    "metrics, logs, traces": (
        Option(
            "--metrics-port",
            "of /metrics, /livez and /readyz; 0 for any free one, -1 for none (default: 9090)",
            _PORT,
        ),
        Option("--metrics-host", "their address (default: that of gRPC)", {"metavar": "ADDRESS"}),
        Option("--metrics-compat", "vllm: show the metrics under its names, too", _NAME),
        Option("--log-format", "text or json (default: text)", _NAME),
        Option("--log-level", "debug, info, warning or error (default: info)", _NAME),
        Option("--log-prompts", "prompts may stand in the log", _ON),
        Option("--disable-log-stats", "no line of numbers every ten seconds", _ON),
        Option("--otlp-endpoint", "send traces there (needs the extra otel)", {"metavar": "URL"}),
        Option("--debug-errors", "clients see the stack of an internal error", _ON),
    ),
    "for measurements": (
        Option("--runner", "null: compute nothing (default: model)", _NAME),
        Option(
            "--null-steps-per-s", "pace of the null runner (default: none)",
            {"type": float, "metavar": "X"},
        ),
    ),
}  # fmt: skip
_HELP = {
    "--max-num-queued-reqs": "most requests that wait (default: 256)",
    "--max-num-queued-tokens": "most tokens that wait (default: 1000000)",
}
ENGINE_OPTIONS = {
    title: tuple(o._replace(help=_HELP.get(o.flags, o.help)) for o in options)
    for title, options in ENGINE.items()
}


def add_parser(verbs: Any) -> None:
    """Add the verb to the command."""
    parser = verbs.add_parser(
        "serve",
        help="serve a model over gRPC",
        usage="cupaged serve [MODEL] [options]",
        description="Serves cupaged.v1 until SIGTERM or Ctrl-C; then requests that run may end, "
        "and a second signal forces the end. One line on standard output says where, as soon as "
        "the model is loaded; the log goes to standard error. Every option may also stand in a "
        "TOML file (--config) and in the environment (--max-num-seqs is CUPAGED_MAX_NUM_SEQS).",
        example="cupaged serve --port 50051 --max-num-seqs 128 --restart-engine",
    )
    add_model(parser)
    parser.add_argument(
        "--config", metavar="FILE", help="TOML file of options; flags and environment go before it"
    )
    add_groups(parser, {**SERVE, **ENGINE_OPTIONS})
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve; the exit code of the supervisor."""
    from cupaged.server import log_setup
    from cupaged.server.log_output import LogOutput
    from cupaged.server.settings_sources import load_settings
    from cupaged.server.supervisor import Supervisor

    settings = load_settings(flags(args))
    with LogOutput(sys.stderr.fileno()) as output:
        log_setup.configure(
            "supervisor",
            log_format=settings.log_format,
            level=settings.log_level,
            stream=output,
        )
        return Supervisor(settings, stderr=output).run()


def flags(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that the command line gives."""
    given = {**given_options(args, SERVE), **given_options(args, ENGINE)}
    for name in ("served_model_name", "services"):
        if name in given:
            given[name] = tuple(given[name])
    if (model := chosen_model(args)) is not None:
        given["model"] = model
    if args.config is not None:
        given["config"] = args.config
    if args.verbose:
        given.setdefault("log_level", "debug")
    return given
