"""`cupaged bench`: measure a server under load, or the engine in this process.

The flags are those of `vllm bench`; what differs is how a server is named.
"""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from cupaged.cli.bench_options import (
    add_dataset_options,
    add_serve_options,
    dataset_options,
    serve_benchmark,
)
from cupaged.cli.options import add_engine_options, add_model, engine_options
from cupaged.cli.parser import Parser
from cupaged.cli.streams import tell

if TYPE_CHECKING:
    from cupaged.llm import LLM

FAILURE = 1


def add_parser(verbs: Any) -> None:
    """Add the verb to the command."""
    parser = verbs.add_parser(
        "bench",
        help="measure a server or the engine",
        usage="cupaged bench COMMAND [options]",
        description="Measures a server under a load of requests, or the engine in this process. "
        "Flags, printed lines and the keys of the JSON are those of vllm bench.",
        example="cupaged bench serve --num-prompts 100 --request-rate 4",
    )
    parser.set_defaults(run=lambda args: _without_command(parser))
    commands = parser.add_subparsers(
        title="commands", metavar=f"{'COMMAND':14}", dest="bench_verb", prog="cupaged bench"
    )
    for add in (_add_serve, _add_latency, _add_throughput):
        add(commands)


def _without_command(parser: Parser) -> int:
    parser.error("a command is missing")


def _add_serve(commands: Any) -> None:
    parser = commands.add_parser(
        "serve",
        help="put a load on a server",
        usage="cupaged bench serve [--num-prompts N] [--request-rate R] [options]",
        description="Sends requests to a server at times drawn from a seed, whether or not earlier "
        "ones have been answered, and reports latencies and throughputs as its clients see them. "
        "The report also tells how late the load generator was and what processor time it took. "
        "The exit code is 1 if every request failed.",
        example="cupaged bench serve --num-prompts 100 --random-input-len 64",
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="log what happens to stderr")
    add_serve_options(parser)
    parser.set_defaults(run=_serve)


def _add_latency(commands: Any) -> None:
    parser = commands.add_parser(
        "latency",
        help="time of one batch in this process",
        usage="cupaged bench latency [MODEL] [options]",
        description="Runs one batch of equal requests again and again, and reports how long it "
        "takes from its start to its last token.",
        example="cupaged bench latency --output-len 16 --batch-size 4 --num-iters 5",
    )
    add_model(parser)
    group = parser.add_argument_group("batch")
    for flag, default, text in (
        ("--input-len", 32, "tokens of a prompt"),
        ("--output-len", 128, "tokens of an answer"),
        ("--batch-size", 8, "requests"),
        ("--n", 1, "samples of a request"),
        ("--num-iters-warmup", 10, "runs before the clock counts"),
        ("--num-iters", 30, "runs that count"),
    ):
        group.add_argument(
            flag, type=int, default=default, metavar="N", help=f"{text} (default: {default})"
        )
    _add_offline_report(group)
    add_engine_options(parser)
    parser.set_defaults(run=_latency)


def _add_throughput(commands: Any) -> None:
    parser = commands.add_parser(
        "throughput",
        help="tokens a second in this process",
        usage="cupaged bench throughput [MODEL] [options]",
        description="Hands all requests to the engine at once, and reports requests and tokens a "
        "second. Answers go on after the end of a text, to their whole length.",
        example="cupaged bench throughput --num-prompts 32 --random-input-len 64",
    )
    add_model(parser)
    add_dataset_options(parser)
    group = parser.add_argument_group("report")
    group.add_argument(
        "--n", type=int, default=1, metavar="N", help="samples of a request (default: 1)"
    )
    _add_offline_report(group)
    add_engine_options(parser)
    parser.set_defaults(run=_throughput)


def _add_offline_report(group: Any) -> None:
    group.add_argument(
        "--disable-detokenize", action="store_true", help="make token ids only, no text"
    )
    group.add_argument("--output-json", metavar="FILE", help="where the numbers are saved")


def _serve(args: argparse.Namespace) -> int:
    # The core of gRPC writes its own lines about what the errors say; it reads this when imported.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from cupaged.benchmarks.serve import keep, run
    from cupaged.cli.client import explained
    from cupaged.client.errors import ClientError

    benchmark = serve_benchmark(args)
    try:
        done = run(benchmark, tell=tell, bar=None if args.disable_tqdm else _bar)
    except ClientError as error:
        tell(f"cupaged: {explained(error, benchmark.server.address)}")
        return FAILURE
    for line in done.lines:
        print(line)
    for note in done.notes:
        tell(note)
    for file in keep(benchmark, done):
        tell(f"written: {file}")
    return 0 if done.result["completed"] else FAILURE


def _latency(args: argparse.Namespace) -> int:
    from cupaged.benchmarks.offline import Latency, latency_lines

    benchmark = Latency(
        input_len=args.input_len,
        output_len=args.output_len,
        batch_size=args.batch_size,
        n=args.n,
        num_iters_warmup=args.num_iters_warmup,
        num_iters=args.num_iters,
        detokenize=not args.disable_detokenize,
    )
    llm = _llm(args)
    bar = _bar(benchmark.num_iters_warmup + benchmark.num_iters)
    try:
        result = benchmark.run(llm, bar.update)
    finally:
        bar.close()
    return _print_and_save(args, result, latency_lines(result))


def _throughput(args: argparse.Namespace) -> int:
    from cupaged.benchmarks.offline import throughput, throughput_lines
    from cupaged.cli.options import chosen_model

    dataset = dataset_options(args)
    llm = _llm(args)
    result = throughput(
        llm,
        dataset,
        name=chosen_model(args) or "the default model",
        n=args.n,
        detokenize=not args.disable_detokenize,
    )
    return _print_and_save(args, result, throughput_lines(result))


def _print_and_save(args: argparse.Namespace, result: dict[str, Any], lines: list[str]) -> int:
    from pathlib import Path

    from cupaged.benchmarks import report

    for line in lines:
        print(line)
    if args.output_json is not None:
        report.save(Path(args.output_json), result | {"versions": report.versions()})
    return 0


def _llm(args: argparse.Namespace) -> LLM:
    options = engine_options(args)
    from cupaged.llm import LLM

    return LLM(**options)


def _bar(total: int) -> Any:
    """A progress bar where standard error is a terminal."""
    from tqdm import tqdm

    return tqdm(total=total, disable=None, unit="request", leave=False)
