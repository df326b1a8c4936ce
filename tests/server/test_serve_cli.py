"""The command `cupaged serve`: its options are the settings, and mistakes get one line."""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from cupaged.cli import serve
from cupaged.cli.main import build_parser, main
from cupaged.server.settings import QUEUE_DEFAULTS, ServeSettings
from cupaged.server.settings_sources import CONFIG, load_settings, setting_keys

SECONDS = 60


def parse(*words: str) -> argparse.Namespace:
    args, unknown = build_parser().parse_known_args(["serve", *words])
    assert not unknown
    return args


def options() -> dict[str, Any]:
    tables = {**serve.SERVE, **serve.ENGINE_OPTIONS}
    return {o.field or o.dest: o for table in tables.values() for o in table}


def test_every_setting_has_a_flag() -> None:
    assert {*options(), "model"} == set(setting_keys())


def test_the_defaults_in_the_help_are_the_real_ones() -> None:
    defaults = {f.name: f.default for f in fields(ServeSettings)} | dict(QUEUE_DEFAULTS)
    stated = {
        name: option.help.partition("(default: ")[2].rstrip(")")
        for name, option in options().items()
        if name in defaults and "(default: " in option.help
    }
    words = {"none", "no limit", "that of gRPC", "what MODEL is called"}
    for name, text in stated.items():
        if text in words:
            assert not defaults[name], name
        elif text == "64MiB":
            assert defaults[name] == 64 * 2**20
        else:
            assert text == (f"{defaults[name]:g}" if isinstance(defaults[name], float) else
                            str(defaults[name])), name  # fmt: skip
    unstated = {n for n, d in defaults.items() if d not in (None, False, ()) and n not in stated}
    assert not unstated - {"metrics_host", "engine", "served_model_name", "services"}


def test_flags_become_settings() -> None:
    args = parse(
        "org/model", "--served-model-name", "a", "--served-model-name", "b", "--port", "0",
        "--max-message-bytes", "1MiB", "--drain-delay", "2", "--restart-engine", "-v",
        "--max-num-seqs", "3", "--engine-seed", "7", "--kv-cache-memory-bytes", "1GiB",
        "--metrics-port", "-1", "--config", "x.toml",
    )  # fmt: skip
    given = serve.flags(args)
    assert given.pop(CONFIG) == "x.toml"
    settings = load_settings(given, {})
    assert settings == ServeSettings(
        model="org/model",
        served_model_name=("a", "b"),
        port=0,
        max_message_bytes=2**20,
        drain_delay=2.0,
        restart_engine=True,
        log_level="debug",
        metrics_port=-1,
        engine={**QUEUE_DEFAULTS, "max_num_seqs": 3, "seed": 7, "kv_cache_memory_bytes": 2**30},
    )


def test_what_is_not_given_is_left_to_file_and_environment() -> None:
    assert serve.flags(parse()) == {}


@pytest.mark.parametrize("columns", [80, 100, 200])
def test_help_fits(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    parsers = next(a for a in build_parser()._actions if isinstance(a.choices, dict)).choices
    text = parsers["serve"].format_help()  # type: ignore[index]
    assert max(map(len, text.splitlines())) <= min(columns, 100)
    for title in serve.SERVE:
        assert f"\n{title}:\n" in text


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cupaged", "serve", "--port", "0", "--metrics-port", "0"]
    return subprocess.run([*command, *words], capture_output=True, text=True, timeout=SECONDS)


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    done = run(str(tmp_path / "missing"), "--log-level", "error")
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("cupaged: ")
    assert "missing" in line


def test_an_option_that_the_engine_refuses(tmp_path: Path) -> None:
    done = run("--block-size", "5", "--log-level", "error")
    assert done.returncode == 2
    assert done.stderr == ("cupaged: block_size must be one of (8, 16, 32, 64, 128), got 5\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prot", "1"], "cupaged serve: unknown option --prot; perhaps --port"),
        (["--tensor-parallel-size", "2"], "--tensor-parallel-size is not supported"),
        (["--host", "0.0.0.0"], "cupaged: --host must be a loopback address"),
        (["--log-level", "loud"], "cupaged: --log-level must be 'debug' or 'info'"),
        (["--config", "missing.toml"], "cupaged: config must be a file that can be read"),
        (["a", "--model", "b"], "cupaged: --model must be the same as MODEL='a'"),
    ],
)
def test_mistakes(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert message in line
