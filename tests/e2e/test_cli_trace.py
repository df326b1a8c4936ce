"""`--trace FILE` and `cupaged trace`: recorded, shown, run again, and what may go wrong."""

from __future__ import annotations

import re
import signal
import stat
import subprocess
from pathlib import Path
from random import Random

import pytest

from cupaged.cli.trace_timeline import Look, bar
from cupaged.engine.step_events import PoolCounts
from cupaged.engine.trace_file import TraceReader
from tests.e2e.cli import Inline, Terminal, command, environment, plain
from tests.unit.test_trace_file import FIRST_LINE, framed, frames_of, replaced

PROMPTS = [word for i in range(6) for word in ("-p", f"The memory of a process {i}")]
CROWDED = (
    "-n", "2", "--temperature", "0.9", "--seed", "1", "--max-tokens", "20", "--ignore-eos",
    "--num-gpu-blocks-override", "20", "--block-size", "8", "--max-model-len", "60",
)  # fmt: skip


@pytest.fixture(scope="module")
def trace(cli_model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve sequences in a pool that is too small for them."""
    path = tmp_path_factory.mktemp("trace") / "t"
    line = command("generate", cli_model, *PROMPTS, *CROWDED, "--trace", str(path))
    subprocess.run(line, env=environment(), check=True, capture_output=True, timeout=60)
    return path


def test_recording_changes_no_answer(cupaged: Inline, cli_model: str, tmp_path: Path) -> None:
    path = tmp_path / "t"
    traced = cupaged("generate", cli_model, *PROMPTS, *CROWDED, "--trace", str(path))
    assert traced == cupaged("generate", cli_model, *PROMPTS, *CROWDED)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_replay_is_equal(cupaged: Inline, trace: Path) -> None:
    done = cupaged("trace", "replay", str(trace))
    assert (done.code, done.err) == (0, "")
    match = re.fullmatch(r"equal: (\d+) steps\n", done.out)
    assert match and int(match[1]) > 20


def test_replay_of_prompts_that_are_told_about(
    cupaged: Inline, cli_model: str, tmp_path: Path
) -> None:
    """What the prefix cache may spare a preempted request depends on what was told before."""
    path = str(tmp_path / "t")
    told = ("--prompt-logprobs", "0", "--json", "--trace", path)
    assert cupaged("generate", cli_model, *PROMPTS, *CROWDED, *told).code == 0
    shown, done = cupaged("trace", "show", path).out, cupaged("trace", "replay", path)
    found = re.search(r"(\d+) found in the prefix cache; (\d+) preemptions", shown)
    assert found is not None and int(found[1]) > 0 and int(found[2]) > 0
    assert done.code == 0, done.out


@pytest.mark.parametrize("columns", [80, 120])
def test_the_timeline_fits_the_terminal(
    cupaged: Inline, trace: Path, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    done = cupaged("trace", "show", str(trace))
    assert (done.code, done.err) == (0, "")
    timeline, _, summary = done.out.partition("\n\n")
    steps = timeline.splitlines()[2:]
    assert {len(line) for line in steps} == {columns - 1}
    assert [int(line.split()[0]) for line in steps] == list(range(len(steps)))
    assert f"{len(steps)} steps in" in summary
    assert "6 requests; sequences that ended: 12 length" in summary
    assert "240 drawn" in summary, "12 sequences of 20 tokens"
    assert "at most 20 of 20 used" in summary or "at most 19 of 20 used" in summary
    assert "\x1b" not in done.out


def test_steps_can_be_chosen_and_put_together(cupaged: Inline, trace: Path) -> None:
    done = cupaged("trace", "show", str(trace), "--from", "5", "--to", "14", "--every", "5")
    timeline, _, summary = done.out.partition("\n\n")
    assert [line.split()[0] for line in timeline.splitlines()[2:]] == ["5", "10"]
    assert summary.startswith("10 steps in")
    assert cupaged("trace", "show", str(trace), "--from", "9999").out.endswith("\n\nno step\n")


def test_the_life_of_a_request(cupaged: Inline, trace: Path) -> None:
    with TraceReader(trace) as reader:
        first = next(iter(reader))
    done = cupaged("trace", "show", str(trace), "--request", first.request.request_id)  # type: ignore[union-attr]
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert "arrives: " in lines[0] and "n=2, max_tokens=20" in lines[0]
    assert "step 0: admitted with 0 tokens cached, computes 0.." in lines[1]
    assert sum("ends: length" in line for line in lines) == 2
    times = [float(line.split()[0]) for line in lines]
    assert times == sorted(times)
    unknown = cupaged("trace", "show", str(trace), "--request", "nobody")
    assert unknown.code == 1 and unknown.err == f"cupaged: {trace}: has no request 'nobody'\n"


def test_colours_on_a_terminal_only(trace: Path) -> None:
    terminal = Terminal(*command("trace", "show", str(trace)))
    assert terminal.end() == 0
    assert "\x1b[3" in terminal.written
    steps = [line for line in plain(terminal.written).splitlines() if re.search(r"\d%$", line)]
    assert {len(line) for line in steps} == {79}


def test_plain_characters_where_there_are_no_others(trace: Path) -> None:
    ascii_only = environment(PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    done = subprocess.run(
        command("trace", "show", str(trace)), env=ascii_only, capture_output=True, timeout=60
    )
    assert done.returncode == 0 and b"KV pool: # used  = shared  - cached  . free" in done.stdout


@pytest.mark.parametrize(
    ("pool", "drawn"),
    [
        (PoolCounts(0, 0, 0, 0), ".........."),
        (PoolCounts(1, 0, 0, 0), "#........."),
        (PoolCounts(50, 20, 20, 0), "==###--..."),
        (PoolCounts(40, 0, 0, 10), "#####....."),
        (PoolCounts(100, 1, 0, 0), "=#########"),
    ],
)
def test_the_bar_shows_shares_of_the_pool(pool: PoolCounts, drawn: str) -> None:
    assert bar(pool, 100, 10, Look(("=", "#", "-", "."), 80, False)) == drawn


def test_a_file_that_cannot_be_written_is_refused_before_the_model_is_read(
    cupaged: Inline, cli_model: str, tmp_path: Path
) -> None:
    done = cupaged("generate", cli_model, "-p", "a", "--trace", str(tmp_path / "no" / "t"))
    assert (done.code, done.out) == (2, "")
    assert "trace must be a file that can be written (there is no folder" in done.err
    assert done.err.count("\n") == 1


def test_an_interrupted_run_leaves_a_whole_trace(
    cupaged: Inline, cli_model: str, tmp_path: Path
) -> None:
    path = tmp_path / "t"
    line = command("generate", cli_model, "-p", "a", "--ignore-eos", "--trace", str(path))
    process = subprocess.Popen(
        line, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors.decode().strip()) == (130, "interrupted")
    done = cupaged("trace", "replay", str(path))
    assert done.code == 0 and done.out.startswith("equal: ") and "cut" not in done.out
    assert cupaged("trace", "show", str(path)).code == 0


def test_a_difference_is_exit_code_1(cupaged: Inline, trace: Path, tmp_path: Path) -> None:
    frames = frames_of(trace.read_bytes())
    header = frames[0]
    assert isinstance(header, dict)
    header["config"]["watermark"] = 0.9
    (tmp_path / "t").write_bytes(FIRST_LINE + b"".join(map(framed, frames)))
    done = cupaged("trace", "replay", str(tmp_path / "t"))
    assert (done.code, done.err) == (1, "")
    assert re.match(
        r"different at step 0, after 0 steps: .*\n  recorded  .*\n  now       .*\n"
        r"  the plan was  .*\n  and is now    .*\nequal: 0 steps before it",
        done.out,
    )


def test_a_cut_trace_is_shown_as_far_as_it_goes(
    cupaged: Inline, trace: Path, tmp_path: Path
) -> None:
    (tmp_path / "t").write_bytes(trace.read_bytes()[:-5])
    for verb in ("show", "replay"):
        done = cupaged("trace", verb, str(tmp_path / "t"))
        assert (done.code, done.err) == (0, "")
        assert re.search(r"\nthe last record is cut: \d+ bytes were not read\n$", done.out)


def test_a_damaged_trace_is_one_line(cupaged: Inline, trace: Path, tmp_path: Path) -> None:
    """Also where the checksums are right: show and replay believe nothing."""
    data, random = bytearray(trace.read_bytes()), Random(2)
    data[len(data) // 2] ^= 1
    (tmp_path / "bad").write_bytes(data)
    for verb in ("show", "replay"):
        done = cupaged("trace", verb, str(tmp_path / "bad"))
        assert done.code == 1
        assert re.fullmatch(r"cupaged: .*bad: record \d+ is damaged; what .*\n", done.err)
    frames = frames_of(trace.read_bytes())
    for number in range(1, len(frames)):
        changed = [*frames]
        changed[number] = replaced(frames[number], random)
        (tmp_path / "bad").write_bytes(FIRST_LINE + b"".join(map(framed, changed)))
        for words in (("show",), ("show", "--request", "0"), ("replay",)):
            done = cupaged("trace", *words, str(tmp_path / "bad"))
            assert done.code in (0, 1) and "Traceback" not in done.err
            assert done.err.count("\n") <= 1


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--every", "0"), "--every must be an integer >= 1, got 0"),
        (("--from", "3", "--to", "2"), "--from must be at most --to 2, got 3"),
        (("--from", "x"), "invalid int value"),
    ],
)
def test_wrong_usage(cupaged: Inline, trace: Path, words: tuple[str, ...], error: str) -> None:
    done = cupaged("trace", "show", str(trace), *words)
    assert done.code == 2 and error in done.err


def test_what_is_no_trace(cupaged: Inline, tmp_path: Path) -> None:
    (tmp_path / "t").write_text("hello")
    for verb in ("show", "replay"):
        assert cupaged("trace", verb, str(tmp_path / "t")).err == (
            f"cupaged: {tmp_path / 't'}: is not a trace of cupaged\n"
        )
        missing = cupaged("trace", verb, str(tmp_path / "none"))
        assert missing.err == (
            f"cupaged: {tmp_path / 'none'}: cannot be read: No such file or directory\n"
        )
    assert cupaged("trace").code == 2
