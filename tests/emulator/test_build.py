"""What is compiled again and what is not: headers, damaged files, defines, compilers."""

from __future__ import annotations

import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupaged.emulator import EmulatedModule, EmulatorError, build_record
from cupaged.emulator.toolchain import Compiler, find_compiler
from cupaged.errors import NotSupportedError
from cupaged.runtime.cache_folder import cache_folder

KERNEL = 'extern "C" __global__ void value(int* out) { *out = VALUE; }\n'


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The files of the emulator's runtime in a cache."""
    folder = tmp_path_factory.mktemp("warm")
    (folder / "empty.cu").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUPAGED_CACHE_DIR", str(folder / "cache"))
        EmulatedModule(folder / "empty.cu")
    return list((folder / "cache" / "emulator").glob("runtime-*"))


@pytest.fixture
def cache(runtime: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, which holds the emulator's runtime only."""
    monkeypatch.setenv("CUPAGED_CACHE_DIR", str(tmp_path / "cache"))
    folder = cache_folder("emulator")
    for file in runtime:
        shutil.copy(file, folder)
    return folder


def value(path: Path, defines: dict[str, object] | None = None, **options: Any) -> int:
    out = np.zeros(1, np.int32)
    EmulatedModule(path, defines, **options).get_function("value")((1,), (1,), (out,))
    return int(out[0])


INCLUDES = {
    "byte order mark": b'\xef\xbb\xbf#include "value.h"\n',
    "continued line": b'#include \\\n"value.h"\n',
    "comment before": b'/* from */ #include "value.h"\n',
    "macro": b'#define HEADER "value.h"\n#include HEADER\n',
    "other name": b'#include "./value.h"\n',
}


@pytest.mark.parametrize("include", INCLUDES.values(), ids=INCLUDES.keys())
def test_a_header_counts_however_it_is_included(
    cache: Path, compiled: list[str], tmp_path: Path, include: bytes
) -> None:
    source, header = tmp_path / "value.cu", tmp_path / "value.h"
    source.write_bytes(include + KERNEL.encode())
    header.write_text("#define VALUE 3\n")
    assert value(source) == 3
    before = len(compiled)
    assert (value(source), len(compiled)) == (3, before)
    header.write_text("#define VALUE 5\n")
    assert value(source) == 5
    (tmp_path / "unrelated.h").write_text("")
    before = len(compiled)
    assert (value(source), len(compiled)) == (5, before)


def test_sources_are_read_once_to_find_what_was_compiled(
    cache: Path, compiled: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key has their digests; the record asks for those of other files only."""
    source = tmp_path / "value.cu"
    source.write_bytes(INCLUDES["macro"] + KERNEL.encode())
    (tmp_path / "value.h").write_text("#define VALUE 3\n")
    assert value(source) == 3
    asked: list[str] = []
    digest = build_record._digest

    def note(path: str) -> str | None:
        asked.append(Path(path).name)
        return digest(path)

    monkeypatch.setattr(build_record, "_digest", note)
    before = len(compiled)
    assert (value(source), len(compiled)) == (3, before)
    assert set(asked) == {"value.h"}  # which only the compiler could find


def test_a_header_that_appears(cache: Path, compiled: list[str], tmp_path: Path) -> None:
    source = tmp_path / "value.cu"
    source.write_text(
        '#if __has_include("near.h")\n#define VALUE 1\n#else\n#define HEADER "value.h"\n'
        f"#include HEADER\n#endif\n{KERNEL}"
    )
    far = tmp_path / "far"
    far.mkdir()
    (far / "value.h").write_text("#define VALUE 3\n")
    assert value(source, include_dirs=[far]) == 3
    (tmp_path / "value.h").write_text("#define VALUE 2\n")
    assert value(source, include_dirs=[far]) == 2
    (tmp_path / "near.h").write_text("")
    assert value(source, include_dirs=[far]) == 1
    (tmp_path / "near.h").unlink()
    assert value(source, include_dirs=[far]) == 2


def test_the_folders_of_the_environment_count(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "value.cu"
    source.write_text(f"#include <value.h>\n{KERNEL}")
    for number in (1, 2):
        folder = tmp_path / f"include{number}"
        folder.mkdir()
        (folder / "value.h").write_text(f"#define VALUE {number}\n")
        monkeypatch.setenv("CPATH", str(folder))
        assert value(source) == number


def cut(file: Path) -> None:
    """Half of a file, as another file: the library may be loaded."""
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(content[: len(content) // 2])


def empty(file: Path) -> None:
    file.unlink()
    file.touch()


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.unlink()
    file.write_bytes(content)


LOAD = (
    "import sys, numpy as np\nfrom cupaged.emulator import EmulatedModule\n"
    "out = np.zeros(1, np.int32)\n"
    "EmulatedModule(sys.argv[1], {'VALUE': 7}).get_function('value')((1,), (1,), (out,))\n"
    "print(out[0])\n"
)


@pytest.mark.parametrize(
    ("which", "damage"),
    [
        ("value-*.so", cut), ("value-*.so", empty), ("value-*.so", flip),
        ("value-*.so", Path.unlink), ("value-*.json", cut), ("value-*.json", empty),
    ],
)  # fmt: skip
def test_a_damaged_library_is_made_again(
    cache: Path, compiled: list[str], tmp_path: Path, which: str, damage: Callable[[Path], None]
) -> None:
    source = tmp_path / "value.cu"
    source.write_text(KERNEL)
    assert value(source, {"VALUE": 7}) == 7
    (file,) = cache.glob(which)
    whole = file.read_bytes()
    damage(file)
    run = subprocess.run(
        [sys.executable, "-c", LOAD, str(source)], capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stdout) == (0, "7\n"), run.stderr
    before = len(compiled)
    assert value(source, {"VALUE": 7}) == 7
    assert len(compiled) == before, "one repair is enough"
    assert which == "value-*.json" or file.read_bytes() == whole


@pytest.mark.parametrize("damage", [cut, pytest.param(empty, marks=pytest.mark.slow)])
def test_a_damaged_runtime_is_made_again(
    cache: Path, compiled: list[str], tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    (runtime,) = cache.glob("runtime-*.o")
    damage(runtime)
    source = tmp_path / "value.cu"
    source.write_text(KERNEL)
    assert value(source, {"VALUE": 7}) == 7
    assert compiled.count("the emulator's runtime") == 1
    assert value(source, {"VALUE": 8}) == 8
    assert compiled.count("the emulator's runtime") == 1


def test_an_unsupported_header_is_named(cache: Path, tmp_path: Path) -> None:
    source = tmp_path / "random.cu"
    source.write_text("#include <curand_kernel.h>\n")
    with pytest.raises(NotSupportedError, match=r"random\.cu: the emulator has no cuRAND; .*\)$"):
        EmulatedModule(source)


def test_bytes_that_are_no_utf8_stay(cache: Path, tmp_path: Path) -> None:
    source = tmp_path / "value.cu"
    source.write_bytes(b'// \xe9\n#define VALUE (unsigned char)"\xe9"[0]\n' + KERNEL.encode())
    assert value(source) == 0xE9


# ---- defines -------------------------------------------------------------------------------------


def test_what_a_define_may_be(cache: Path, tmp_path: Path) -> None:
    source = tmp_path / "value.cu"
    source.write_text(
        "#ifdef FLAG\n#define VALUE 2 * FLAG + 10\n#else\n#define VALUE 1\n#endif\n" + KERNEL
    )
    for flag, expected in ((True, 12), (None, 12), (np.True_, 12), (3, 16), (0, 10), ("4", 18)):
        assert value(source, {"FLAG": flag}) == expected
    assert [value(source, {"FLAG": flag}) for flag in (False, np.False_)] == [1, 1]


@pytest.mark.parametrize("name", ["A B", "V(x)", "2D", "", "A=1", "A\n", 3])
def test_a_define_needs_a_name(tmp_path: Path, name: Any) -> None:
    with pytest.raises(EmulatorError, match="name of a define must be an identifier, got"):
        EmulatedModule(tmp_path / "none.cu", {name: 1})


# ---- compilers -----------------------------------------------------------------------------------


def launcher(folder: Path, log: Path) -> Path:
    """A program that notes that it ran and starts what follows, as ccache does."""
    script = folder / "launcher"
    script.write_text(f'#!/bin/sh\necho "$1" >> "{log}"\nexec "$@"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_a_compiler_behind_a_launcher(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    script = launcher(tmp_path, log)
    monkeypatch.setenv("CXX", f"{script} g++ -DVALUE=6")
    assert find_compiler() == Compiler((str(script), "g++", "-DVALUE=6"), "g++")
    source = tmp_path / "value.cu"
    source.write_text(KERNEL)
    assert value(source) == 6
    assert set(log.read_text().split()) == {"g++"}


def test_every_part_of_the_compiler_counts(tmp_path: Path) -> None:
    script = launcher(tmp_path, tmp_path / "log")
    other = tmp_path / "other"
    shutil.copy(script, other)
    commands = [(str(script),), (str(script), str(other)), (str(script), "-m64")]
    before = [Compiler(command, "g++").identity for command in commands]
    assert len(set(before)) == 3
    other.write_text("#!/bin/sh\n")
    after = [Compiler(command, "g++").identity for command in commands]
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, True]


@pytest.mark.parametrize(
    ("given", "kind"),
    [("g++", "g++"), ("ccache clang++", "clang++"), ("clang++-17 -O0", "clang++")],
)
def test_the_kind_of_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, kind: str
) -> None:
    for name in ("g++", "ccache", "clang++-17"):
        launcher(tmp_path, tmp_path / "log").rename(tmp_path / name)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", given)
    assert find_compiler().kind == kind


def test_a_path_with_spaces_is_one_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "my tools"
    folder.mkdir()
    script = launcher(folder, tmp_path / "log")
    monkeypatch.setenv("CXX", str(script))
    assert find_compiler().command == (str(script),)
    for given in (" ", "'g++", "no-such-compiler -O2"):
        monkeypatch.setenv("CXX", given)
        with pytest.raises(EmulatorError, match=r"\$CXX is .*, which cannot be run"):
            find_compiler()
