"""`bench.peers`: the protocol with a runner, the figures, the table, and what is not there."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from bench import report
from bench.peers import __main__ as peers
from bench.peers import install
from bench.peers.contended import busy_core
from bench.peers.contestants import CONTESTANTS, ENGINES, HERE, Contestant, Entry, enter
from bench.peers.figures import (
    Loss,
    against_the_best,
    agreement,
    best_peer,
    figures,
    losses,
    ratio,
)
from bench.peers.measurement import Measured, Sample, measure, most_tokens, workload
from bench.peers.runner import Options
from bench.peers.runner_process import NOT_INHERITED, RunnerError, RunnerProcess
from bench.peers.table import markdown, table, verdict

ROOT = Path(__file__).resolve().parents[2]
FAKE = """
import sys
sys.path.append({root!r})
import os, time
from bench.peers.runner import serve

class Fake:
    def __init__(self, options):
        if options.model == "missing":
            raise FileNotFoundError("no such model: missing")
        print("noise on standard output")
        self.num_seqs = options.max_num_seqs
    def versions(self):
        return {{"fake": "1", "blas": os.environ.get("OPENBLAS_NUM_THREADS", "unset")}}
    def generate(self, requests):
        if len(requests) == 3:
            return [[7]] * 3
        if len(requests) == 4:
            print("last words", file=sys.stderr)
            sys.stderr.flush()
            os._exit(9)
        return [[prompt[0] + i for i in range(n)] for prompt, n in requests]
    def stream(self, prompt, num_tokens):
        start = time.perf_counter()
        return [5] * num_tokens, [start + 1.0 + 0.5 * i for i in range(num_tokens)]

