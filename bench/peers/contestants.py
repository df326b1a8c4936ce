"""Who takes part: an engine, the weights it is given, and the command that starts its runner."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.peers import install

HERE = Path(__file__).resolve().parent
OURS = "cupaged"
WEIGHTS = ("float32", "file")


@dataclass(frozen=True, slots=True)
class Contestant:
    """An engine with one kind of weights, and one way of computing where it has several.

    engine: the name of its environment and of its runner. weights: one of `WEIGHTS`.
    """

    engine: str
    weights: str
    way: str = ""

    @property
    def variant(self) -> str:
        """What tells it from the same engine's others: "float32", "float32 static"."""
        return f"{self.weights} {self.way}".strip()

    @property
    def name(self) -> str:
        """Engine and variant."""
        return f"{self.engine} {self.variant}"


CONTESTANTS = (
    Contestant(OURS, "float32"),
    Contestant(OURS, "file"),
    Contestant("llama_cpp", "float32"),
    Contestant("llama_cpp", "file"),
    Contestant("llama_cpp", "file", "plain"),
    Contestant("vllm", "float32"),
    Contestant("transformers", "float32", "static"),
    Contestant("transformers", "float32", "continuous"),
)
ENGINES = tuple(dict.fromkeys(contestant.engine for contestant in CONTESTANTS))


@dataclass(frozen=True, slots=True)
class Entry:
    """A contestant that can run here: its command, and the model in the form that it reads."""

    contestant: Contestant
    command: tuple[str, ...]
    model: str


def enter(
    contestant: Contestant, folder: Path, model_of: Callable[[Contestant, Path], str]
) -> Entry | None:
    """The entry of a contestant; None where its environment has not been made.

    folder: of environments and weights. model_of: see `model_of`.
    """
    if contestant.engine == OURS:
        python: Path | None = Path(sys.executable)
    else:
        python = install.python_of(contestant.engine, folder)
    if python is None:
        return None
    # -P: a runner's folder is not where its libraries may look for modules.
    command = (str(python), "-P", str(HERE / f"{contestant.engine}_runner.py"))
    return Entry(contestant, command, model_of(contestant, folder / "weights"))


def model_of(contestant: Contestant, folder: Path) -> str:
    """The model's file or folder, written into `folder` where it has to be made."""
    from bench.peers import weights  # needs `gguf`, which nothing else here does

    source = weights.installed_gguf()
    if contestant.engine == OURS or contestant.weights == "file":
        return str(source)
    wanted = weights.float32_gguf if contestant.engine == "llama_cpp" else weights.float32_folder
    return str(wanted(source, folder))
