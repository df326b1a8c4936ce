"""Downloads that the disk, the network or a person interrupts, and files that come damaged."""

from __future__ import annotations

import errno
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import constants

from cupaged.errors import (
    CapacityError,
    HubError,
)
from cupaged.loading import hub_download
from cupaged.loading.hub import PullPlan, cached_model, parse_model_name, pull
from tests.fake_hub import FakeHub
from tests.unit.small_hub import (
    MODEL,
    NAME,
    WEIGHTS,
    held,
    leftovers,
    small_hub,
)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub that has one model, and an empty cache."""
    with small_hub(tmp_path / "home", monkeypatch) as server:
        yield server


# ---- the disk ------------------------------------------------------------------------------------


def test_a_disk_that_is_too_small(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    size = sum(len(content) for content in MODEL.values())
    usage = SimpleNamespace(free=size - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    message = rf"at most {size - 1} \(free in .*home/hub; .*HF_HOME.*\), got {size}$"
    with pytest.raises(CapacityError, match=message):
        pull(NAME)
    assert hub.bodies() == []
    usage.free = size
    assert held(pull(NAME, progress=False)) == MODEL


def full_disk(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """Writes fail once a file would be longer than `room`."""

    def write(self: Any, data: bytes, /) -> int:
        if self.tell() + len(data) > room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(self, data)

    original = hub_download._CountedWriter.write
    monkeypatch.setattr(hub_download._CountedWriter, "write", write)


def test_a_disk_that_fills_up(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from cupaged.cli.main import main

    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10_000)
    with monkeypatch.context() as context:
        full_disk(context, 50_000)
        assert main(["pull", "--quiet", NAME]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert re.match(r"cupaged: download of org/model in bytes must be at most \d+ \(free in", err)
    assert err.endswith(f"got {len(WEIGHTS) - 50_000}\n")  # the small files are here already
    assert [path.stat().st_size for path in leftovers()] == [50_000]
    assert held(pull(NAME, progress=False)) == MODEL
    assert hub.bodies("model.safetensors")[-1].range == "bytes=50000-"


def test_a_cache_below_a_file(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "file" / "hub"))
    with pytest.raises(HubError, match=r"file/hub cannot be written \(Not a dir.*set HF_HOME"):
        pull(NAME)
    assert hub.bodies() == []


def test_a_cache_that_is_read_only(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**options: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    folder = pull(NAME, progress=False)
    monkeypatch.setattr(tempfile, "TemporaryFile", fail)
    assert pull(NAME) == folder  # nothing is to be written
    hub.repos[NAME].files["config.json"] = b"new"
    with pytest.raises(HubError, match=r"cannot be written \(Read-only .*\): set HF_HOME or HF"):
        pull(NAME)


def test_a_user_without_a_home(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", "~/.cache/huggingface/hub")
    with pytest.raises(HubError, match="has no home: set HF_HOME"):
        pull(NAME)
    assert not Path("~").exists()


def test_a_folder_of_the_cache_that_cannot_be_written(hub: FakeHub) -> None:
    folder = Path(constants.HF_HUB_CACHE) / "models--org--model"
    folder.parent.mkdir(parents=True)
    folder.touch()  # a file where a folder is needed
    with pytest.raises(HubError, match=r"models--org--model.*set HF_HOME or HF_HUB_CACHE to one"):
        pull(NAME, progress=False)


# ---- interruptions -------------------------------------------------------------------------------


def test_a_connection_that_breaks_is_taken_up_again(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10_000)
    hub.break_after["model.safetensors"] = 125_000
    assert held(pull(NAME, progress=False)) == MODEL
    ranges = [request.range for request in hub.bodies("model.safetensors")]
    assert ranges == ["", "bytes=120000-"]


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), MemoryError()])
def test_an_interrupted_download_goes_on(
    failure: BaseException, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10_000)

    def write(self: Any, data: bytes, /) -> int:
        if self.tell() >= 30_000:
            raise failure
        return original(self, data)

    original = hub_download._CountedWriter.write
    with monkeypatch.context() as context:
        context.setattr(hub_download._CountedWriter, "write", write)
        with pytest.raises(type(failure)):
            pull(NAME, progress=False)
    assert [path.stat().st_size for path in leftovers()] == [30_000]
    assert leftovers("model.safetensors") == []
    assert cached_model(parse_model_name(NAME)) is None
    plans: list[PullPlan] = []
    assert held(pull(NAME, progress=False, on_plan=plans.append)) == MODEL
    assert plans[0].missing_bytes == len(WEIGHTS) - 30_000
    assert hub.bodies("model.safetensors")[-1].range == "bytes=30000-"
    assert leftovers() == []


def test_a_hub_that_ignores_ranges(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10_000)
    hub.ignores_ranges = True
    hub.break_after["model.safetensors"] = 125_000
    assert held(pull(NAME, progress=False)) == MODEL


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
@pytest.mark.parametrize("damage", ["other", "short", "long"])
def test_a_file_that_comes_damaged_is_not_kept(file: str, damage: str, hub: FakeHub) -> None:
    true = MODEL[file]
    hub.lies = {file: {"other": true[:-1] + b"?", "short": true[:-1], "long": true + b"?"}[damage]}
    with pytest.raises(HubError, match=rf"{file}: came damaged and was removed; run the command"):
        pull(NAME, progress=False)
    assert leftovers() == [] and leftovers(file) == []
    hub.lies = {}
    assert held(pull(NAME, progress=False)) == MODEL


def test_a_leftover_that_is_damaged_is_not_kept(hub: FakeHub) -> None:
    folder = pull(NAME, progress=False)
    blob = (folder / "model.safetensors").resolve()
    for content in (b"x" * 1000, WEIGHTS + b"x" * 1000):
        (folder / "model.safetensors").unlink()
        blob.rename(blob.with_name(blob.name + ".incomplete"))
        leftovers()[0].write_bytes(content)
        if len(content) < len(WEIGHTS):
            with pytest.raises(HubError, match="came damaged"):
                pull(NAME, progress=False)
        assert held(pull(NAME, progress=False)) == MODEL
