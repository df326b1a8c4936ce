"""The options of `cupaged bench serve`, and what they mean to the benchmark."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from cupaged.cli.options import Option
from cupaged.errors import ConfigError

if TYPE_CHECKING:
    from cupaged.benchmarks.datasets import DatasetOptions
    from cupaged.benchmarks.serve import ServeBenchmark

_INT: dict[str, Any] = {"type": int, "metavar": "N"}
_FLOAT: dict[str, Any] = {"type": float, "metavar": "X"}
_FILE: dict[str, Any] = {"metavar": "FILE"}
_NAME: dict[str, Any] = {"metavar": "NAME"}
_SECONDS: dict[str, Any] = {"type": float, "metavar": "S"}
_ON: dict[str, Any] = {"action": "store_true"}


def percentiles(text: str) -> tuple[float, ...]:
    """`99` or `50,90,99.9`."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be numbers such as 50,99, got {text!r}") from None


def names(text: str) -> tuple[str, ...]:
    """`ttft` or `ttft,tpot`."""
    return tuple(part.strip() for part in text.split(","))


def limit(text: str) -> tuple[str, float]:
    """`ttft:500`."""
    name, _, value = text.partition(":")
    try:
        return name, float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be a latency and milliseconds such as ttft:500, got {text!r}"
        ) from None


def pair(text: str) -> tuple[str, str]:
    """`KEY=VALUE`."""
    key, equals, value = text.partition("=")
    if not key.strip() or not equals:
        raise argparse.ArgumentTypeError(f"must be KEY=VALUE, got {text!r}")
    return key.strip(), value.strip()


