"""`cupaged estimate`: will it fit? From config.json or the header of a GGUF file alone."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cupaged.cli.model_shape import read_shape
from cupaged.cli.options import add_model, chosen_model
from cupaged.cli.records import json_line
from cupaged.errors import ConfigError

if TYPE_CHECKING:
    from cupaged.estimate import Estimate, Gpu

_LIMITS = {
    "max_model_len": "tokens of a request (default: the model's own limit)",
    "block_size": "tokens of a block (default: 16)",
    "max_num_seqs": "sequences that run at once (default: 64)",
    "max_num_batched_tokens": "tokens of one step (default: 512)",
}


def add_parser(verbs: Any) -> None:
    """Add the verb to the command."""
    parser = verbs.add_parser(
        "estimate",
        help="tell whether a model fits into memory",
        usage="cupaged estimate [MODEL] [--gpu NAME | --gpu-memory-gib X] [options]",
        description="Computes what weights, workspace and KV pool take, and how many requests of "
        "max-model-len tokens then fit, from config.json (or the header of a .gguf file) alone: "
        "no weights are read. Without --gpu and --gpu-memory-gib it is for this machine's cpu. "
        "The exit code is 1 if not one such request fits.",
        example="cupaged estimate HuggingFaceTB/SmolLM2-1.7B-Instruct --gpu T4",
    )
    add_model(parser)
    parser.add_argument("--gpu", metavar="NAME", help="L4, A100-80, H200, ...; `list` shows all")
    parser.add_argument("--gpu-memory-gib", type=float, metavar="X", help="memory of the GPU")
    parser.add_argument(
        "--gpu-memory-utilization", type=float, metavar="X", help="share to use (default: 0.92)"
    )
    parser.add_argument(
        "--dtype",
        metavar="NAME",
        default="auto",
        help="float32, float16 or bfloat16 (default: float32 on cpu, the model's own on a GPU)",
    )
    for name, text in _LIMITS.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=int, metavar="N", help=text)
    parser.add_argument("--json", action="store_true", help="print one object of JSON")
    parser.set_defaults(run=run)


@dataclass(frozen=True, slots=True)
class Place:
    """Where the model is to run. gpu: None for `cpu`. memory_bytes: what may be used."""

    name: str
    gpu: Gpu | None
    memory_bytes: int


def run(args: argparse.Namespace) -> int:
    """Print the estimate."""
    if args.gpu == "list":
        return _list_gpus()
    name, hf = read_shape(chosen_model(args))
    place = _place(args)
    estimate = _estimate(args, hf, place)
    if args.json:
        print(json_line(_record(name, hf, place, estimate)), end="")
    else:
        print("\n".join(_lines(name, hf, place, estimate)))
    return int(estimate.num_requests < 1)


def _place(args: argparse.Namespace) -> Place:
    from cupaged.estimate import GIB, GPU_MEMORY_UTILIZATION, GPUS, Gpu
    from cupaged.resources import read_resources

    share = args.gpu_memory_utilization
    if args.gpu is None and args.gpu_memory_gib is None:
        if share is not None:
            raise ConfigError("--gpu-memory-utilization", share, "given together with a GPU")
        resources = read_resources()
        return Place("this machine's cpu", None, resources.available_bytes)
    names = {known.casefold(): known for known in GPUS}
    name = names.get((args.gpu or "").casefold())
    if args.gpu is not None and name is None:
        raise ConfigError("--gpu", args.gpu, f"one of {', '.join(GPUS)}; or use --gpu-memory-gib")
    size = args.gpu_memory_gib
    if size is not None and not 0 < size < 2**20:
        raise ConfigError("--gpu-memory-gib", size, "a number > 0")
    if share is not None and not 0 < share <= 1:
        raise ConfigError("--gpu-memory-utilization", share, "a number in (0, 1]")
    gpu = GPUS[name] if name is not None else Gpu(int(size * 1024))
    total = gpu.memory_bytes if size is None else int(size * GIB)
    usable = int(total * (GPU_MEMORY_UTILIZATION if share is None else share))
    return Place(f"{name or 'a GPU'} of {total / GIB:.1f} GiB", gpu, usable)


def _estimate(args: argparse.Namespace, hf: dict[str, Any], place: Place) -> Estimate:
    from importlib import import_module

    from cupaged import estimate as arithmetic
    from cupaged.config import ModelConfig

    config = ModelConfig.from_hf(hf)
    family = import_module("cupaged.models").model_class(config.architecture)
    if (args.max_model_len or 1) > config.max_context:
        allowed = f"at most the model's own limit, {config.max_context}"
        raise ConfigError("max_model_len", args.max_model_len, allowed)
    given = {name: value for name in _LIMITS if (value := getattr(args, name)) is not None}
    stored = hf.get("dtype", hf.get("torch_dtype"))
    on_cpu = place.gpu is None
    dtype = arithmetic.dtype_on(place.gpu, args.dtype, str(stored))
    return arithmetic.estimate(
        arithmetic.Shape.of(family, config),
        dtype=dtype,
        limits=arithmetic.Limits(**{"max_model_len": config.default_context, **given}),
        memory_bytes=place.memory_bytes,
        blocks_in=arithmetic.blocks_on_cpu if on_cpu else arithmetic.blocks_on_gpu,
        buffer_bytes=arithmetic.no_buffers if on_cpu else arithmetic.gpu_buffers(dtype),
    )


def _lines(name: str, hf: dict[str, Any], place: Place, found: Estimate) -> list[str]:
    """For people: each figure with its unit, the largest first, and a verdict."""
    limits = found.limits
    length = f"{limits.max_model_len} tokens"
    if found.num_requests:
        number = found.num_requests
        many = f"{number} requests of {length} at the same time"
        verdict = f"fits: {many if number > 1 else f'1 request of {length}'}"
    elif found.longest_tokens:
        verdict = f"a request of {length} does not fit; one of {found.longest_tokens} does: "
        verdict += f"use --max-model-len {found.longest_tokens}"
    else:
        verdict = "does not fit: weights and workspace leave no room for one block"
    rows = (
        ("may be used", _size(found.memory_bytes), ""),
        ("weights", _size(found.weight_bytes), f"{found.num_parameters:,} parameters"),
        ("workspace", _size(found.workspace_bytes), f"of {limits.max_num_batched_tokens} tokens"),
        ("KV pool", _size(found.pool_bytes), f"{found.num_blocks:,} blocks of {limits.block_size}"),
        ("a token", _size(found.kv_bytes_per_token), f"{found.kv_bytes_per_token:,} bytes of KV"),
        ("room for", f"{found.pool_tokens:,}", "tokens"),
    )
    table = [f"  {what:12}{size:>12}  {note}".rstrip() for what, size, note in rows]
    head = f"{name} ({hf['architectures'][0]}) in {found.dtype} on {place.name}"
    return [head, *table, verdict]


def _record(name: str, hf: dict[str, Any], place: Place, found: Estimate) -> dict[str, Any]:
    return {
        "model": name,
        "architecture": hf["architectures"][0],
        "place": place.name,
        "dtype": found.dtype,
        "num_parameters": found.num_parameters,
        "memory_bytes": found.memory_bytes,
        "weight_bytes": found.weight_bytes,
        "workspace_bytes": found.workspace_bytes,
        "kv_bytes_per_token": found.kv_bytes_per_token,
        "kv_pool_bytes": found.pool_bytes,
        "num_blocks": found.num_blocks,
        "block_size": found.limits.block_size,
        "pool_tokens": found.pool_tokens,
        "max_model_len": found.limits.max_model_len,
        "num_requests": found.num_requests,
        "longest_tokens": found.longest_tokens,
        "fits": found.num_requests > 0,
    }


def _list_gpus() -> int:
    from cupaged.estimate import GIB, GPUS

    for name, gpu in GPUS.items():
        note = "" if gpu.has_bfloat16 else "  no bfloat16"
        print(f"{name:10}{gpu.memory_bytes / GIB:6.1f} GiB{note}")
    return 0


def _size(size_bytes: int) -> str:
    from cupaged.loading.hub_files import shown_size

    return shown_size(size_bytes)
