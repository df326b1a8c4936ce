"""Random traces of the engine's use, recorded into files and run again: every step is equal."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from cupaged.engine.trace_file import TraceHeader, TraceReader, TraceWriter
from cupaged.engine.trace_replay import Replay, Replayed
from cupaged.engine.traced_core import TracedCore
from tests.fuzz import harness
from tests.fuzz.traces import make_trace

QUICK_TRACES, TRACES, CHUNK = 40, 120, 20
SOME = [
    pytest.param(first, marks=[pytest.mark.slow] * (first >= QUICK_TRACES))
    for first in range(0, TRACES, CHUNK)
]


def record(seed: int, path: Path, monkeypatch: pytest.MonkeyPatch) -> Replayed:
    """Run the trace of a seed with its engine recorded, then run the record."""
    trace = make_trace(Random(seed))

    def traced(config: Any, runner: Any, **strategies: Any) -> TracedCore:
        strategies["prefix_cache"] = None  # a replay makes what the configuration says
        writer = TraceWriter(path, TraceHeader(config, trace.policy, trace.swap_costs))
        return TracedCore(config, runner, writer, **strategies)

    with monkeypatch.context() as patch:
        patch.setattr(harness, "EngineCore", traced)
        run = harness.TraceRun(trace)
    run.run(trace.operations)
    with TraceReader(path) as recorded:
        policy = harness.make_eager_policy(trace.policy)
        replayed = Replay(recorded.header, policy).run(recorded)
        assert recorded.num_cut_bytes == 0
    assert replayed.num_steps >= run.runner.num_collected
    return replayed


@pytest.mark.parametrize("first", SOME)
def test_recorded_traces_run_again(
    first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(first, first + CHUNK):
        replayed = record(seed, tmp_path / "t", monkeypatch)
        assert (replayed.difference, replayed.broken) == (None, ""), f"seed {seed}: {replayed}"
