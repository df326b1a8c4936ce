"""`cupaged models`: what can be served, read from the registry and the tables of the loaders."""

from __future__ import annotations

import argparse
import json
from typing import Any


def add_parser(verbs: Any) -> None:
    """Add the verb to the command."""
    parser = verbs.add_parser(
        "models",
        help="list what can be served",
        usage="cupaged models [--json]",
        description="Lists the model families with their architectures (the name that config.json "
        "gives under `architectures`), and the formats that weights may be stored in.",
        example="cupaged models",
    )
    parser.add_argument("--json", action="store_true", help="print one object of JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the tables."""
    found = supported()
    if args.json:
        print(json.dumps(found))
        return 0
    for family in found["families"]:
        print(f"{family['family']}: {family['description']}")
        print(f"  architectures  {', '.join(family['architectures'])}")
        if family["gguf"]:
            print(f"  GGUF           {', '.join(family['gguf'])}")
    print("\nweights, all computed in float32 on cpu")
    for name, types in found["weights"].items():
        print(f"  {name:12} {', '.join(types)}")
    return 0


def supported() -> dict[str, Any]:
    """Families, and for each format the types of stored numbers."""
    from importlib import import_module

    from cupaged.loading import gguf_config, safetensors
    from cupaged.loading.dequantize import BLOCK_TYPES

    registry: dict[str, str] = import_module("cupaged.models").REGISTRY
    modules: dict[str, list[str]] = {}
    for architecture, home in registry.items():
        modules.setdefault(home.partition(":")[0], []).append(architecture)
    return {
        "families": [
            {
                "family": module,
                "description": _first_line(f"cupaged.models.{module}"),
                "architectures": sorted(architectures),
                "gguf": sorted(
                    name
                    for name, architecture in gguf_config._ARCHITECTURES.items()
                    if architecture in architectures
                ),
            }
            for module, architectures in sorted(modules.items())
        ],
        "weights": {
            "safetensors": list(safetensors._DTYPES),
            "GGUF": [known.name for known in BLOCK_TYPES.values()],
        },
    }


def _first_line(module: str) -> str:
    """What a family's module says of itself."""
    from importlib import import_module

    doc = import_module(module).__doc__ or ""
    return doc.partition("\n")[0].rstrip(".")