SERVER = (
    Option("--backend", "protocol of the server: cupaged, triton, openai, openai-chat "
           "(default: cupaged)", {**_NAME, "default": "cupaged"}),
    Option("--host", "of the server (default: 127.0.0.1)", _NAME),
    Option("--port", "of the server (default: 50051; triton: 8001; openai: 8000)", _INT),
    Option("-a --address", "in place of host and port: HOST:PORT, grpcs://HOST:PORT, unix:/path; "
           "openai: http://HOST:PORT, https://HOST:PORT/PATH", {"metavar": "ADDRESS"}),
    Option("-m --model", "of a model that it serves (default: its only one)",
           {**_NAME, "default": ""}),
    Option("--tokenizer", "of that model: folder, .gguf file or name; needed by triton and openai, "
           "which take texts, for all but custom", {"metavar": "MODEL"}),
    Option("--ca-file", "PEM: whom to trust; turns TLS on", _FILE),
    Option("--cert-file", "PEM: certificate of this client", _FILE),
    Option("--key-file", "PEM: its key", _FILE),
    Option("--token-file", "holds the token (default: that in CUPAGED_API_KEY)", _FILE),
    Option("--insecure", "send the token without TLS to another machine", _ON),
    Option("--connections", "over which requests are spread; a server with several front ends "
           "gives each to one of them; not with openai, which has one a request (default: 1)",
           {**_INT, "default": 1}),
    Option("--ready-check-timeout-sec", "wait up to S for a server that is not ready "
           "(default: 0)", {**_SECONDS, "default": 0.0}),
    Option("--timeout", "deadline of each request (default: none)", _SECONDS),
)  # fmt: skip
DATASET = (
    Option("--dataset-name", "random: made-up token ids; sharegpt, custom: texts of a file; trace: "
           "recorded lengths and times (default: random)", {**_NAME, "default": "random"}),
    Option("--dataset-path", "the file of all but random", _FILE),
    Option("--num-prompts", "requests (default: 1000)", {**_INT, "default": 1000}),
    Option("--seed", "equal seeds give equal requests at equal times (default: 0)",
           {**_INT, "default": 0}),
    Option("--random-input-len", "tokens of a prompt (default: 1024)", _INT),
    Option("--random-output-len", "tokens of an answer (default: 128)", _INT),
    Option("--random-range-ratio", "lengths vary by that share of them (default: 0)", _FLOAT),
    Option("--random-prefix-len", "tokens before them that all prompts share (default: 0)", _INT),
    Option("--sharegpt-output-len", "tokens of an answer (default: of the file's answer)", _INT),
    Option("--custom-output-len", "tokens of an answer (default: output_tokens of the line, "
           "else 256)", _INT),
    Option("--skip-chat-template", "send custom prompts as plain texts, not as messages", _ON),
    Option("--disable-shuffle", "keep the order of a file of texts", _ON),
)  # fmt: skip
ARRIVALS = (
    Option("--request-rate", "requests a second, or inf: all at once (default: the times of a "
           "trace, else inf)", _FLOAT),
    Option("--burstiness", "1: a Poisson process; less: bunches; more: more regular; inf: a beat "
           "(default: 1)", {**_FLOAT, "default": 1.0}),
    Option("--trace-speed", "how much faster a trace is replayed (default: 1)", _FLOAT),
    Option("--max-concurrency", "most requests under way at once (default: no limit)", _INT),
    Option("--num-warmups", "times that the first request is sent beforehand (default: 0)",
           {**_INT, "default": 0}),
)  # fmt: skip
SAMPLING = (
    Option("--ignore-eos", "go on after the end of a text (always with random and trace)", _ON),
    Option("--temperature", "0 takes the likeliest token", _FLOAT),
    Option("--top-p", "keep the likeliest tokens of this mass", _FLOAT),
    Option("--top-k", "keep that many of the likeliest", _INT),
    Option("--min-p", "drop tokens below this share of the best one", _FLOAT),
    Option("--presence-penalty", "-2 to 2, for tokens in the answer", _FLOAT),
    Option("--frequency-penalty", "-2 to 2, for each time they occur", _FLOAT),
    Option("--repetition-penalty", "> 1 against tokens seen before", _FLOAT),
)
REPORT = (
    Option("--percentile-metrics", "latencies to print, of ttft, tpot, itl, e2el, "
           "client_queue_time, e2el_including_client_queue (default: ttft,tpot,itl)",
           {"type": names, "metavar": "NAMES", "default": ("ttft", "tpot", "itl")}),
    Option("--metric-percentiles", "of the latencies (default: 99)",
           {"type": percentiles, "metavar": "LIST", "default": (99.0,)}),
    Option("--goodput", "count requests within these milliseconds, such as ttft:500 tpot:50; "
           "of ttft, tpot, e2el", {"type": limit, "metavar": "KEY:MS", "nargs": "+"}),
    Option("--disable-tqdm", "show no progress bar", _ON),
    Option("--plot", "draw the run", {"metavar": "FILE.svg"}),
    Option("--save-result", "save the numbers, and TTFT, ITLs and error of each request, as JSON",
           _ON),
    Option("--save-detailed", "with lengths and times of each request too", _ON),
    Option("--append-result", "as a further line of the file", _ON),
    Option("--result-dir", "where to (default: the current folder)", {"metavar": "FOLDER"}),
    Option("--result-filename", "(default: LABEL-RATEqps-MODEL-DATE.json)", _FILE),
    Option("--label", "of the result (default: the backend)", _NAME),
    Option("--metadata", "saved with the result",
           {"type": pair, "metavar": "KEY=VALUE", "nargs": "+"}),
    Option("--request-id-prefix", "of the requests' ids (default: drawn)", _NAME),
)  # fmt: skip
_NOTES = {
    "server": """\
cupaged speaks cupaged.v1; triton speaks inference.GRPCInferenceService with
the tensors of Triton's vLLM backend; openai asks /v1/completions, openai-chat
/v1/chat/completions, both streamed (they need cupaged[bench]).""",
    "requests": """\
A file of sharegpt is a list of conversations; one of custom has lines such as
{"prompt": "...", "output_tokens": 40}. A trace is one of: a CSV file with the
columns TIMESTAMP, ContextTokens, GeneratedTokens (Azure's), or with
input_tokens, output_tokens and perhaps time_s; JSON lines with timestamp in
ms, input_length, output_length and perhaps hash_ids, each of 512 tokens
(Mooncake's).""",
    "sampling": "What is left out the server chooses.",
}
_CONNECTION = ("ca_file", "cert_file", "key_file", "token_file", "insecure")


