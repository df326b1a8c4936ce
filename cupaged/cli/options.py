"""Options that several verbs share, and what they mean to the engine."""

from __future__ import annotations

import argparse
from typing import Any

_ENGINE = (
    ("--tokenizer", str, "PATH", "folder whose tokenizer replaces the model's own"),
    ("--device", str, "NAME", "auto or cpu (default: auto)"),
    ("--dtype", str, "NAME", "auto or float32 (default: auto)"),
    ("--max-model-len", int, "N", "most tokens of a sequence (default: the model's own limit)"),
    ("--block-size", int, "N", "tokens of a KV block: 8, 16, 32, 64 or 128 (default: 16)"),
    ("--num-gpu-blocks-override", int, "N", "blocks of the KV pool, whatever the memory"),
    ("--kv-cache-memory-bytes", int, "N", "bytes of the KV pool"),
    ("--max-num-seqs", int, "N", "most sequences that run at once (default: 64)"),
    ("--max-num-batched-tokens", int, "N", "most tokens of one step (default: 512)"),
)
_SAMPLING = (
    ("--max-tokens", int, "N", "most tokens to generate (default: the rest of the context)"),
    ("--min-tokens", int, "N", "fewest tokens to generate (default: 0)"),
    ("--temperature", float, "T", "0 takes the likeliest token (default: 0)"),
    ("--top-p", float, "P", "keep the likeliest tokens up to this mass (default: 1)"),
    ("--top-k", int, "K", "keep that many of the likeliest tokens (default: all)"),
    ("--seed", int, "N", "equal seeds give equal answers"),
)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """MODEL and the engine's options."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="folder with config.json and safetensors, or a .gguf file "
        "(default: the installed SmolLM2-135M-Instruct)",
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="log what happens to stderr")
    _add(parser.add_argument_group("engine"), _ENGINE)


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """How tokens are drawn and when an answer ends."""
    group = parser.add_argument_group("sampling")
    _add(group, _SAMPLING)
    group.add_argument(
        "--stop", metavar="TEXT", action="append", help="end at this text (may be repeated)"
    )
    group.add_argument("--ignore-eos", action="store_true", help="go on after the end of text")


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of `LLM`: those that were given."""
    return {"model": args.model, **_given(args, _ENGINE)}


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of `SamplingParams`; greedy and unlimited unless told otherwise."""
    return {
        "temperature": 0.0,
        "max_tokens": None,
        "stop": args.stop,
        "ignore_eos": args.ignore_eos,
        **_given(args, _SAMPLING),
    }


def _add(group: Any, options: tuple[tuple[str, Any, str, str], ...]) -> None:
    for flag, kind, metavar, text in options:
        group.add_argument(flag, type=kind, metavar=metavar, help=text)


def _given(
    args: argparse.Namespace, options: tuple[tuple[str, Any, str, str], ...]
) -> dict[str, Any]:
    names = [flag.removeprefix("--").replace("-", "_") for flag, *_ in options]
    return {name: value for name in names if (value := getattr(args, name)) is not None}
