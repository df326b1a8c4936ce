"""What `doctor` looks at in Python and the machine: what the `cpu` device needs, and nothing else.

A check returns findings. "problem" is kept for what the `cpu` device cannot do without.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cupaged._version import __version__
from cupaged.resources import read_resources

Verdict = Literal["ok", "note", "problem"]
GIB = 2**30
_LITTLE_MEMORY_BYTES = GIB
_MIN_PYTHON = (3, 11)
_SHOWN_VARIABLES = (
    "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES", "CUDA_PATH", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE",
)  # fmt: skip
# Distributions whose modules have other names.
_MODULES = {
    "grpcio": "grpc",
    "grpcio-health-checking": "grpc_health",
    "grpcio-reflection": "grpc_reflection",
    "grpcio-status": "grpc_status",
    "protobuf": "google.protobuf",
}
# `name>=1.2`, and an upper bound on either side.
_REQUIREMENT = re.compile(r"([\w.-]+?)(?:<[\d.]+,)?>=([\d.]+)(?:,<[\d.]+)?")
_SECRET_VARIABLES = ("HF_TOKEN", "HF_ENDPOINT", "HTTPS_PROXY", "https_proxy")  # may hold a password


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. advice: what to do, "" for nothing."""

    name: str
    value: str
    verdict: Verdict = "ok"
    advice: str = ""


def check_python() -> Iterator[Finding]:
    """Versions, and whether what cupaged imports can be imported."""
    yield Finding("cupaged", f"{__version__} in {Path(__file__).resolve().parents[1]}")
    implementation = f"{platform.python_implementation()} {platform.python_version()}"
    if sys.version_info >= _MIN_PYTHON:
        yield Finding("Python", f"{implementation} in {sys.prefix}")
    else:
        yield Finding("Python", implementation, "problem", "use Python 3.11 or newer")
    for name, lowest in _requirements():
        yield _package(name, lowest)


def check_machine() -> Iterator[Finding]:
    """System, processor, and what of it this process may use."""
    yield Finding("system", platform.platform(terse=True))
    yield Finding("processor", _processor())
    found = read_resources()
    yield Finding("cores", f"{found.cores} (limit: {found.cores_limited_by})")
    memory = (
        f"{found.memory_bytes / GIB:.1f} GiB (limit: {found.memory_limited_by}), "
        f"{found.available_bytes / GIB:.1f} GiB free"
    )
    if found.available_bytes < _LITTLE_MEMORY_BYTES:
        yield Finding("memory", memory, "note", "end other programs, or use a small model")
    else:
        yield Finding("memory", memory)
    encoding = getattr(sys.stdout, "encoding", None) or "unknown"
    if encoding.lower().replace("-", "") == "utf8":
        yield Finding("output", encoding)
    else:
        yield Finding("output", encoding, "note", "set LANG=C.UTF-8 to see every character")
    named = [f"{key}={os.environ[key]}" for key in _SHOWN_VARIABLES if key in os.environ]
    hidden = [f"{key} (set)" for key in _SECRET_VARIABLES if key in os.environ]
    yield Finding("environment", ", ".join([*named, *hidden]) or "no variable that matters here")


def check_products() -> Iterator[Finding]:
    """The library of matrix products: which, how many threads, and that it can count."""
    import numpy as np

    build: Any = np.show_config(mode="dicts")
    blas = build.get("Build Dependencies", {}).get("blas", {})
    library = f"{blas.get('name', 'unknown')} {blas.get('version', '')}".strip()
    threads, kind = _blas_pool()
    value = f"{library}{kind}, {threads} thread{'s' if threads != 1 else ''}"
    ones = np.ones((64, 64), np.float32)
    cores = read_resources().cores
    if not (ones @ ones == 64).all():
        yield Finding("BLAS", value, "problem", "it multiplies wrongly: reinstall NumPy")
    elif blas.get("found") is False or library == "unknown":
        yield Finding("BLAS", value, "note", "slow: install NumPy from PyPI, which has OpenBLAS")
    elif threads < cores:
        limits = [k for k in _SHOWN_VARIABLES if k.endswith("_NUM_THREADS") and k in os.environ]
        advice = f"fewer than {cores} cores: other programs are busy, end them to be faster"
        if limits:
            advice = f"fewer than {cores} cores: unset {' and '.join(limits)}, or use --threads"
        yield Finding("BLAS", value, "note", advice)
    else:
        yield Finding("BLAS", value)


def check_kernels() -> Iterator[Finding]:
    """The native kernels of the cpu device: for which processor, and that they can count."""
    import numpy as np

    name = "native kernels"
    try:
        from cupaged.ops.native_ops import NativeOps, use_native_threads
    except ImportError as error:
        advice = "NumPy computes, slower: install a wheel, or have a C++ compiler and install again"
        yield Finding(name, f"not built: {error}", "note", advice)
        return
    threads, instructions = use_native_threads(None, read_resources().cores)
    value = f"{instructions}, {threads} thread{'s' if threads != 1 else ''}"
    ones, out, ops = np.ones((64, 64), np.float32), np.zeros((64, 64), np.float32), NativeOps()
    ops.linear(out, ones, ops.pack_weight(ones))
    if (out == 64).all():
        yield Finding(name, value)
    else:
        yield Finding(name, value, "problem", "they multiply wrongly: use --cpu-kernels numpy")


def check_devices() -> Iterator[Finding]:
    """Which devices this version was built for."""
    from cupaged.devices import DEVICES

    yield Finding("devices", f"{', '.join(DEVICES)} (in this version)")


def _requirements() -> list[tuple[str, str]]:
    """(distribution, lowest version) of what cupaged imports."""
    checkout = Path(__file__).resolve().parents[2] / "pyproject.toml"
    if checkout.is_file():
        import tomllib

        listed = tomllib.loads(checkout.read_text(encoding="utf-8"))["project"]["dependencies"]
    else:
        listed = importlib.metadata.requires("cupaged") or []
    matches = [_REQUIREMENT.fullmatch(line.replace(" ", "")) for line in listed]
    return [(match[1], match[2]) for match in matches if match]


def _package(name: str, lowest: str) -> Finding:
    try:
        importlib.import_module(_MODULES.get(name, name.replace("-", "_")))
        version = importlib.metadata.version(name)
    except Exception as error:  # a broken package raises whatever it likes
        reason = f"cannot be imported: {type(error).__name__}: {error}".splitlines()[0]
        return Finding(name, reason, "problem", f"pip install '{name}>={lowest}'")
    if _numbers(version) < _numbers(lowest):
        return Finding(name, version, "problem", f"pip install '{name}>={lowest}'")
    return Finding(name, version)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def _processor() -> str:
    """`Intel(R) Xeon(R), AVX2, AVX-512`."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    name = re.search(r"^model name\s*: (.+)$", text, re.M)
    flags = set((re.search(r"^flags\s*: (.+)$", text, re.M) or ["", ""])[1].split())
    known = {"avx2": "AVX2", "avx512f": "AVX-512", "amx_tile": "AMX"}
    parts = [name[1] if name else platform.processor() or "unknown", platform.machine()]
    return ", ".join(parts + [label for flag, label in known.items() if flag in flags])


def _blas_pool() -> tuple[int, str]:
    """Threads, and ` (architecture)`; what the engine will set, not what BLAS began with."""
    from cupaged.ops.blas import use_threads

    threads = use_threads(None, read_resources().cores)
    from threadpoolctl import threadpool_info

    kinds = [pool.get("architecture") for pool in threadpool_info() if pool["user_api"] == "blas"]
    return threads, f" ({kinds[0]})" if kinds and kinds[0] else ""
