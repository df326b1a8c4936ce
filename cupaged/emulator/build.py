"""Compiles kernel files to libraries of the host and keeps them, found by content.

The key covers the kernel file with the headers that a scan of it finds, the defines and flags, the
compiler, and the emulator itself; a record beside the library covers what the compiler really read.
So nothing stale is ever loaded, and nothing damaged.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cupaged.emulator.build_record import CACHE, Sources, find_made, keep_made, sources_read
from cupaged.emulator.errors import CompileError, EmulatorError
from cupaged.emulator.source import rewrite
from cupaged.emulator.toolchain import (
    INCLUDE_DIR,
    NATIVE_DIR,
    Compiler,
    find_compiler,
    kernel_flags,
    native_flags,
    run_compiler,
)
from cupaged.runtime.cache_folder import cache_folder, digest_sources

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SEARCHED = ("CPATH", "CPLUS_INCLUDE_PATH")  # more folders of headers, for the compiler
_TITLE_CHARS = 40  # of the file's name, in the names of what is made of it


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """How a kernel file is compiled.

    defines: name to value; True or None defines the name alone, False does not define it.
    name_expressions: kernel templates to instantiate.
    checked: instrument every access. opt_level: -O of the compiler.
    portable_switch: ucontext in place of the assembly switch.

    Raises:
        EmulatorError: the name of a define is no identifier.
    """

    defines: Mapping[str, object]
    include_dirs: tuple[Path, ...]
    name_expressions: tuple[str, ...]
    checked: bool
    opt_level: int
    portable_switch: bool

    def __post_init__(self) -> None:
        for name in self.defines:
            if not (isinstance(name, str) and _IDENTIFIER.fullmatch(name)):
                raise EmulatorError(f"the name of a define must be an identifier, got {name!r}")

    @property
    def define_flags(self) -> list[str]:
        """-D flags in the order of the names."""
        flags = []
        for name, value in sorted(self.defines.items()):
            if value is None or (isinstance(value, bool | np.bool_) and value):
                flags.append(f"-D{name}")
            elif not isinstance(value, bool | np.bool_):
                flags.append(f"-D{name}={value}")
        return flags


_REWRITERS = ("source", "preprocessed", "shared_declarations", "unsupported")


@functools.cache
def _own_digest() -> str:
    """Of the emulator's headers and runtime, and of what rewrites the source."""
    digest = hashlib.sha256()
    own = Path(__file__).parent
    rewriters = [own / f"{name}.py" for name in _REWRITERS]
    files = [*INCLUDE_DIR.rglob("*"), *NATIVE_DIR.iterdir(), *rewriters]
    digest.update(str(own).encode())  # findings tell the emulator's own lines by their folder
    for file in sorted(file for file in files if file.is_file()):
        digest.update(f"{file.name}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


def build(path: Path, options: BuildOptions) -> Path:
    """The library of a kernel file, from the cache where it is there.

    Raises:
        CompileError: the file cannot be read or does not compile.
        ToolchainError: no usable compiler.
        NotSupportedError: the file uses what is not emulated.
    """
    compiler = find_compiler()
    flags = kernel_flags(compiler, checked=options.checked, opt_level=options.opt_level)
    try:
        sources = digest_sources(path, (*options.include_dirs, INCLUDE_DIR))
    except OSError as error:
        raise CompileError(f"{path} cannot be read: {error.strerror}", str(path)) from error
    parts = (
        sources.whole, str(path), _own_digest(), compiler.identity, *flags, *options.define_flags,
        *options.name_expressions, *map(str, options.include_dirs), str(options.portable_switch),
        *(os.environ.get(name, "") for name in _SEARCHED),
    )  # fmt: skip
    record = _record(path.stem[:_TITLE_CHARS], parts)
    made = find_made(record, sources.files)
    if made is None:
        runtime = _native_runtime(compiler, options.portable_switch)
        content, read = _compile(compiler, path, options, flags, runtime)
        made = keep_made(record, ".so", content, read)
    return made


def _record(title: str, parts: Sequence[str]) -> Path:
    """Where the record lies of what is made with all of `parts`."""
    key = hashlib.sha256("\0".join(parts).encode("utf-8", "surrogateescape")).hexdigest()[:32]
    return cache_folder(CACHE) / f"{title}-{key}.json"


def _compile(
    compiler: Compiler, path: Path, options: BuildOptions, flags: Sequence[str], runtime: Path
) -> tuple[bytes, Sources]:
    """The library, and what it was made from."""
    includes = [f"-I{folder}" for folder in options.include_dirs]
    preprocessed = run_compiler(
        compiler,
        ["-E", *flags, *options.define_flags, *includes, f"-I{INCLUDE_DIR}",
         "-include", "emulator/prelude.h", "-x", "c++", str(path)],
        path.name,
    )  # fmt: skip
    read = sources_read(preprocessed, options.include_dirs)
    text = rewrite(preprocessed, options.name_expressions)
    with tempfile.TemporaryDirectory(prefix="cupaged-") as scratch:
        source, object_file, library = (
            Path(scratch) / name for name in ("kernel.ii", "kernel.o", "kernel.so")
        )
        source.write_text(text, encoding="utf-8", errors="surrogateescape")
        run_compiler(
            compiler,
            [*flags, "-c", "-x", "c++-cpp-output", str(source), "-o", str(object_file)],
            path.name,
        )
        # Without the flags: the sanitizers' own libraries must not come along.
        run_compiler(
            compiler,
            ["-shared", "-Wl,-Bsymbolic", "-Wl,--no-undefined", str(object_file), str(runtime),
             "-o", str(library)],
            path.name,
        )  # fmt: skip
        return library.read_bytes(), read


def _native_runtime(compiler: Compiler, portable_switch: bool) -> Path:
    """The object file of the runtime."""
    flags = native_flags(portable_switch=portable_switch)
    record = _record("runtime", (_own_digest(), compiler.identity, *flags))
    made = find_made(record, {})
    if made is None:
        with tempfile.TemporaryDirectory(prefix="cupaged-") as scratch:
            # All files as one: each for itself takes twice the time, which goes into their headers.
            source, object_file = Path(scratch) / "runtime.cpp", Path(scratch) / "runtime.o"
            files = sorted(NATIVE_DIR.glob("*.cpp"))
            source.write_text("".join(f'#include "{file.name}"\n' for file in files))
            run_compiler(
                compiler,
                [*flags, f"-I{INCLUDE_DIR}", f"-I{NATIVE_DIR}", "-c", str(source),
                 "-o", str(object_file)],
                "the emulator's runtime",
            )  # fmt: skip
            made = keep_made(record, ".o", object_file.read_bytes(), {})
    return made