serve(Fake, import_s=0.25)
"""
OURS32, OURS_FILE = Contestant("cupaged", "float32"), Contestant("cupaged", "file")
LLAMA32, LLAMA_FILE = Contestant("llama_cpp", "float32"), Contestant("llama_cpp", "file")
VLLM = Contestant("vllm", "float32")


@pytest.fixture
def fake(tmp_path: Path) -> tuple[str, ...]:
    """The command of a runner that needs no engine."""
    path = tmp_path / "fake_runner.py"
    path.write_text(FAKE.format(root=str(ROOT)))
    return (sys.executable, "-P", str(path))


def options(model: str = "") -> Options:
    return Options(model, "float32", "", max_num_seqs=16, max_model_len=544, threads=2)


def sample(
    at_16: float, at_64: float, *, decode: float = 20.0, prefill: float = 300.0, rss: float = 800.0
) -> Sample:
    """A round in which all that is not given is the same for everyone."""
    of_workload = {"wall_s": 1.0, "peak_rss_mb": rss}
    return {
        "start": {"import_s": 0.5, "load_s": 1.0},
        "single": {"decode_tokens_per_s": decode, "prefill_tokens_per_s": prefill},
        "16": {"output_tokens_per_s": at_16, **of_workload},
        "64": {"output_tokens_per_s": at_64, **of_workload},
    }


def samples() -> dict[Contestant, list[Sample]]:
    """Three rounds of five contestants; the second round was slow for everyone."""
    return {
        OURS32: [sample(100, 200), sample(60, 90), sample(110, 220)],
        OURS_FILE: [sample(150, 300), sample(90, 150), sample(150, 320)],
        LLAMA32: [sample(50, 60, decode=25), sample(20, 30, decode=25), sample(55, 66, decode=25)],
        LLAMA_FILE: [sample(40, 80, rss=400), sample(20, 50, rss=400), sample(60, 80, rss=400)],
        VLLM: [sample(48, 70, decode=10), sample(24, 36, decode=10), sample(50, 72, decode=10)],
    }


def test_a_runner_answers_what_it_is_asked(
    fake: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in NOT_INHERITED:
        monkeypatch.setenv(name, "1")
    with RunnerProcess(fake) as runner:
        loaded = runner.load(options())
        assert loaded["import_s"] == 0.25 and loaded["load_s"] >= 0
        assert loaded["versions"] == {"fake": "1", "blas": "unset"}
        assert 1 < loaded["peak_rss_mb"] < 10_000
        done = runner.generate([([10, 11], 3), ([20], 1)])
        assert done["token_ids"] == [[10, 11, 12], [20]] and done["wall_s"] > 0
        streamed = runner.stream([1, 2], 3)
        assert streamed["token_ids"] == [5, 5, 5]
        first, *later = streamed["token_s"]
        assert [round(b - a, 6) for a, b in zip([first, *later], later, strict=False)] == [0.5, 0.5]


def test_a_failure_says_what_it_was(fake: tuple[str, ...]) -> None:
    with RunnerProcess(fake) as runner:
        with pytest.raises(RunnerError, match="FileNotFoundError: no such model: missing"):
            runner.load(options("missing"))
        with pytest.raises(RunnerError, match="nothing has been loaded"):
            runner.generate([([1], 1)])
        runner.load(options())
        with pytest.raises(RunnerError, match="request 0: 1 tokens instead of 2"):
            runner.generate([([1], 2)] * 3)
        assert runner.generate([([1], 1)])["token_ids"] == [[1]]
        with pytest.raises(RunnerError, match=r"status 9: (?s:.*)last words"):
            runner.generate([([1], 1)] * 4)
        with pytest.raises(RunnerError, match="status 9"):
            runner.generate([([1], 1)])


def test_a_round_of_a_contestant(fake: tuple[str, ...]) -> None:
    measured = measure(Entry(LLAMA32, fake, ""), workload(2))
    assert list(measured.sample) == ["start", "single", "16", "64"]
    assert measured.sample["start"]["import_s"] == 0.25
    # A token every half second, the first of them after a second.
    assert round(measured.sample["single"]["decode_tokens_per_s"], 6) == 2.0
    assert 0 < measured.sample["single"]["prefill_tokens_per_s"] <= 512
    first = workload(1)[0][0][0]
    assert measured.token_ids[0] == list(range(first, first + 53))
    assert [len(ids) for ids in measured.token_ids] == [53, 41]


def test_the_workload_is_that_of_its_file() -> None:
    requests = workload(None)
    assert len(requests) == 64
    assert [len(prompt) for prompt, _ in requests[:4]] == [33, 88, 77, 256]
    assert sum(len(prompt) for prompt, _ in requests) == 5120
    assert sum(num_tokens for _, num_tokens in requests) == 4096
    assert most_tokens(requests[:2]) == 544  # the prefill of 512 and its token
    assert most_tokens([([0] * 600, 9)]) == 640


def test_medians_and_ranges() -> None:
    found = figures(samples()[OURS32])
    assert found["16"]["output_tokens_per_s"] == {"median": 100, "min": 60, "max": 110}
    assert found["single"]["decode_tokens_per_s"] == {"median": 20, "min": 20, "max": 20}


def test_ratios_are_those_of_rounds() -> None:
    ours = [sample(100, 0), sample(30, 0), sample(40, 0)]
    theirs = [sample(50, 0), sample(10, 0), sample(40, 0)]
    assert ratio(ours, theirs, 16) == 2.0  # of 2, 3 and 1; both medians are 40


def test_the_best_peer_is_the_fastest_with_any_weights() -> None:
    assert best_peer(samples(), 16) == LLAMA32
    assert best_peer(samples(), 64) == LLAMA_FILE
    assert best_peer({OURS32: samples()[OURS32]}, 16) is None
    best, ratios = against_the_best(samples())
    assert best == {"16": "llama_cpp float32", "64": "llama_cpp file"}
    assert ratios == {"float32": {"16": 2.0, "64": 2.5}, "file": {"16": 3.0, "64": 3.75}}
    del (without := samples())[OURS_FILE]
    assert list(against_the_best(without)[1]) == ["float32"]


def test_what_a_peer_does_better_is_told() -> None:
    assert losses(samples()) == [
        Loss("float32", "single", "decode_tokens_per_s", "llama_cpp float32", 1.25),
        Loss("file", "16", "peak_rss_mb", "llama_cpp file", 2.0),
        Loss("file", "64", "peak_rss_mb", "llama_cpp file", 2.0),
    ]


def test_agreement_counts_equal_outputs() -> None:
    assert agreement([[1, 2], [3], [4]], [[1, 2], [5]]) == {"equal": 1, "of": 2}


def run_of(found: dict[Contestant, list[Sample]]) -> peers.Run:
    rounds = {c: [Measured(s, [[1, 2]], {"x": "1"}) for s in given] for c, given in found.items()}
    return peers.Run(rounds)


def results(*left_out: Contestant) -> dict[str, Any]:
    found = {c: given for c, given in samples().items() if c not in left_out}
    return peers.results_of(run_of(found), {engine: workload(None) for engine in ENGINES})


def test_results_by_engine_weights_and_number() -> None:
    found = results()
    assert list(found["engines"]) == ["cupaged", "llama_cpp", "vllm"]
    assert list(found["engines"]["llama_cpp"]) == ["float32", "file"]
    llama = found["engines"]["llama_cpp"]["float32"]
    assert llama["64"]["output_tokens_per_s"] == {"median": 60, "min": 30, "max": 66}
    assert llama["requests"] == 64 and llama["versions"] == {"x": "1"}
    assert llama["same_tokens_as_ours_float32"] == {"equal": 1, "of": 1}
    assert found["rounds"] == 3
    assert json.loads(json.dumps(found)) == found


def test_the_table() -> None:
    shown = table(results(LLAMA_FILE, VLLM)).splitlines()
    assert [line.split() for line in shown[1:]] == [
        ["cupaged", "float32", "100.0", "(60.0-110.0)", "200.0", "(90.0-220.0)",
         "20.0", "300", "0.5", "1.0", "800"],
        ["cupaged", "Q4_1", "150.0", "(90.0-150.0)", "300.0", "(150.0-320.0)",
         "20.0", "300", "0.5", "1.0", "800"],
        ["llama.cpp", "float32", "50.0", "(20.0-55.0)", "60.0", "(30.0-66.0)",
         "25.0", "300", "0.5", "1.0", "800"],
    ]  # fmt: skip
    assert len({len(line) for line in shown}) == 1


def test_an_engine_that_had_fewer_requests_is_named() -> None:
    counts = {engine: workload(64) for engine in ENGINES} | {"llama_cpp": workload(4)}
    found = peers.results_of(run_of(samples()), counts)
    note = "llama.cpp: the first 4 of 64 requests"
    assert verdict(found).splitlines()[0] == note
    assert markdown(found).splitlines()[-2:] == ["", note]


def test_the_table_of_the_readme() -> None:
    lines = markdown(results()).splitlines()
    assert lines[1] == "|---|---|---:|---:|---:|---:|---:|---:|---:|"
    cells = {tuple(line.split(" | ")[:2]): line.split(" | ")[2:] for line in lines[2:]}
    assert cells["| cupaged", "Q4_1"][:3] == ["**150.0**", "**300.0**", "20.0"]
    assert cells["| llama.cpp", "float32"][:3] == ["50.0", "60.0", "**25.0**"]
    assert cells["| llama.cpp", "Q4_1"][-1] == "**400** |"
    assert cells["| vLLM for CPUs", "float32"][2] == "10.0"


def test_the_verdict() -> None:
    assert verdict(results()).splitlines() == [
        "cupaged float32: 2 times the best peer at 16 (llama_cpp float32)",
        "cupaged float32: 2.5 times the best peer at 64 (llama_cpp file)",
        "cupaged Q4_1: 3 times the best peer at 16 (llama_cpp float32)",
        "cupaged Q4_1: 3.75 times the best peer at 64 (llama_cpp file)",
        "behind with float32: decode_tokens_per_s (single), llama_cpp float32 is better by 1.25",
        "behind with Q4_1: peak_rss_mb (16), llama_cpp file is better by 2",
        "behind with Q4_1: peak_rss_mb (64), llama_cpp file is better by 2",
    ]


def test_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = tmp_path / "peers.json"
    written.write_text(json.dumps({**results(), "machine": report.machine()}))
    monkeypatch.setattr(peers, "RESULTS", written)
    peers.main(["--plot", str(tmp_path / "peers.svg")])
    picture = ElementTree.parse(tmp_path / "peers.svg").getroot()
    tag = "{http://www.w3.org/2000/svg}"
    bars = [bar for bar in picture.iter(f"{tag}rect") if bar.get("height") == "18"]
    widths = [float(bar.get("width", "")) for bar in bars]
    assert len(widths) == 3 * 5  # a panel each for 16, 64 and one stream
    assert widths[0] / widths[1] == pytest.approx(100 / 150, abs=0.01)
    texts = [element.text for element in picture.iter(f"{tag}text")]
    assert {"llama.cpp, Q4_1", "vLLM for CPUs, float32", "16 at once", "one stream"} <= set(texts)


def test_turns_and_one_that_fails(capsys: pytest.CaptureFixture[str]) -> None:
    order = []

    def once(entry: Entry, requests: Any) -> Measured:
        order.append(entry.contestant)
        if entry.contestant == VLLM and len(order) > 3:
            raise RunnerError("no memory\nmuch more")
        return Measured(sample(1.0, 2.0))

    entries = [Entry(contestant, (), "") for contestant in (OURS32, LLAMA32, VLLM)]
    run = peers.take_turns(entries, {engine: [] for engine in ENGINES}, 3, once)
    assert order == [OURS32, LLAMA32, VLLM] * 2 + [OURS32, LLAMA32]
    assert {c: len(rounds) for c, rounds in run.rounds.items()} == {OURS32: 3, LLAMA32: 3}
    assert run.failed == {"vllm float32": "no memory"}
    assert "vllm float32 failed: no memory" in capsys.readouterr().out


def test_an_engine_that_is_not_installed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert peers.entries_of(["llama_cpp", "vllm"], tmp_path) == []
    assert capsys.readouterr().out.splitlines() == [
        "llama_cpp float32: not installed (python bench/peers/install.py llama_cpp)",
        "llama_cpp file: not installed (python bench/peers/install.py llama_cpp)",
        "llama_cpp file plain: not installed (python bench/peers/install.py llama_cpp)",
        "vllm float32: not installed (python bench/peers/install.py vllm)",
    ]
    with pytest.raises(SystemExit, match="nothing was measured: no engine is installed"):
        peers.main(["--engines", "vllm", "--folder", str(tmp_path)])
    (tmp_path / "vllm").mkdir()  # an installation that was interrupted
    assert enter(VLLM, tmp_path, lambda contestant, folder: "") is None
    (tmp_path / "vllm" / install.MADE).touch()
    entry = enter(VLLM, tmp_path, lambda contestant, folder: f"model in {folder.name}")
    assert entry is not None and entry.model == "model in weights"
    assert entry.command[0] == str(tmp_path / "vllm" / "bin" / "python")


def test_every_contestant_has_a_runner_and_an_environment() -> None:
    for contestant in CONTESTANTS:
        assert (HERE / f"{contestant.engine}_runner.py").exists()
    assert set(ENGINES) == {"cupaged", *install.ENVIRONMENTS}
    assert len({contestant.name for contestant in CONTESTANTS}) == len(CONTESTANTS)


@pytest.mark.parametrize("text", ["0", "65", "x", "vllm=", "vllm=x", "sglang=3", "=3.5"])
def test_numbers_of_requests_that_are_refused(text: str) -> None:
    with pytest.raises(SystemExit, match=f"--requests {text}: must be K or ENGINE=K, with K from"):
        peers.requests_by_engine([text])


def test_numbers_of_requests() -> None:
    found = peers.requests_by_engine(["8", "transformers=2"])
    assert {engine: len(given) for engine, given in found.items()} == {
        "cupaged": 8, "llama_cpp": 8, "vllm": 8, "transformers": 2,
    }  # fmt: skip
    assert len(peers.requests_by_engine([])["cupaged"]) == 64


def test_results_that_nobody_has_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "RESULTS", tmp_path / "peers.json")
    with pytest.raises(SystemExit, match=r"not there; run python -m bench.peers first"):
        peers.main(["--markdown"])


def test_a_busy_core_is_busy_and_then_free() -> None:
    def cpu_ticks(pid: int) -> int:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])  # user and system time

    with busy_core() as pid:
        before = cpu_ticks(pid)
        while cpu_ticks(pid) < before + 5:
            pass
    assert not Path(f"/proc/{pid}").exists()
