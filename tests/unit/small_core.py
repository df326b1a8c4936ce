"""An engine core of a few blocks, and runners whose plans and tokens a test can know."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cupaged.config import EngineConfig
from cupaged.engine.batch import StepPlan
from cupaged.engine.core import EngineCore
from cupaged.engine.hash_runner import HashRunner
from cupaged.engine.kv_sanitizer import SanitizedRunner
from cupaged.engine.runner import Runner, StepOutput
from cupaged.engine.scheduling_policy import SchedulingPolicy
from cupaged.outputs import CoreOutput
from cupaged.request import CoreRequest
from cupaged.sampling_params import SamplingParams

VOCAB_SIZE = 50
DEFAULTS: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "num_blocks": 16,
    "block_size": 4,
    "max_model_len": 1000,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "watermark": 0.0,
    "kv_sanitizer": True,
}


class RecordingRunner(HashRunner):
    """Notes, for every step, (request id, sample, start, number of tokens, draws)."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            vocab_size=config.vocab_size,
            num_host_blocks=config.num_host_blocks,
        )
        self.steps: list[list[tuple[str, int, int, int, int]]] = []
        self.plans: list[StepPlan] = []

    def submit(self, plan: StepPlan) -> int:
        """Note the step and compute it."""
        self.plans.append(plan)
        self.steps.append(
            [
                (
                    e.sequence.request.core.request_id,
                    e.sequence.index,
                    e.start,
                    e.num_tokens,
                    e.num_samples,
                )
                for e in plan.scheduled
            ]
        )
        return super().submit(plan)

    def ids(self) -> list[list[str]]:
        """The request ids of each step."""
        return [[request_id for request_id, *_ in step] for step in self.steps]


class ScriptedRunner:
    """Draws the tokens it is told: `script[request id][sample][output position]`."""

    def __init__(self, script: Mapping[str, Sequence[Sequence[int]]]) -> None:
        self._script = script
        self._tokens: dict[int, list[list[int]]] = {}

    def submit(self, plan: StepPlan) -> int:
        """Look the tokens up."""
        self._tokens[plan.step_id] = [
            [self._script[e.sequence.request.core.request_id][i][e.sequence.num_output_tokens]]
            for e in plan.scheduled
            for i in range(e.sequence.index, e.sequence.index + e.num_samples)
        ]
        return plan.step_id

    def collect(self, handle: int) -> StepOutput:
        """The tokens."""
        return StepOutput(handle, self._tokens.pop(handle))


def small_config(**limits: Any) -> EngineConfig:
    """16 blocks of 4 tokens, at most 4 sequences and 64 tokens a step, no watermark; with the KV
    sanitizer."""
    return EngineConfig(**{**DEFAULTS, **limits})


def small_core(
    runner: Callable[[EngineConfig], Runner] = RecordingRunner,
    policy: SchedulingPolicy | None = None,
    **limits: Any,
) -> EngineCore:
    """A core with `small_config(**limits)`."""
    config = small_config(**limits)
    return EngineCore(config, runner(config), policy=policy)


def runner_of(core: EngineCore) -> Runner:
    """The runner of a core, behind the KV sanitizer if there is one."""
    runner = core._runner
    return runner.inner if isinstance(runner, SanitizedRunner) else runner


def recorded(core: EngineCore) -> RecordingRunner:
    """The recording runner of a core."""
    runner = runner_of(core)
    assert isinstance(runner, RecordingRunner)
    return runner


def request(
    request_id: str,
    length: int,
    *,
    seed: int = 0,
    priority: int = 0,
    eos: Sequence[int] = (),
    **params: Any,
) -> CoreRequest:
    """A request whose prompt is 1, 2, 3, ..., modulo the vocabulary."""
    prompt = tuple(i % VOCAB_SIZE for i in range(1, length + 1))
    return CoreRequest(request_id, prompt, SamplingParams(**params), tuple(eos), seed, priority)


def drain(core: EngineCore) -> list[CoreOutput]:
    """Step until nothing is left, checking every invariant on the way."""
    outputs: list[CoreOutput] = []
    for _ in range(10_000):
        if not core.has_unfinished_requests:
            break
        outputs += core.step()
        core.audit()
    assert not core.has_unfinished_requests, "the core does not drain"
    return outputs


def tokens_of(outputs: Sequence[CoreOutput], request_id: str, index: int = 0) -> list[int]:
    """All tokens of one sample."""
    return [
        token
        for output in outputs
        if (output.request_id, output.index) == (request_id, index)
        for token in output.new_token_ids
    ]


def endings(outputs: Sequence[CoreOutput]) -> dict[tuple[str, int], tuple[str, int | None]]:
    """Finish reason and stop reason of every sample that ended."""
    return {
        (o.request_id, o.index): (o.finish_reason, o.stop_reason)
        for o in outputs
        if o.finish_reason is not None
    }
