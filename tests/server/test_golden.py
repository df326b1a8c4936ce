"""What a person reads of `serve`, `client` and `bench` is an interface: the help, and the log."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cupaged.cli.main import main
from cupaged.client import Client
from tests.e2e.cli import command, environment

GOLDEN = Path(__file__).parent / "golden"
VERBS = (
    "serve", "client", "client generate", "client chat", "client health", "client load",
    "bench", "bench serve", "bench latency", "bench throughput", "proto",
)  # fmt: skip
SECONDS = 60


def golden(verb: str) -> Path:
    """Written by `COLUMNS=100 cupaged VERB --help`."""
    return GOLDEN / f"{verb.replace(' ', '_')}_help.txt"


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="argparse prints `-a, --address ADDRESS`")
@pytest.mark.parametrize("verb", VERBS)
def test_help(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert main([*verb.split(), "--help"]) == 0
    assert capsys.readouterr().out == golden(verb).read_text(encoding="utf-8")


def forms(path: Path) -> list[re.Pattern[str]]:
    """Lines in which {n} stands for a number, and {any other word} for anything."""
    named = {"{n}": r"\d[\d.]*"}
    return [
        re.compile("".join(
            named.get(part, ".+") if part.startswith("{") else re.escape(part)
            for part in re.split(r"(\{\w+\})", line)
        ))
        for line in path.read_text(encoding="utf-8").splitlines()
    ]  # fmt: skip


def lines_of_a_life(model: str, *options: str) -> list[str]:
    """The log of a server that answers one request and is asked to end."""
    words = ("serve", model, "--port", "0", "--metrics-port", "0", "--device", "cpu", *options)
    with subprocess.Popen(
        command(*words), env=environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            place = re.search(r" on grpc://(\S+) ", process.stdout.readline())
            assert place is not None
            with Client(place[1], timeout=SECONDS) as client:
                client.generate("the cat", request_id="req-7", max_tokens=3, ignore_eos=True)
            process.terminate()
            out, log = process.communicate(timeout=SECONDS)
        finally:
            process.kill()
    assert (process.returncode, out) == (0, "")
    return log.splitlines()


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_log_of_a_life(tiny_model: str, log_format: str) -> None:
    lines = lines_of_a_life(tiny_model, "--log-format", log_format, "--disable-log-stats")
    expected = forms(GOLDEN / f"serve_log_{log_format}.txt")
    matches: Callable[[str], list[str]] = lambda line: [  # noqa: E731
        form.pattern for form in expected if form.fullmatch(line)
    ]
    assert [line for line in lines if len(matches(line)) != 1] == []
    assert sorted(matches(line)[0] for line in lines) == sorted(f.pattern for f in expected)
