"""`cupaged bench latency` and `throughput` on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from cupaged.benchmarks.offline import PERCENTILES, Latency, latency_lines
from tests.e2e.cli import Inline


def test_latency(cupaged: Inline, cli_model: str, tmp_path: Path) -> None:
    path = tmp_path / "latency.json"
    done = cupaged(
        "bench", "latency", cli_model, "--input-len", "8", "--output-len", "3", "--batch-size", "2",
        "--n", "2", "--num-iters-warmup", "1", "--num-iters", "4", "--output-json", str(path),
    )  # fmt: skip
    assert done.code == 0
    result = json.loads(path.read_text())
    assert len(result["latencies"]) == 4 and min(result["latencies"]) > 0
    assert result["avg_latency"] == pytest.approx(sum(result["latencies"]) / 4)
    assert result["percentiles"]["50"] == pytest.approx(np.median(result["latencies"]))
    assert list(result["percentiles"]) == [str(p) for p in PERCENTILES]
    assert done.out.splitlines() == latency_lines(result)
    assert done.out.splitlines()[2].startswith("10% percentile latency: ")


def test_throughput_counts_what_was_made(cupaged: Inline, cli_model: str, tmp_path: Path) -> None:
    path = tmp_path / "throughput.json"
    done = cupaged(
        "bench", "throughput", cli_model, "--num-prompts", "5", "--random-input-len", "12",
        "--random-output-len", "4", "--n", "2", "--disable-detokenize", "--output-json", str(path),
    )  # fmt: skip
    assert done.code == 0
    result = json.loads(path.read_text())
    assert (result["num_requests"], result["total_num_tokens"]) == (5, 5 * (12 + 2 * 4))
    assert result["requests_per_second"] == pytest.approx(5 / result["elapsed_time"])
    assert result["tokens_per_second"] == pytest.approx(100 / result["elapsed_time"])
    first, *counts = done.out.splitlines()
    assert first == (
        f"Throughput: {result['requests_per_second']:.2f} requests/s, "
        f"{result['tokens_per_second']:.2f} total tokens/s, "
        f"{40 / result['elapsed_time']:.2f} output tokens/s"
    )
    assert counts == ["Total num prompt tokens:  60", "Total num output tokens:  40"]


def test_throughput_of_texts_and_chats(cupaged: Inline, cli_model: str, tmp_path: Path) -> None:
    talk = {"conversations": [{"value": "The memory of a process"}, {"value": "lies in pages."}]}
    (tmp_path / "talks.json").write_text(json.dumps([talk]))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Hello", "output_tokens": 3}\n')
    for name, file, output in (("sharegpt", "talks.json", None), ("custom", "prompts.jsonl", 3)):
        path = tmp_path / f"{name}.json"
        done = cupaged(
            "bench", "throughput", cli_model, "--dataset-name", name,
            "--dataset-path", str(tmp_path / file), "--output-json", str(path),
        )  # fmt: skip
        assert done.code == 0, done.err
        result = json.loads(path.read_text())
        assert result["num_requests"] == 1 and result["total_prompt_tokens"] >= 4
        assert output is None or result["total_output_tokens"] == output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("latency", "--batch-size", "0"), "--batch-size must be >= 1, got 0"),
        (("latency", "--num-iters-warmup", "-1"), "--num-iters-warmup must be >= 0, got -1"),
        (("throughput", "--dataset-name", "trace"), "--dataset-path must be a file for trace"),
        (("throughput", "--num-prompts", "0"), "--num-prompts must be in [1, 2^31), got 0"),
        ((), "a command is missing"),
        (("startup",), "unknown command 'startup'"),
    ],
)
def test_wrong_options(cupaged: Inline, arguments: tuple[str, ...], message: str) -> None:
    done = cupaged("bench", *arguments)
    assert (done.code, done.out) == (2, "") and message in done.err


def test_lengths_that_the_model_does_not_take(cupaged: Inline, cli_model: str) -> None:
    done = cupaged("bench", "throughput", cli_model, "--random-input-len", "1020")
    assert done.code == 2 and "at most 1024 tokens together" in done.err


@pytest.mark.parametrize("verb", ["serve", "latency", "throughput"])
def test_help_fits_a_terminal(cupaged: Inline, verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    done = cupaged("bench", verb, "--help")
    assert (done.code, done.err) == (0, "")
    assert max(map(len, done.out.splitlines())) <= 80


def test_defaults_are_those_of_the_field() -> None:
    assert Latency() == Latency(32, 128, 8, 1, 10, 30, True)
