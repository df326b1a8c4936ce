"""The C++ compiler of the host: which one, with which flags, and how it is run.

Nothing of CUDA is needed. g++ is what the checks are tested with; clang++ works, but leaves some
misaligned vector accesses to the processor, which then ends the kernel as a crash. The flags keep
arithmetic as written (no contraction, no fast-math), so that a kernel rounds here as it does on a
GPU when it says `__fmaf_rn` and the like.
"""

from __future__ import annotations

import functools
import os
import platform
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cupaged.emulator.errors import CompileError, ToolchainError
from cupaged.errors import NotSupportedError

INCLUDE_DIR = Path(__file__).parent / "include"
NATIVE_DIR = Path(__file__).parent / "native"

_OLDEST = {"g++": (11, 1), "clang++": (14, 0)}
_UNSUPPORTED = "the emulator has no "
_ERROR_LINE = re.compile(
    r"^(?P<file>[^\s:][^:\n]*):(?P<line>\d+):(?:\d+:)? (?:fatal )?error: ", re.M
)

_LANGUAGE = ("-std=c++20", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-U_FORTIFY_SOURCE")
_KERNEL = (
    "-fno-strict-aliasing", "-fwrapv", "-fno-finite-loops", "-fno-math-errno",
    "-fno-omit-frame-pointer", "-w",
)  # fmt: skip
_CHECKS = (
    "-fsanitize=thread,alignment,bounds,shift-exponent,integer-divide-by-zero",
    "-fsanitize-recover=alignment,bounds,shift-exponent,integer-divide-by-zero",
    "-fstack-clash-protection",
    "-fstack-protector-strong",
    "-fno-builtin-memcpy",
    "-fno-builtin-memmove",
    "-fno-builtin-memset",
    "-DEMULATOR_CHECKED=1",
)
# What each compiler calls the rest: no folding of equal functions, no variables of templates that
# all modules of a process would share, no calls at entry and exit, volatile accesses told apart, a
# call a basic block.
_OWN_KERNEL = {"g++": ("-fno-ipa-icf", "-fno-gnu-unique"), "clang++": ()}
_OWN_CHECKS = {
    "g++": (
        "-fsanitize-coverage=trace-pc",
        "-fno-tree-vectorize",
        "--param=tsan-instrument-func-entry-exit=0",
        "--param=tsan-distinguish-volatile=1",
    ),
    "clang++": (
        "-fsanitize-coverage=trace-pc,edge,no-prune",
        "-fno-vectorize",
        "-fno-slp-vectorize",
        "-mllvm", "-tsan-instrument-func-entry-exit=0",
        "-mllvm", "-tsan-distinguish-volatile=1",
        "-mllvm", "-tsan-instrument-memintrinsics=0",
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Compiler:
    """command: the executable, then its first arguments: ("/usr/bin/ccache", "g++").

    kind: "g++" or "clang++".
    """

    command: tuple[str, ...]
    kind: str

    def __str__(self) -> str:
        return shlex.join(self.command)

    @property
    def identity(self) -> str:
        """Changes when another compiler, or another launcher of it, lies at its path."""
        parts = []
        for word in self.command:
            path = shutil.which(word)
            if path is None:
                parts.append(word)
            else:
                status = os.stat(path)
                parts.append(f"{os.path.realpath(path)} {status.st_size} {status.st_mtime_ns}")
        return "\0".join(parts)


def find_compiler() -> Compiler:
    """$CXX, which may hold arguments as in "ccache g++", else g++, else clang++.

    Raises:
        ToolchainError: there is none.
    """
    given = os.environ.get("CXX")
    for words in _words(given) if given else [["g++"], ["clang++"]]:
        path = shutil.which(words[0]) if words else None
        if path is not None:
            is_clang = any("clang" in os.path.basename(word) for word in words)
            return Compiler((path, *words[1:]), "clang++" if is_clang else "g++")
    looked = f"$CXX is {given!r}, which cannot be run" if given else "no g++ and no clang++ on PATH"
    raise ToolchainError(
        f"the emulator compiles kernels with a C++ compiler, and there is none: {looked}. "
        "Install g++ 11 or newer (Debian: apt install g++), or set CXX."
    )


def _words(given: str) -> list[list[str]]:
    """How $CXX may be meant: as one path, with its spaces, or as a command."""
    try:
        return [[given], shlex.split(given)]
    except ValueError:  # a quote that does not end
        return [[given]]


@functools.cache
def check_version(compiler: Compiler) -> str:
    """The version as text.

    Raises:
        ToolchainError: too old for C++20, or it does not run.
    """
    try:
        text = subprocess.run(
            [*compiler.command, "-dumpfullversion", "-dumpversion"],
            capture_output=True, text=True, check=True, timeout=60,
        ).stdout.strip()  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        raise ToolchainError(f"{compiler} does not run: {error}") from error
    text = text.splitlines()[0] if text else ""
    numbers = re.match(r"(\d+)(?:\.(\d+))?", text)
    if numbers is None:
        raise ToolchainError(f"{compiler} gives no version: {text!r}")
    version = (int(numbers[1]), int(numbers[2] or 99))
    oldest = _OLDEST[compiler.kind]
    if version < oldest:
        raise ToolchainError(
            f"{compiler} is version {text}; the emulator needs {compiler.kind} "
            f"{oldest[0]}.{oldest[1]} or newer. Set CXX to another compiler."
        )
    return text


@functools.cache
def machine_flags() -> tuple[str, ...]:
    """Instructions that make `fmaf` and half conversions fast, where the processor has them."""
    if platform.machine() != "x86_64":
        return ()
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            has = next((set(line.split()) for line in file if line.startswith("flags")), set())
    except OSError:
        return ()
    return tuple(f"-m{name}" for name in ("avx2", "fma", "f16c") if name in has)


def kernel_flags(compiler: Compiler, *, checked: bool, opt_level: int) -> tuple[str, ...]:
    """Everything that decides what a kernel file becomes, but its defines."""
    own = _OWN_KERNEL[compiler.kind]
    checks = (*_CHECKS, *_OWN_CHECKS[compiler.kind]) if checked else ()
    symbols = "-g1" if opt_level else "-g"  # lines for findings, or all that a debugger shows
    return (*_LANGUAGE, *_KERNEL, symbols, *own, f"-O{opt_level}", *machine_flags(), *checks)


def native_flags(*, portable_switch: bool) -> tuple[str, ...]:
    """Those of the runtime, which is never instrumented."""
    portable = ("-DEMULATOR_PORTABLE_SWITCH=1",) if portable_switch else ()
    return (*_LANGUAGE, "-O2", "-g1", *portable)


def run_compiler(compiler: Compiler, arguments: Sequence[str], what: str) -> str:
    """Its output.

    Raises:
        CompileError: with the compiler's own message.
        NotSupportedError: the file asks for a part of CUDA that is not emulated.
    """
    check_version(compiler)
    result = subprocess.run(
        [*compiler.command, *arguments],
        capture_output=True, encoding="utf-8", errors="surrogateescape", check=False,
        env={**os.environ, "LC_ALL": "C"},
    )  # fmt: skip
    if result.returncode == 0:  # the bytes of a source in another encoding stay as they are
        return result.stdout
    message = result.stderr.encode("utf-8", "surrogateescape").decode("utf-8", "replace").strip()
    message = message or f"{compiler} ended with {result.returncode}"
    for line in message.splitlines():
        if "#error" in line and _UNSUPPORTED in line:
            reason = line[line.index(_UNSUPPORTED) :].rstrip('"')
            raise NotSupportedError(f"{what}: {reason}")
    first = _ERROR_LINE.search(message)
    if first is None:
        raise CompileError(f"{what} does not compile:\n{message}")
    shown = message[first.start() :]
    raise CompileError(f"{what} does not compile:\n{shown}", first["file"], int(first["line"]))
