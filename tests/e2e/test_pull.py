"""`cupaged pull` and models by name, as processes meet a hub, each other and an interrupt."""

from __future__ import annotations

import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fake_hub import FakeHub, Repo
from tests.tiny_models import TINY, write_hf_folder

ROOT = Path(__file__).resolve().parents[2]
NAME = "org/tiny"
WEIGHTS = "model.safetensors"
GENERATE = ("-p", "the cat", "--max-tokens", "4", "--ignore-eos")
CHUNK = 10 * 2**20  # the library hands bytes on in pieces of this size
LARGE = os.urandom(1024) * (24 * 1024)  # 24 MiB: two whole pieces and a rest


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that works."""
    return write_hf_folder(tmp_path_factory.mktemp("local") / "model", TINY)


@pytest.fixture
def hub(folder: Path) -> Iterator[FakeHub]:
    """A hub with that model, and one with weights that are large but mean nothing."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    large = Repo({"config.json": b"{}", WEIGHTS: LARGE})
    with FakeHub({NAME: Repo(files), "org/large": large}) as server:
        yield server


def environment(hub: FakeHub, home: Path, **changes: str) -> dict[str, str]:
    """A process that knows this hub only, and keeps its cache in `home`."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGINGFACE"))}
    return {
        **kept,
        "PYTHONPATH": str(ROOT),
        "OPENBLAS_NUM_THREADS": "1",
        "NO_PROXY": "127.0.0.1,localhost",
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home),
        **changes,
    }


def start(env: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "cupaged", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True)


def cupaged(env: dict[str, str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    with start(env, *arguments) as process:
        out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def test_pull_then_generate_then_offline(hub: FakeHub, folder: Path, tmp_path: Path) -> None:
    env = environment(hub, tmp_path)
    code, out, err = cupaged(env, "pull", NAME)
    lines = out.splitlines()
    commit = hub.repos[NAME].commit
    assert code == 0 and lines[0] == f"{NAME} is commit {commit[:12]}:"
    assert re.fullmatch(r"  model\.safetensors +3\.6 MiB", lines[-3])
    assert lines[-2] == "to download: 3.6 MiB of 5 files"
    snapshot = tmp_path / "hub" / "models--org--tiny" / "snapshots" / commit
    assert lines[-1] == str(snapshot)
    assert [line.split()[:2] for line in err.splitlines()][-1] == ["downloading", WEIGHTS]
    assert (snapshot / WEIGHTS).read_bytes() == (folder / WEIGHTS).read_bytes()

    code, out, err = cupaged(env, "pull", NAME)
    assert code == 0 and out.splitlines()[-2:] == ["nothing to download", str(snapshot)]
    assert err == ""

    by_name = cupaged(env, "generate", NAME, *GENERATE)
    hub.requests.clear()
    offline = cupaged({**env, "HF_HUB_OFFLINE": "1"}, "generate", NAME, *GENERATE)
    by_path = cupaged({**env, "HF_HUB_OFFLINE": "1"}, "generate", str(folder), *GENERATE)
    assert by_name == offline == by_path
    assert by_name[0] == 0 and by_name[2] == "" and by_name[1] != "\n"
    assert hub.requests == []


def test_variables_of_the_environment(hub: FakeHub, tmp_path: Path) -> None:
    hub.repos[NAME].gated = True
    env = environment(hub, tmp_path / "home", HF_HUB_CACHE=str(tmp_path / "elsewhere"))
    code, _, err = cupaged(env, "pull", NAME)
    lines = err.splitlines()
    assert code == 1 and [line.split()[0] for line in lines] == ["downloading", "cupaged:"]
    assert f"cupaged: {NAME} is gated" in err and f"{hub.url}/{NAME}" in err
    env["HF_TOKEN"] = hub.good_token
    code, out, err = cupaged(env, "pull", "--quiet", NAME)
    assert (code, err) == (0, "")
    assert (
        out.startswith(str(tmp_path / "elsewhere" / "models--org--tiny")) and out.count("\n") == 1
    )
    assert not (tmp_path / "home" / "hub").exists()
    code, out, err = cupaged({**env, "HF_HUB_OFFLINE": "1"}, "pull", "org/large")
    assert code == 1 and out == "" and "HF_HUB_OFFLINE" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("pull",), 2, "NAME"),
        (("pull", "org/name@"), 2, "cupaged: model name must be owner/name@ and a branch"),
        (("pull", "."), 2, "this is a file or folder here"),
        (("pull", "name"), 1, "no such file or folder"),
        (("pull", "org/absent"), 1, "there is no org/absent on http://127.0.0.1"),
        (("pull", f"{NAME}@v9"), 1, "has no revision 'v9'"),
        (("generate", "org/absent", *GENERATE), 1, "no such file or folder here, and there is no"),
    ],
)
def test_failures_have_one_line_and_an_exit_code(
    arguments: tuple[str, ...], code: int, message: str, hub: FakeHub, tmp_path: Path
) -> None:
    found, out, err = cupaged(environment(hub, tmp_path), *arguments)
    assert (found, out) == (code, "")
    assert message in err and "Traceback" not in err
    assert err.count("\n") == 1 or "NAME" in message


def test_a_home_that_cannot_be_written(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, _, err = cupaged(environment(hub, tmp_path / "file" / "home"), "pull", NAME)
    assert code == 1 and err.count("\n") == 1
    assert re.search(r"file/home/.*Not a directory.*file/home/hub.*set HF_HOME or", err)
    assert hub.bodies() == []


def test_a_home_that_is_read_only(hub: FakeHub, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o555)
    command = [sys.executable, "-m", "cupaged", "pull", NAME]
    if os.geteuid() == 0:  # who may write everywhere, unless that right is taken away
        if shutil.which("setpriv") is None:
            pytest.skip("root, and no setpriv")
        command = ["setpriv", "--bounding-set=-dac_override", *command]
    env = environment(hub, home)
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert re.search(r"home/hub cannot be written \(Permission denied\): set HF_HOME", done.stderr)
    assert hub.bodies() == []


def wait_for(path: Path, size: int) -> Path:
    """The unfinished file below `path`, once it is `size` long."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        found = list(path.rglob("*.incomplete"))
        if found and found[0].stat().st_size == size:
            return found[0]
        time.sleep(0.02)
    raise AssertionError(f"no unfinished file of {size} bytes")


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGKILL])
def test_what_an_interrupt_leaves_is_resumed(stop: int, hub: FakeHub, tmp_path: Path) -> None:
    env = environment(hub, tmp_path)
    hub.pause_after[WEIGHTS] = 2 * CHUNK + 1000
    with start(env, "pull", "org/large") as process:
        partial = wait_for(tmp_path, 2 * CHUNK)
        process.send_signal(stop)
        _, err = process.communicate(timeout=20)
    if stop == signal.SIGINT:
        assert process.returncode == 130
        assert err.splitlines()[-1] == "interrupted" and "Traceback" not in err
    assert partial.read_bytes() == LARGE[: 2 * CHUNK]
    assert not list(tmp_path.rglob(WEIGHTS))
    hub.pause_after.clear()
    hub.requests.clear()
    code, out, _ = cupaged(env, "pull", "org/large")
    assert code == 0 and "to download: 4.0 MiB of 1 files" in out
    assert (Path(out.splitlines()[-1]) / WEIGHTS).read_bytes() == LARGE
    assert [request.range for request in hub.bodies(WEIGHTS)] == [f"bytes={2 * CHUNK}-"]
    assert not list(tmp_path.rglob("*.incomplete"))


