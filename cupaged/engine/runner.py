"""Runners: what turns a plan into tokens.

`Runner` is the protocol between the engine core and whatever computes. `ModelRunner` is the real
one; `NullRunner` computes nothing, to measure everything else. Steps are submitted in order and
collected in order; a runner may compute at either moment.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from cupaged.config import EngineConfig, ModelConfig
from cupaged.engine.batch import Batch, StepPlan, build_batch
from cupaged.engine.cost_measurement import measure_costs
from cupaged.engine.device_memory import (
    BUFFER_OPTIONS,
    empty_host_pool,
    empty_pool,
    naming,
    step_limits,
)
from cupaged.engine.kv_memory import DeviceKVMemory
from cupaged.engine.preemption import PreemptionCosts
from cupaged.engine.started_step import StartedStep
from cupaged.engine.warm_up import largest_step, warm_up_batch
from cupaged.ops import Download, KVCache, KVCacheSpec, Ops, StepContext
from cupaged.outputs import TokenLogprobs

FAILED_TOKEN = -1  # a draw whose logits were not numbers


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Tokens of one step.

    token_ids: for each sample, in the order of the plan's sequences, the list of its new tokens.
        A list holds one token now; drafts that were accepted make it longer. `FAILED_TOKEN` says
        that this sample's logits were not numbers.
    logprobs: for each sample one entry a new token, None for samples that did not ask; empty when
        none did.
    prompt_logprobs: for each sequence of the plan its next prompt tokens; empty when none asked.
    """

    step_id: int
    token_ids: list[list[int]]
    logprobs: list[list[TokenLogprobs] | None] = field(default_factory=list)
    prompt_logprobs: list[list[TokenLogprobs]] = field(default_factory=list)


class Runner(Protocol):
    """Executes plans. `collect` is called once for each `submit`, in the same order."""

    def submit(self, plan: StepPlan) -> int:
        """Start a step; everything needed of the plan is read before this returns."""

    def collect(self, handle: int) -> StepOutput:
        """Wait for the step and give its tokens."""


class Model(Protocol):
    """What a file of `models/` provides, once it has its weights."""

    config: ModelConfig

    @staticmethod
    def workspace_widths(config: ModelConfig) -> dict[str, int]:
        """The buffers of a step: each is [tokens of the step, width], of the ops' type."""

    def forward(self, step: StepContext, kv_caches: Sequence[KVCache], work: dict[str, Any]) -> Any:
        """Hidden states after the last norm, [num_tokens, hidden_size]."""

    def compute_logits(self, out: Any, hidden: Any) -> None:
        """`out` [n, vocab_size] from hidden states [n, hidden_size]."""


class Sampler(Protocol):
    """Draws one token a sample: logits [num_logits, vocab_size] -> int32 [num_samples], both on the
    device. What is to be drawn is in `step.sampling`, and on the host in `step.batch.sampling`."""

    def __call__(self, logits: Any, step: StepContext) -> Any: ...


