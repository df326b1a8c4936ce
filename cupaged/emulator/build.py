"""Compiles kernel files to libraries of the host and keeps them, found by content.

The key covers the kernel file with every header it includes, the defines and flags, the compiler,
and the emulator itself, so that nothing stale is ever loaded.
"""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cupaged.emulator.errors import CompileError
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


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """How a kernel file is compiled.

    defines: name to value; True or None defines the name alone.
    name_expressions: kernel templates to instantiate.
    checked: instrument every access. opt_level: -O of the compiler.
    portable_switch: ucontext in place of the assembly switch.
    """

    defines: Mapping[str, object]
    include_dirs: tuple[Path, ...]
    name_expressions: tuple[str, ...]
    checked: bool
    opt_level: int
    portable_switch: bool

    @property
    def define_flags(self) -> list[str]:
        """-D flags in the order of the names."""
        return [
            f"-D{name}" if value is None or value is True else f"-D{name}={value}"
            for name, value in sorted(self.defines.items())
        ]


@functools.cache
def _own_digest() -> str:
    """Of the emulator's headers and runtime, and of what rewrites the source."""
    digest = hashlib.sha256()
    own = Path(__file__).parent
    files = [*INCLUDE_DIR.rglob("*"), *NATIVE_DIR.iterdir(), own / "source.py"]
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
        sources, str(path), _own_digest(), compiler.identity, *flags, *options.define_flags,
        *options.name_expressions, *map(str, options.include_dirs), str(options.portable_switch),
    )  # fmt: skip
    key = hashlib.sha256("\0".join(parts).encode("utf-8", "surrogateescape")).hexdigest()[:32]
    folder = cache_folder("emulator")
    library = folder / f"{path.stem}-{key}.so"
    if not library.exists():
        runtime = _native_runtime(compiler, folder, options.portable_switch)
        _compile(compiler, path, options, flags, runtime, library)
    return library


def _compile(
    compiler: Compiler,
    path: Path,
    options: BuildOptions,
    flags: Sequence[str],
    runtime: Path,
    library: Path,
) -> None:
    includes = [f"-I{folder}" for folder in options.include_dirs]
    preprocessed = run_compiler(
        compiler,
        ["-E", *flags, *options.define_flags, *includes, f"-I{INCLUDE_DIR}",
         "-include", "emulator/prelude.h", "-x", "c++", str(path)],
        path.name,
    )  # fmt: skip
    text = rewrite(preprocessed, options.name_expressions)
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=".build-") as scratch:
        source, object_file, made = (
            Path(scratch) / name for name in (f"{path.stem}.ii", "kernel.o", library.name)
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
             "-o", str(made)],
            path.name,
        )  # fmt: skip
        os.replace(made, library)


def _native_runtime(compiler: Compiler, folder: Path, portable_switch: bool) -> Path:
    """The object file of the runtime."""
    flags = native_flags(portable_switch=portable_switch)
    parts = "\0".join((_own_digest(), compiler.identity, *flags))
    made = folder / f"runtime-{hashlib.sha256(parts.encode()).hexdigest()[:32]}.o"
    if not made.exists():
        sources = [str(file) for file in sorted(NATIVE_DIR.glob("*.cpp"))]
        handle, scratch = tempfile.mkstemp(dir=folder, suffix=".o")
        os.close(handle)
        try:
            run_compiler(
                compiler,
                [*flags, f"-I{INCLUDE_DIR}", "-r", "-nostdlib", *sources, "-o", scratch],
                "the emulator's runtime",
            )
            os.replace(scratch, made)
        except BaseException:
            Path(scratch).unlink(missing_ok=True)
            raise
    return made