def test_two_processes_download_a_file_once(hub: FakeHub, tmp_path: Path) -> None:
    env = environment(hub, tmp_path)
    hub.pause_after[WEIGHTS] = 1000
    with start(env, "pull", NAME) as first:
        assert hub.paused.wait(30)
        with start(env, "pull", NAME) as second:
            assert second.stderr is not None
            waiting = [second.stderr.readline() for _ in range(2)]
            hub.resume.set()
            outputs = [process.communicate(timeout=30) for process in (first, second)]
    assert waiting[0].startswith(f"downloading {WEIGHTS}")
    assert f"{WEIGHTS}: waiting for another process" in waiting[1]
    assert first.returncode == second.returncode == 0
    assert outputs[0][0].splitlines()[-1] == outputs[1][0].splitlines()[-1]
    assert len(hub.bodies(WEIGHTS)) == 1
    names = [request.path for request in hub.bodies()]
    assert len(names) == len(set(names))


def test_a_local_path_calls_nobody(hub: FakeHub, folder: Path, tmp_path: Path) -> None:
    """Sockets are a failure, and the library is not even imported."""
    code = (
        "import sys\n"
        "def forbid(event, arguments):\n"
        "    assert not event.startswith('socket.'), event\n"
        "sys.addaudithook(forbid)\n"
        "from cupaged import LLM\n"
        "print(LLM(sys.argv[1]).generate(['the cat'])[0].finished)\n"
        "print('huggingface_hub' in sys.modules)\n"
    )
    command = [sys.executable, "-c", code, str(folder)]
    env = environment(hub, tmp_path)
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("True\nFalse\n", "")
    assert hub.requests == [] and list(tmp_path.iterdir()) == []


def test_a_terminal_sees_one_bar(hub: FakeHub, tmp_path: Path) -> None:
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "cupaged", "pull", "org/large"]
    env = environment(hub, tmp_path, COLUMNS="100")
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=follower, text=True)
    os.close(follower)
    written = b""
    while True:
        try:
            piece = os.read(leader, 65536)
        except OSError:  # the other side has closed
            break
        written += piece
        if not piece:
            break
    os.close(leader)
    out, _ = process.communicate(timeout=20)
    text = written.decode()
    assert process.returncode == 0 and out.splitlines()[-1].startswith(str(tmp_path))
    assert text.count("\n") == 1 and re.search(
        r"model\.safetensors: 100%\|█+\| 24\.0M/24\.0M", text
    )
