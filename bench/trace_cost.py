"""What recording every step costs: microseconds of a step, and bytes of the file.

A runner that draws random tokens and computes nothing; the same requests with `--trace` and
without, in turns, so that both see the same machine. Every trace is replayed once.

Run it with `python bench/trace_cost.py [--sequences N ...] [--rounds N]`.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cupaged.config import EngineConfig
from cupaged.engine.batch import StepPlan, build_batch
from cupaged.engine.core import EngineCore
from cupaged.engine.runner import StepOutput
from cupaged.engine.trace_file import TraceHeader, TraceReader, TraceWriter
from cupaged.engine.trace_replay import Replay
from cupaged.engine.traced_core import TracedCore
from cupaged.request import CoreRequest
from cupaged.sampling_params import SamplingParams

VOCAB_SIZE, BLOCK_SIZE = 50_000, 16
OUTPUT_TOKENS = 128


class DrawingRunner:
    """Builds the batch, as every runner does, and draws anything."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._num_samples = 0

    def submit(self, plan: StepPlan) -> int:
        """Lay the step out."""
        self._num_samples = len(build_batch(plan, BLOCK_SIZE).sampling.logits_row)
        return plan.step_id

    def collect(self, handle: int) -> StepOutput:
        """Tokens for the step that was submitted last: one at a time is in flight."""
        tokens = self._random.integers(0, VOCAB_SIZE, (self._num_samples, 1))
        return StepOutput(handle, tokens.tolist())


def run(num_sequences: int, seed: int, path: Path | None) -> tuple[float, float, float]:
    """Microseconds and bytes of a step, and bytes of an arrival."""
    config = EngineConfig(
        vocab_size=VOCAB_SIZE, num_blocks=num_sequences * 20, block_size=BLOCK_SIZE,
        max_model_len=1024, max_num_seqs=num_sequences, max_num_batched_tokens=8192,
    )  # fmt: skip
    core = EngineCore(config, DrawingRunner(seed))
    if path is not None:
        writer = TraceWriter(path, TraceHeader(config, "fcfs"))
        core = TracedCore(config, DrawingRunner(seed), writer)
    random = Random(seed)
    params = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    for i in range(num_sequences * 2):  # the second half comes as the first one leaves
        prompt = tuple(random.choices(range(VOCAB_SIZE), k=random.randint(64, 160)))
        core.add_request(CoreRequest(str(i), prompt, params, seed=i))
    before = 0 if path is None else os.path.getsize(path)
    gc.collect()
    start = time.process_time()
    while core.has_unfinished_requests:
        core.step()
    seconds, num_steps = time.process_time() - start, core.stats().num_steps
    after = 0 if path is None else os.path.getsize(path)
    return seconds / num_steps * 1e6, (after - before) / num_steps, before / num_sequences / 2


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, nargs="+", default=[16, 64, 256, 1000])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    for number in arguments.sequences:
        off, on = [], []
        with TemporaryDirectory() as folder:
            path = Path(folder) / "t"
            for i in range(arguments.rounds):
                off.append(run(number, i, None)[0])
                on.append(run(number, i, path))
            with TraceReader(path) as trace:
                assert Replay(trace.header).run(trace).difference is None
        cost = median([traced[0] - plain for traced, plain in zip(on, off, strict=True)])
        print(
            f"{number:5} sequences: a step {median(off):6.0f} us, recorded {cost:+5.0f} us, "
            f"{on[0][1]:5.0f} bytes = {on[0][1] / number:.1f} a sequence; "
            f"an arrival {on[0][2]:.0f} bytes"
        )


if __name__ == "__main__":
    main()