def add_serve_options(parser: argparse.ArgumentParser) -> None:
    """Every option of `cupaged bench serve`."""
    for title, options in (
        ("server", SERVER), ("requests", DATASET), ("arrivals", ARRIVALS),
        ("sampling", SAMPLING), ("report", REPORT),
    ):  # fmt: skip
        _add(parser, title, options)


def add_dataset_options(parser: argparse.ArgumentParser) -> None:
    """Which requests."""
    _add(parser, "requests", DATASET)


def dataset_options(args: argparse.Namespace) -> DatasetOptions:
    """Which requests; ConfigError for what does not go together."""
    from cupaged.benchmarks.datasets import DatasetOptions

    given = {option.dest: getattr(args, option.dest) for option in DATASET}
    return DatasetOptions(name=given.pop("dataset_name"), path=given.pop("dataset_path"), **given)


def serve_benchmark(args: argparse.Namespace) -> ServeBenchmark:
    """The benchmark that the options ask for; ConfigError for what is out of range."""
    from cupaged.benchmarks.arrivals import Arrivals
    from cupaged.benchmarks.backend import BackendOptions
    from cupaged.benchmarks.metrics import Selection
    from cupaged.benchmarks.serve import ServeBenchmark

    sampling = {
        option.dest: value
        for option in SAMPLING
        if (value := getattr(args, option.dest)) is not None and value is not False  # 0 is a value
    }
    if args.dataset_name in ("random", "trace"):
        sampling["ignore_eos"] = True
    for name in ("save_detailed", "result_dir", "result_filename"):
        if getattr(args, name) and not (args.save_result or args.append_result):
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(flag, getattr(args, name), "given with --save-result")
    return ServeBenchmark(
        backend=args.backend,
        server=BackendOptions(
            address=_address(args),
            model=args.model,
            connections=args.connections,
            timeout_s=args.timeout,
            sampling=sampling,
            connection={name: getattr(args, name) for name in _CONNECTION},
        ),
        dataset=dataset_options(args),
        arrivals=Arrivals(
            request_rate=args.request_rate,
            burstiness=args.burstiness,
            trace_speed=args.trace_speed,
            seed=args.seed,
        ),
        selection=Selection(
            metrics=args.percentile_metrics,
            percentiles=args.metric_percentiles,
            goodput=dict(args.goodput or ()),
        ),
        tokenizer=args.tokenizer,
        max_concurrency=args.max_concurrency,
        num_warmups=args.num_warmups,
        ready_wait_s=args.ready_check_timeout_sec,
        request_id_prefix=args.request_id_prefix,
        label=args.label,
        metadata=dict(args.metadata or ()),
        save=args.save_result or args.append_result,
        save_detailed=args.save_detailed,
        append_result=args.append_result,
        result_dir=args.result_dir,
        result_filename=args.result_filename,
        plot=args.plot,
    )


def _address(args: argparse.Namespace) -> str:
    from cupaged.benchmarks.backend import BACKENDS

    if args.address is None:
        host = args.host or "127.0.0.1"
        kind = BACKENDS.get(args.backend, BACKENDS["cupaged"])
        port = kind.port if args.port is None else args.port
        if not 0 < port < 65536:
            raise ConfigError("--port", port, "in [1, 65535]")
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if args.host is not None or args.port is not None:
        raise ConfigError("--address", args.address, "left out where --host or --port is given")
    return str(args.address)


def _add(parser: argparse.ArgumentParser, title: str, options: tuple[Option, ...]) -> None:
    group = parser.add_argument_group(title, _NOTES.get(title))
    for option in options:
        group.add_argument(*option.flags.split(), help=option.help, **option.settings)
