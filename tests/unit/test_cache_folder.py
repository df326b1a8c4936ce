"""The folder of compiled kernels: where it lies, what takes its place, what a digest sees."""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

import pytest

from cupaged.runtime.cache_folder import (
    cache_folder,
    digest_sources,
    source_files,
    store,
    write_atomically,
)


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CUPAGED_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_first_of_three_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("CUPAGED_CACHE_DIR", raising=False)
    assert cache_folder("nvrtc") == tmp_path / "home" / ".cache" / "cupaged" / "nvrtc"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder("nvrtc") == tmp_path / "home" / ".cache" / "cupaged" / "nvrtc"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder("nvrtc") == tmp_path / "xdg" / "cupaged" / "nvrtc"
    monkeypatch.setenv("CUPAGED_CACHE_DIR", str(tmp_path / "own"))
    assert cache_folder("nvrtc") == tmp_path / "own" / "nvrtc"


def test_it_is_private(base: Path) -> None:
    folder = cache_folder("nvrtc")
    assert folder == base / "nvrtc"
    assert [path.stat().st_mode & 0o777 for path in (base, folder)] == [0o700, 0o700]


def falls_back(base: Path, reason: str, caplog: pytest.LogCaptureFixture) -> Path:
    with caplog.at_level(logging.WARNING):
        first, second = cache_folder("nvrtc"), cache_folder("host")
        assert cache_folder("nvrtc") == first
    assert base not in first.parents and first.parent == second.parent
    assert [path.stat().st_mode & 0o777 for path in (first.parent, first)] == [0o700, 0o700]
    write_atomically(first / "file", b"content")
    (message,) = [record.getMessage() for record in caplog.records]
    assert reason in message and "CUPAGED_CACHE_DIR" in message
    return first


def test_a_folder_that_cannot_be_made(base: Path, caplog: pytest.LogCaptureFixture) -> None:
    base.write_text("a file is in the way")
    falls_back(base, f"{base} cannot be made: File exists", caplog)


def test_no_home(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("HOME", "XDG_CACHE_HOME", "CUPAGED_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # a user that nobody knows
    folder = cache_folder("nvrtc")
    assert folder.is_absolute() and folder.is_dir() and "there is no home folder" in caplog.text


def test_a_generous_umask(base: Path) -> None:
    before = os.umask(0)
    try:
        assert cache_folder("nvrtc") == cache_folder("nvrtc") == base / "nvrtc"
    finally:
        os.umask(before)


def test_a_folder_of_somebody_else(
    base: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    base.mkdir()
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    falls_back(base, f"{base} belongs to user {owner}, not to user {owner + 1}", caplog)


@pytest.mark.parametrize(
    ("mode", "who"),
    [(0o777, "everybody"), (0o702, "everybody"), (0o770, "its group"), (0o2775, "its group")],
)
def test_a_folder_that_others_can_write(
    base: Path, caplog: pytest.LogCaptureFixture, mode: int, who: str
) -> None:
    base.mkdir()
    base.chmod(mode)
    falls_back(base, f"{base} can be written by {who}; chmod go-w makes it your own", caplog)
    base.chmod(mode & ~0o022)
    assert cache_folder("nvrtc") == base / "nvrtc"


@pytest.mark.parametrize("mode", [0o700, 0o750, 0o755])
def test_the_usual_modes_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, mode: int
) -> None:
    monkeypatch.delenv("CUPAGED_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".cache" / "cupaged" / "nvrtc").mkdir(parents=True)
    for folder in (".cache", ".cache/cupaged", ".cache/cupaged/nvrtc"):
        (tmp_path / folder).chmod(mode)
    assert cache_folder("nvrtc") == tmp_path / ".cache" / "cupaged" / "nvrtc"
    assert caplog.records == []


def test_a_read_only_folder(
    base: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    base.mkdir(0o500)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    falls_back(base, f"{base} is read-only", caplog)


def test_a_disk_that_is_full(
    base: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replace(source: str, target: Path) -> None:
        if base in target.parents:
            raise OSError(28, "No space left on device")
        os.rename(source, target)

    monkeypatch.setattr(os, "replace", replace)
    path = store("nvrtc", "file", b"content")
    assert path.read_bytes() == b"content" and base not in path.parents
    assert list((base / "nvrtc").iterdir()) == []
    assert "No space left on device" in caplog.text


def test_a_stored_file_is_whole(base: Path) -> None:
    path = store("nvrtc", "file", b"first")
    assert path == base / "nvrtc" / "file"
    assert store("nvrtc", "file", b"second") == path
    assert path.read_bytes() == b"second"
    assert [entry.name for entry in (base / "nvrtc").iterdir()] == ["file"]


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """kernel.cu includes a.cuh (beside it) and <shared.h>; a.cuh includes sub/b.cuh and itself."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "include").mkdir()
    (tmp_path / "kernel.cu").write_text(
        '#include "a.cuh"\n#  include <shared.h>\n#include <cuda_fp16.h>\nint x;\n'
    )
    (tmp_path / "a.cuh").write_text('#include "sub/b.cuh"\n#include "a.cuh"\n')
    (tmp_path / "sub" / "b.cuh").write_text("int b;\n")
    (tmp_path / "include" / "shared.h").write_text("int shared;\n")
    return tmp_path


def test_headers_are_found_transitively(sources: Path) -> None:
    found = source_files(sources / "kernel.cu", [sources / "include"])
    assert found == [
        ("kernel.cu", sources / "kernel.cu"),
        ("a.cuh", sources / "a.cuh"),
        ("shared.h", sources / "include" / "shared.h"),
        ("cuda_fp16.h", None),
        ("sub/b.cuh", sources / "sub" / "b.cuh"),
    ]


@pytest.mark.parametrize("changed", ["kernel.cu", "a.cuh", "sub/b.cuh", "include/shared.h"])
def test_a_digest_changes_with_every_source(sources: Path, changed: str) -> None:
    def digest() -> str:
        return digest_sources(sources / "kernel.cu", [sources / "include"]).whole

    before = digest()
    (sources / "unrelated.cuh").write_text("int unrelated;\n")
    assert digest() == before
    content = (sources / changed).read_text()
    (sources / changed).write_text(content + "int more;\n")
    after = digest()
    assert after != before
    (sources / changed).write_text(content)
    assert digest() == before


def test_a_digest_sees_a_header_that_appears_before_another(sources: Path) -> None:
    nearer = sources / "nearer"
    nearer.mkdir()
    folders = [nearer, sources / "include"]
    before = digest_sources(sources / "kernel.cu", folders).whole
    (nearer / "shared.h").write_text("int other;\n")
    assert digest_sources(sources / "kernel.cu", folders).whole != before


def test_each_source_has_its_digest_and_is_read_once(
    sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []
    read_bytes = Path.read_bytes

    def note(path: Path) -> bytes:
        read.append(path)
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", note)
    digests = digest_sources(sources / "kernel.cu", [sources / "include"])
    names = ("kernel.cu", "a.cuh", "include/shared.h", "sub/b.cuh")
    assert read == [sources / name for name in names]
    assert digests.files == {
        str(sources / name): hashlib.sha256((sources / name).read_bytes()).hexdigest()
        for name in names
    }