class ModelRunner:
    """Runs a model on a device. All memory is taken in the constructor."""

    def __init__(
        self,
        model: Model,
        kv_cache_specs: Sequence[KVCacheSpec],
        ops: Ops,
        config: EngineConfig,
        *,
        sampler: Sampler | None = None,
    ) -> None:
        """`sampler` replaces the ops' own, e.g. to look at logits.

        Raises:
            DeviceMemoryError: the device has no memory for the KV pool or for the buffers.
        """
        self._model = model
        self._ops = ops
        self._config = config
        self._sampler = sampler or self._sample
        self._kv_caches = empty_pool(ops, kv_cache_specs, config.num_blocks)
        self._host_caches = empty_host_pool(ops, kv_cache_specs, config.num_host_blocks)
        self.kv_memory = DeviceKVMemory(ops, self._kv_caches)  # for the KV sanitizer
        widths = model.workspace_widths(model.config)
        hidden_size, vocab_size = model.config.hidden_size, config.vocab_size
        with naming("the buffers of a step", BUFFER_OPTIONS):
            ops.reserve(step_limits(config, model.config.num_heads, kv_cache_specs))
            self._work = {
                name: ops.empty((config.max_num_batched_tokens, width), ops.dtype)
                for name, width in widths.items()
            }
            self._hidden = ops.empty((config.max_logits, hidden_size), ops.dtype)
            self._logits = ops.empty((config.max_logits, vocab_size), np.float32)
            # Sampling edits the logits; reports are of the model's own.
            self._own_logits = ops.empty((config.max_num_seqs, vocab_size), np.float32)
        self._started: dict[int, StartedStep] = {}

    def submit(self, plan: StepPlan) -> int:
        """Launch the step and the download of what it gives, and wait for neither."""
        self._started[plan.step_id] = self._start(build_batch(plan, self._config.block_size))
        return plan.step_id

    def collect(self, handle: int) -> StepOutput:
        """Wait for the step."""
        return self._finish(handle, self._started.pop(handle))

    def warm_up(self) -> int:
        """Run steps that load every kernel a step can need; how many there were.

        Only before the first request: the KV pool is written to.

        Raises:
            DeviceError: a step failed on the device.
        """
        groups = 1 + max((cache.spec.group for cache in self._kv_caches), default=0)
        counts = self._ops.warm_up_counts(largest_step(self._config))
        for count in counts:
            self._finish(-1, self._start(warm_up_batch(count, self._config, groups)))
        return len(counts)

    def measure_costs(self, clock: Callable[[], float] = time.perf_counter) -> PreemptionCosts:
        """What swapping and computing again cost. Only before the first request, with host blocks.

        Raises:
            DeviceError: a step failed on the device.
        """
        return measure_costs(
            self._ops,
            self._kv_caches,
            self._host_caches,
            self._config,
            lambda batch: self._finish(-1, self._start(batch)),
            clock,
        )

    def _start(self, batch: Batch) -> StartedStep:
        """Launch a step."""
        step = self._ops.begin_step(batch)
        if len(batch.swap_out):
            self._ops.swap_out(self._kv_caches, self._host_caches, step)
        if len(batch.swap_in):
            self._ops.swap_in(self._kv_caches, self._host_caches, step)
        if len(batch.copies):
            self._ops.copy_blocks(self._kv_caches, step)
        hidden = self._model.forward(step, self._kv_caches, self._work)
        prompts = self._score_prompts(hidden, step)
        return StartedStep(batch, self._draw(hidden, step), prompts)

    def _sample(self, logits: Any, step: StepContext) -> Any:
        return self._ops.sample(logits, step.sampling)

    def _draw(self, hidden: Any, step: StepContext) -> Download:
        """A token a sample, and what the samples that asked want to know about it."""
        sampling = step.batch.sampling
        if not len(step.batch.logits_tokens):
            return self._ops.download([])
        logits = self._compute_logits(hidden, step.logits_tokens)
        num_told = len(step.told_samples)
        own = self._own_logits[:num_told]
        if num_told:
            self._ops.gather_rows(own, logits, step.told_rows)
        tokens = self._sampler(logits, step)
        if not num_told:
            return self._ops.download([tokens])
        count = int(sampling.num_logprobs.max())
        report = self._ops.logprobs(own, tokens, count, step.told_samples)
        return self._ops.download([tokens, *report])

    def _score_prompts(self, hidden: Any, step: StepContext) -> list[Download]:
        """Log probabilities of prompt tokens, as many rows of logits at a time as there is room,
        with a download each."""
        wanted = step.batch.prompt_logprobs
        if wanted is None:
            return []
        downloads = []
        for first in range(0, len(wanted.tokens), self._config.max_logits):
            part = slice(first, first + self._config.max_logits)
            logits = self._compute_logits(hidden, step.prompt_tokens[part])
            count = int(wanted.num_logprobs[part].max())
            report = self._ops.logprobs(logits, step.prompt_targets[part], count)
            downloads.append(self._ops.download(report))
        return downloads

    def _compute_logits(self, hidden: Any, tokens: Any) -> Any:
        """Logits [len(tokens), vocab_size] of flat tokens, in the one buffer there is."""
        rows, logits = self._hidden[: len(tokens)], self._logits[: len(tokens)]
        self._ops.gather_rows(rows, hidden, tokens)
        self._model.compute_logits(logits, rows)
        return logits

    def _finish(self, step_id: int, started: StartedStep) -> StepOutput:
        tokens, logprobs = started.wait_for_tokens()
        return StepOutput(step_id, tokens, logprobs, started.wait_for_prompts())


class NullRunner:
    """Computes nothing and draws `token_id` for every sample."""

    def __init__(self, token_id: int = 0) -> None:
        self._token_id = token_id
        self._num_samples: dict[int, int] = {}

    def submit(self, plan: StepPlan) -> int:
        """Remember how many tokens the step draws."""
        self._num_samples[plan.step_id] = int(plan.num_samples.sum())
        return plan.step_id

    def collect(self, handle: int) -> StepOutput:
        """The same token for every sample."""
        return StepOutput(handle, [[self._token_id]] * self._num_samples.pop(handle))
