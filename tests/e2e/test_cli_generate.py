"""`generate`: where prompts come from, and how answers are printed."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest

from tests.e2e.cli import SHORT, Inline, command, environment


def test_the_same_answer_from_flag_file_and_standard_input(
    cupaged: Inline, cli_model: str, tmp_path: Path
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"\xef\xbb\xbfthe cat sat\r\n")
    flag = cupaged("generate", cli_model, "--prompt", "the cat sat", *SHORT)
    assert (flag.code, flag.err) == (0, "") and len(flag.out) > 1
    assert cupaged("generate", cli_model, *SHORT, stdin="the cat sat\n") == flag
    assert cupaged("generate", cli_model, "-f", str(file), *SHORT) == flag
    assert cupaged("generate", cli_model, "-f", "-", *SHORT, stdin="the cat sat") == flag


def test_only_one_line_break_is_taken_off(cupaged: Inline, cli_model: str) -> None:
    asked = cupaged("generate", cli_model, *SHORT, "--json", stdin="a \n\n")
    assert json.loads(asked.out)["prompt"] == "a \n"


def test_several_answers_stand_under_headings(cupaged: Inline, cli_model: str) -> None:
    arguments = ("generate", cli_model, "-p", "a", "-p", "b", "-n", "2", *SHORT)
    sampled = (*arguments, "--temperature", "0.9", "--seed", "3")
    done = cupaged(*sampled)
    headings = [line for line in done.out.splitlines() if line.startswith("--- ")]
    assert headings == [f"--- {name} (length)" for name in ("1.1", "1.2", "2.1", "2.2")]
    assert cupaged(*sampled) == done


def test_prompts_keep_the_order_of_flags_and_files(
    cupaged: Inline, cli_model: str, tmp_path: Path
) -> None:
    (tmp_path / "b").write_text("beta")
    done = cupaged(
        "generate", cli_model, "-p", "alpha", "-f", str(tmp_path / "b"), "-p", "gamma", "--json",
        "--max-tokens", "2",
    )  # fmt: skip
    records = [json.loads(line) for line in done.out.splitlines()]
    assert [r["prompt"] for r in records] == ["alpha", "beta", "gamma"]
    assert [r["prompt_index"] for r in records] == [0, 1, 2]


def test_json_has_a_line_for_each_answer(cupaged: Inline, cli_model: str) -> None:
    done = cupaged(
        "generate", cli_model, "-p", "Größe", "-n", "2", "--temperature", "1", "-s", "5", *SHORT,
        "--logprobs", "2", "--prompt-logprobs", "0", "--json",
    )  # fmt: skip
    first, second = (json.loads(line) for line in done.out.splitlines())
    assert "Größe" in done.out and (first["index"], second["index"]) == (0, 1)
    for record in (first, second):
        assert (record["finish_reason"], record["stop_reason"]) == ("length", None)
        assert len(record["token_ids"]) == len(record["logprobs"]) == 6
        for token, position in zip(record["token_ids"], record["logprobs"], strict=True):
            assert next(iter(position)) == str(token) and 2 <= len(position) <= 3
        drawn = sum(next(iter(p.values()))["logprob"] for p in record["logprobs"])
        assert record["cumulative_logprob"] == pytest.approx(drawn)
        assert record["prompt_logprobs"][0] is None
        assert len(record["prompt_logprobs"]) == record["num_prompt_tokens"]


def test_json_without_text(cupaged: Inline, cli_model: str) -> None:
    done = cupaged("generate", cli_model, "-p", "a", *SHORT, "--json", "--no-detokenize")
    record = json.loads(done.out)
    assert record["text"] == "" and len(record["token_ids"]) == 6
    assert "logprobs" not in record


def answer(cupaged: Inline, model: str, *arguments: str) -> list[int]:
    """The token ids of an answer to one prompt."""
    done = cupaged("generate", model, "-p", "the cat", *SHORT, "--json", *arguments)
    assert (done.code, done.err) == (0, "")
    ids: list[int] = json.loads(done.out)["token_ids"]
    return ids


def test_sampling_options_reach_the_model(cupaged: Inline, cli_model: str) -> None:
    greedy = answer(cupaged, cli_model)
    first = greedy[0]
    assert first not in answer(cupaged, cli_model, "--logit-bias", f'{{"{first}": -100}}')
    assert set(answer(cupaged, cli_model, "--allowed-token-ids", "300,301")) <= {300, 301}
    assert answer(cupaged, cli_model, "--stop-token-ids", f"{first},7") == [first]
    assert answer(cupaged, cli_model, "--trace-decode-token-ids", "9,8,7")[:3] == [9, 8, 7]
    once = answer(cupaged, cli_model, "--frequency-penalty", "2", "--presence-penalty", "2")
    assert len(set(once)) >= len(set(greedy))
    hot = ("--temperature", "5", "-s", "1")
    assert answer(cupaged, cli_model, *hot, "--min-p", "1") == greedy  # only the best is left
    assert answer(cupaged, cli_model, *hot, "--top-k", "1") == greedy
    assert answer(cupaged, cli_model, *hot) != greedy


def test_the_authors_recommendation_goes_before_the_defaults(
    cupaged: Inline, cli_model: str, tmp_path: Path
) -> None:
    import shutil

    model = tmp_path / "recommends"
    shutil.copytree(cli_model, model)
    (model / "generation_config.json").write_text('{"temperature": 5.0, "max_new_tokens": 3}')
    asked = ("generate", str(model), "-p", "the cat", "--ignore-eos", "-s", "1", "--json")

    def ids(*arguments: str) -> list[int]:
        found: list[int] = json.loads(cupaged(*asked, *arguments).out)["token_ids"]
        return found

    greedy = answer(cupaged, cli_model)
    assert len(ids()) == 3 and ids() != greedy[:3]
    assert ids("--temperature", "0") == greedy[:3]
    assert ids("--generation-config", "vllm", "--max-tokens", "6") == greedy


def test_interrupt_stops_cleanly(cli_model: str) -> None:
    line = command("generate", cli_model, "-p", "a", "--ignore-eos")
    process = subprocess.Popen(
        line, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.read(1)  # it generates now
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert errors.decode().strip() == "interrupted"
