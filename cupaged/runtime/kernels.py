"""The kernel files: where they lie, what they hold, and the one way they are compiled for a GPU.

Owns the flags of NVRTC, the same for builds ahead of time and at run time, and the cache of what it
made. CuPy's own `RawModule(code=...)` is never used: it adds flags of its own (`-ftz=true`) and its
cache overlooks changed headers. Compiling needs no GPU. CuPy's binding of NVRTC is imported when
something is compiled, not before.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import logging
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cupaged.errors import BadValueError, NotSupportedError
from cupaged.runtime.cache_folder import cache_folder, digest_sources, store
from cupaged.runtime.errors import (
    CompilerUnavailableError,
    KernelCompileError,
    KernelNotFoundError,
)
from cupaged.runtime.program_log import KernelResources, first_error, parse_resources

__all__ = [
    "ARCHITECTURES",
    "FLAGS",
    "CompiledKernels",
    "compile_kernel",
    "kernel_file",
    "kernel_files",
    "kernel_folder",
    "kernel_names",
    "nvrtc_version",
    "toolkit_headers",
]

_logger = logging.getLogger(__name__)

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")

# Every flag that changes the code. --device-as-default-execution-space is left out: a function
# without __device__ is an error. Includes come from -I alone, never from the working directory.
FLAGS = (
    "--std=c++17",
    "--fmad=false",
    "--ftz=false",
    "--prec-div=true",
    "--prec-sqrt=true",
    "--no-source-include",
    "--ptxas-options=-v",
)

_CACHE = "nvrtc"
_KERNEL = re.compile(
    r'extern\s+"C"\s+__global__\s+(?:__launch_bounds__\s*\([^()]*\)\s*)?void\s+(\w+)\s*\('
)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_VALUE = re.compile(r"[A-Za-z0-9_]+\Z")


@dataclass(frozen=True, slots=True)
class CompiledKernels:
    """A file's kernels as a GPU loads them.

    path: the cubin. arch: what it is for, "sm_90". resources: by kernel.
    """

    path: Path
    arch: str
    resources: Mapping[str, KernelResources]


def kernel_folder() -> Path:
    """Where the .cu files lie: `cuda/` beside the package in a checkout, else inside of it.

    Raises:
        KernelNotFoundError: in neither place, so the installation is damaged.
    """
    package = Path(__file__).resolve().parents[1]
    beside = package.parent / "cuda"
    if (package.parent / "pyproject.toml").is_file() and (beside / "common.cuh").is_file():
        return beside
    if (package / "cuda" / "common.cuh").is_file():
        return package / "cuda"
    raise KernelNotFoundError(f"there are no kernel files in {package / 'cuda'}: reinstall cupaged")


def kernel_files() -> list[str]:
    """Names of the .cu files, sorted."""
    return sorted(path.name for path in kernel_folder().glob("*.cu"))


def kernel_file(file: str | Path) -> Path:
    """The path of a kernel file: a name in the kernel folder, or any path as it is.

    Raises:
        KernelNotFoundError: no such file.
    """
    path = file if isinstance(file, Path) else kernel_folder() / file
    if not path.is_file():
        raise KernelNotFoundError(
            f"there is no kernel file {file}; known: {', '.join(kernel_files())}"
        )
    return path.resolve()


def kernel_names(file: str | Path) -> list[str]:
    """The extern "C" kernels of a file, in its order, whatever the defines.

    Raises:
        KernelNotFoundError: no such file.
    """
    source = kernel_file(file).read_text(encoding="utf-8")
    return _KERNEL.findall(_COMMENT.sub(" ", source))


def compile_kernel(
    file: str | Path,
    defines: Mapping[str, str | int],
    arch: str,
    *,
    include_dirs: Sequence[Path] = (),
) -> CompiledKernels:
    """Compile a file with NVRTC, or find it compiled before.

    Args:
        file: a name in the kernel folder, or the Path of any source.
        defines: macros; a value is an int or one word.
        arch: one of `ARCHITECTURES`.
        include_dirs: folders of headers, searched after the file's own and the kernel folder.

    Raises:
        BadValueError: a define that is no macro, or a value that is no word.
        NotSupportedError: an architecture that is not built for.
        KernelNotFoundError: no such file.
        CompilerUnavailableError: NVRTC or its headers are not installed.
        KernelCompileError: the compiler refused the source.
        OSError: the source cannot be read, or nothing can be written anywhere.
    """
    if arch not in ARCHITECTURES:
        raise NotSupportedError(
            f"GPU architecture {arch!r} is not supported; known: {', '.join(ARCHITECTURES)}"
        )
    path = kernel_file(file)
    macros = _macros(defines)
    version = nvrtc_version()
    folders = [path.parent, kernel_folder(), *include_dirs, toolkit_headers(version[0])]
    options = (f"-arch={arch}", *FLAGS, *macros)
    key = hashlib.sha256(
        json.dumps([digest_sources(path, folders).whole, options, version]).encode()
    ).hexdigest()
    name = f"{path.stem}-{arch}-{key[:40]}"
    cached = _load(cache_folder(_CACHE) / name, arch)
    if cached is not None:
        return cached
    started = time.monotonic()
    cubin, log = _compile(path, (*options, *(f"-I{folder}" for folder in dict.fromkeys(folders))))
    resources = parse_resources(log)
    description = {
        "cubin_bytes": len(cubin),
        "resources": {kernel: asdict(used) for kernel, used in resources.items()},
    }
    store(_CACHE, f"{name}.json", json.dumps(description).encode())
    cubin_path = store(_CACHE, f"{name}.cubin", cubin)
    _logger.info("compiled %s for %s in %.1f s", path.name, arch, time.monotonic() - started)
    return CompiledKernels(cubin_path, arch, resources)


def nvrtc_version() -> tuple[int, int]:
    """Of the NVRTC that CuPy finds, (12, 9).

    Raises:
        CompilerUnavailableError: CuPy or NVRTC is not installed.
    """
    major, minor = _nvrtc().getVersion()
    return int(major), int(minor)


def toolkit_headers(major: int) -> Path:
    """The folder of cuda_fp16.h and its like, out of the wheel for that major version of CUDA.

    Only the wheel that fits: with NVRTC 12, headers of CUDA 13 do not compile.

    Raises:
        CompilerUnavailableError: the wheel is not installed.
    """
    folder = "cuda_runtime/include" if major == 12 else f"cu{major}/include"
    spec = importlib.util.find_spec("nvidia")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(place) / folder / "cuda_fp16.h").is_file():
            return Path(place) / folder
    raise CompilerUnavailableError(
        f"the CUDA {major} headers are not installed; "
        f"install them with `pip install 'cupaged[cuda{major}-jit]'`"
    )


def _nvrtc() -> Any:
    """CuPy's binding, with the library loaded. It does not import CuPy itself."""
    advice = "install it with `pip install 'cupaged[cuda12-jit]'` (or cuda13-jit)"
    try:
        nvrtc = importlib.import_module("cupy_backends.cuda.libs.nvrtc")
    except ImportError as error:
        raise CompilerUnavailableError(f"CuPy is not installed ({error}); {advice}") from error
    try:
        nvrtc.getVersion()
    except (RuntimeError, OSError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise CompilerUnavailableError(
            f"the CUDA compiler NVRTC is not installed ({first_line}); {advice}"
        ) from error
    return nvrtc


def _macros(defines: Mapping[str, str | int]) -> tuple[str, ...]:
    """-D options, sorted."""
    for name, value in defines.items():
        if not _NAME.match(name):
            raise BadValueError("the name of a define", name, "letters, digits and underscores")
        if isinstance(value, bool) or not isinstance(value, (int, str)):
            raise BadValueError(f"define {name}", value, "an int or a word")
        if isinstance(value, str) and not _VALUE.match(value):
            raise BadValueError(f"define {name}", value, "an int or a word")
    return tuple(f"-D{name}={value}" for name, value in sorted(defines.items()))


def _compile(path: Path, options: tuple[str, ...]) -> tuple[bytes, str]:
    """The cubin, and what the compiler said."""
    nvrtc = _nvrtc()
    source = path.read_text(encoding="utf-8")
    program = nvrtc.createProgram(source, path.name, (), ())
    try:
        try:
            nvrtc.compileProgram(program, options)
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program).rstrip("\0\n")
            raise _compile_error(path, log or str(error)) from error
        log = nvrtc.getProgramLog(program).rstrip("\0\n")
        # CuPy's getCUBIN drops the last byte, which the driver overlooks and other tools do not.
        return nvrtc.getCUBIN(program) + b"\0", log
    finally:
        nvrtc.destroyProgram(program)


def _compile_error(path: Path, log: str) -> KernelCompileError:
    place = first_error(log)
    if place is None:
        return KernelCompileError(f"{path} does not compile:\n{log}", None, 0, log)
    file, line = place
    where = path if file == path.name else Path(file)
    return KernelCompileError(f"{where}:{line}: does not compile:\n{log}", where, line, log)


def _load(stem: Path, arch: str) -> CompiledKernels | None:
    """From the cache; None if it is not there or not whole."""
    cubin, description = stem.with_name(f"{stem.name}.cubin"), stem.with_name(f"{stem.name}.json")
    try:
        values = json.loads(description.read_bytes())
        if cubin.stat().st_size != values["cubin_bytes"]:
            return None
        resources = {
            name: KernelResources.from_json(used) for name, used in values["resources"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # it is compiled again
    return CompiledKernels(cubin, arch, resources)
