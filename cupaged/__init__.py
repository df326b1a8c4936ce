"""cupaged: LLM serving with paged attention, continuous batching and no PyTorch.

`from cupaged import LLM, SamplingParams` is all that most programs need. Names are imported when
they are first used, so that `import cupaged` is cheap.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cupaged._version import __version__

if TYPE_CHECKING:
    from cupaged.errors import CupagedError
    from cupaged.llm import LLM
    from cupaged.outputs import CompletionOutput, RequestOutput
    from cupaged.sampling_params import BeamSearchParams, SamplingParams

__all__ = [
    "LLM",
    "BeamSearchParams",
    "CompletionOutput",
    "CupagedError",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]

_HOMES = {
    "LLM": "cupaged.llm",
    "BeamSearchParams": "cupaged.sampling_params",
    "CompletionOutput": "cupaged.outputs",
    "CupagedError": "cupaged.errors",
    "RequestOutput": "cupaged.outputs",
    "SamplingParams": "cupaged.sampling_params",
}

# In a checkout `models/` lies beside this package; installed, it lies inside.
_ROOT = Path(__file__).resolve().parent.parent
if (_ROOT / "models" / "llama.py").is_file() and (_ROOT / "pyproject.toml").is_file():
    __path__.append(str(_ROOT))


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
