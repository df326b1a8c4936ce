"""Model families, one file each, found by the architecture name of `config.json`.

The registry imports a family's module only when a model of it is loaded.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from cupaged.errors import NotSupportedError

REGISTRY = {
    "LlamaForCausalLM": "llama:LlamaForCausalLM",
    "MistralForCausalLM": "llama:LlamaForCausalLM",
}

__all__ = ["REGISTRY", "model_class"]


def model_class(architecture: str) -> Any:
    """The class that runs an architecture.

    Raises:
        NotSupportedError: no family here has that architecture.
    """
    if architecture not in REGISTRY:
        known = ", ".join(sorted(REGISTRY))
        raise NotSupportedError(f"architecture {architecture!r} is not supported; known: {known}")
    module, name = REGISTRY[architecture].split(":")
    return getattr(import_module(f"{__name__}.{module}"), name)
