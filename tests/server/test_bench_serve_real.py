"""`cupaged bench serve` against `cupaged serve` on a tiny model: they agree on what is counted."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cupaged.cli.main import main
from tests.e2e.cli import environment
from tests.tiny_models import TINY, write_hf_folder

SECONDS = 60.0


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a server that runs two sequences at once and lets three wait."""
    folder = tmp_path_factory.mktemp("bench")
    model = str(write_hf_folder(folder / "tiny", TINY))
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            [
                sys.executable, "-m", "cupaged", "serve", model, "--uds", str(folder / "s"),
                "--metrics-port", "-1", "--max-num-seqs", "2", "--max-num-queued-reqs", "3",
                "--drain-timeout", "1",
            ],
            stdout=subprocess.PIPE, stderr=log, env=environment(),
        )  # fmt: skip
    assert server.stdout is not None
    with server.stdout:
        line = server.stdout.readline().decode()
        assert "serving" in line, (folder / "log").read_text()
        yield f"unix:{folder / 's'}"
        server.send_signal(signal.SIGTERM)
        assert server.wait(SECONDS) == 0


def test_all_tokens_are_counted(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "result.json"
    code = main(
        [
            "bench", "serve", "--address", address, "--num-prompts", "6",
            "--random-input-len", "20", "--random-output-len", "15",
            "--random-range-ratio", "0.3", "--max-concurrency", "3",
            "--num-warmups", "1", "--save-result", "--save-detailed",
            "--result-filename", str(path),
        ]
    )  # fmt: skip
    assert code == 0, capsys.readouterr().err
    result = json.loads(path.read_text())
    assert (result["completed"], result["model_id"]) == (6, "tiny")
    assert (result["server"]["dtype"], result["server"]["max_num_seqs"]) == ("float32", 2)
    assert all(14 <= length <= 26 for length in result["input_lens"])
    assert all(10 <= length <= 20 for length in result["output_lens"])
    # What came in messages is what the server says it made.
    assert [sum(counts) for counts in result["message_tokens"]] == result["output_lens"]
    assert sum(result["output_lens"]) == result["total_output_tokens"]
    assert len(set(result["ttfts"])) == 6 and min(result["ttfts"]) > 0


def test_what_the_queue_refuses_is_counted(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = ("--random-input-len", "4", "--random-output-len", "200")
    assert main(["bench", "serve", "--address", address, "--num-prompts", "40", *lengths]) == 0
    lines = dict(line.rsplit(maxsplit=1) for line in capsys.readouterr().out.splitlines()[1:-1])
    refused = int(lines["  RESOURCE_EXHAUSTED QUEUE_FULL:"])
    assert refused > 0 and int(lines["Successful requests:"]) == 40 - refused
    assert int(lines["Total generated tokens:"]) == 200 * (40 - refused)
