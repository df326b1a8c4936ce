"""cupaged beside other engines on the same processor: same weights, same workload, in turns.

The workload is 64 requests at once (bench/workloads/smollm2_64.json), with 16 and with 64 sequences
running; besides, one stream alone and the prefill of one prompt. In every round each engine has its
turn, in processes of its own that nobody else computes beside. Engines whose environment has not
been made (`python bench/peers/install.py ENGINE`) are left out, and said to be. Writes
bench/results/peers.json and peers.svg; with --contended, peers_contended.json.

Run it with `python -m bench.peers` on an idle machine.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import report
from bench.peers import install
from bench.peers.contended import measure_contended
from bench.peers.contestants import CONTESTANTS, ENGINES, OURS, Contestant, Entry, enter, model_of
from bench.peers.figures import RATE, Samples, against_the_best, agreement, figures, losses
from bench.peers.measurement import CONCURRENT, Measured, measure, workload
from bench.peers.picture import draw
from bench.peers.runner import Requests
from bench.peers.runner_process import RunnerError
from bench.peers.table import markdown, table, verdict

RESULTS = report.RESULTS / "peers.json"


@dataclass(slots=True)
class Run:
    """What was measured: every contestant's rounds, and why some have none."""

    rounds: dict[Contestant, list[Measured]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def samples(self) -> Samples:
        """Of those that lasted all rounds."""
        return {
            contestant: [measured.sample for measured in measured_rounds]
            for contestant, measured_rounds in self.rounds.items()
        }


def take_turns(
    entries: Sequence[Entry],
    requests_of: Mapping[str, Requests],
    num_rounds: int,
    measure_once: Callable[[Entry, Requests], Measured] = measure,
) -> Run:
    """Every entry once a round, in the same order. One that fails is left out from then on."""
    run = Run({entry.contestant: [] for entry in entries})
    for i in range(num_rounds):
        for entry in entries:
            contestant = entry.contestant
            if contestant.name in run.failed:
                continue
            try:
                measured = measure_once(entry, requests_of[contestant.engine])
            except RunnerError as error:
                print(f"{contestant.name} failed: {error}", flush=True)
                run.failed[contestant.name] = str(error).splitlines()[0]
                del run.rounds[contestant]
                continue
            run.rounds[contestant].append(measured)
            rates = ", ".join(f"{measured.sample[str(n)][RATE]:.1f} at {n}" for n in CONCURRENT)
            print(f"round {i + 1}: {contestant.name}: {rates}", flush=True)
    return run


def results_of(run: Run, requests_of: Mapping[str, Requests]) -> dict[str, Any]:
    """The content of the results' file, but for the machine."""
    samples = run.samples()
    reference = run.rounds.get(Contestant(OURS, "float32"))
    engines: dict[str, dict[str, Any]] = {}
    for contestant, rounds in run.rounds.items():
        found = figures(samples[contestant])
        found["requests"] = len(requests_of[contestant.engine])
        found["versions"] = dict(rounds[0].versions)
        if reference is not None:
            found["same_tokens_as_ours_float32"] = agreement(
                reference[0].token_ids, rounds[0].token_ids
            )
        engines.setdefault(contestant.engine, {})[contestant.variant] = found
    best, ratios = against_the_best(samples)
    return {
        "rounds": max((len(rounds) for rounds in run.rounds.values()), default=0),
        "best_peer": best,
        "ratio_to_best_peer": ratios,
        "behind": [loss._asdict() for loss in losses(samples)],
        "engines": engines,
        "failed": run.failed,
    }


def requests_by_engine(given: Sequence[str]) -> dict[str, Requests]:
    """How many requests each engine gets: all, K of every engine, or ENGINE=K of one."""
    counts: dict[str, int | None] = dict.fromkeys(ENGINES)
    known = len(workload(None))
    for text in given:
        engine, _, count = text.rpartition("=")
        if (engine and engine not in ENGINES) or not count.isdigit() or not 0 < int(count) <= known:
            raise SystemExit(
                f"--requests {text}: must be K or ENGINE=K, with K from 1 to {known} and ENGINE "
                f"one of {', '.join(ENGINES)}"
            )
        counts |= dict.fromkeys([engine] if engine else ENGINES, int(count))
    return {engine: workload(count) for engine, count in counts.items()}


def entries_of(engines: Sequence[str], folder: Path) -> list[Entry]:
    """Who can run here; prints who cannot."""
    entries = []
    for contestant in CONTESTANTS:
        if contestant.engine not in engines:
            continue
        entry = enter(contestant, folder, model_of)
        if entry is None:
            print(f"{contestant.name}: not installed (python bench/peers/install.py "
                  f"{contestant.engine})")  # fmt: skip
        else:
            entries.append(entry)
    return entries


def show(results: dict[str, Any]) -> None:
    """Print what came out."""
    print(table(results))
    if said := verdict(results):
        print(said)
    for engine, variants in results["engines"].items():
        for variant, found in variants.items():
            if same := found.get("same_tokens_as_ours_float32"):
                print(f"{engine} {variant}: {same['equal']} of {same['of']} outputs as ours")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write; or show what was written."""
    parser = argparse.ArgumentParser("bench.peers", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES, metavar="ENGINE")
    parser.add_argument("--requests", action="append", default=[], metavar="[ENGINE=]K",
                        help="only the first K of the workload; may be repeated")  # fmt: skip
    parser.add_argument("--folder", type=Path, default=install.FOLDER,
                        help="of environments and weights (default: .peers)")  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="print the results, write nothing")
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--contended", action="store_true",
                       help="only cupaged, quiet and with one core kept busy")  # fmt: skip
    modes.add_argument("--markdown", action="store_true", help="print the written results")
    modes.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw the written results")
    given = parser.parse_args(arguments)
    if given.rounds < 1:
        parser.error(f"--rounds {given.rounds}: must be at least 1")
    if given.markdown:
        print(markdown(_written()))
        return
    if given.plot:
        draw(given.plot, _written())
        return
    folder = given.folder.resolve()
    requests_of = requests_by_engine(given.requests)
    if given.contended:
        (entry,) = (e for e in entries_of([OURS], folder) if e.contestant.weights == "float32")
        results = measure_contended(entry, requests_of[OURS], given.rounds)
        print(json.dumps(results, indent=2))
        name = "peers_contended"
    else:
        entries = entries_of(given.engines, folder)
        run = take_turns(entries, requests_of, given.rounds)
        if not run.rounds:
            raise SystemExit("nothing was measured: no engine is installed, or all have failed")
        results = results_of(run, requests_of)
        show(results)
        name = "peers"
    if not given.dry_run:
        print(f"wrote {report.write(name, results)}")
        if not given.contended:
            draw(RESULTS.with_suffix(".svg"), _written())


def _written() -> dict[str, Any]:
    if not RESULTS.exists():
        raise SystemExit(f"{RESULTS}: not there; run python -m bench.peers first")
    results: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return results


if __name__ == "__main__":
    main()
