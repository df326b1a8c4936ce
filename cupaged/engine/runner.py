"""Runners: what turns a plan into tokens.

`Runner` is the protocol between the engine core and whatever computes. `ModelRunner` is the real
one; `NullRunner` computes nothing, to measure everything else. Steps are submitted in order and
collected in order; a runner may compute at either moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from cupaged.config import EngineConfig, ModelConfig
from cupaged.engine.batch import Batch, SamplingBatch, StepPlan, build_batch
from cupaged.ops import KVCache, KVCacheSpec, Ops, StepContext

FAILED_TOKEN = -1  # a draw whose logits were not numbers


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Tokens of one step.

    token_ids: for each sample, in the order of the plan's sequences, the list of its new tokens.
        A list holds one token now; drafts that were accepted make it longer. `FAILED_TOKEN` says
        that this sample's logits were not numbers.
    """

    step_id: int
    token_ids: list[list[int]]


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
        """The buffers of a step: each is float32 [tokens of the step, width]."""

    def forward(self, step: StepContext, kv_caches: Sequence[KVCache], work: dict[str, Any]) -> Any:
        """Hidden states after the last norm, [num_tokens, hidden_size]."""

    def compute_logits(self, out: Any, hidden: Any) -> None:
        """`out` [n, vocab_size] from hidden states [n, hidden_size]."""


class Sampler(Protocol):
    """Draws one token a sample: logits [num_logits, vocab_size] -> int32 [num_samples]."""

    def __call__(self, logits: Any, sampling: SamplingBatch) -> Any: ...


class ModelRunner:
    """Runs a model on a device. All memory is taken here, in the constructor."""

    def __init__(
        self,
        model: Model,
        kv_cache_specs: Sequence[KVCacheSpec],
        ops: Ops,
        config: EngineConfig,
        *,
        sampler: Sampler | None = None,
    ) -> None:
        """`sampler` replaces the ops' own, e.g. to force tokens and look at logits."""
        self._model = model
        self._ops = ops
        self._config = config
        self._sampler = sampler or ops.sample
        self._kv_caches = [ops.empty_kv_cache(s, config.num_blocks) for s in kv_cache_specs]
        widths, max_tokens = model.workspace_widths(model.config), config.max_num_batched_tokens
        self._work = {name: ops.empty((max_tokens, n), np.float32) for name, n in widths.items()}
        self._hidden = ops.empty((config.max_logits, model.config.hidden_size), np.float32)
        self._logits = ops.empty((config.max_logits, config.vocab_size), np.float32)
        self._done: dict[int, StepOutput] = {}

    def submit(self, plan: StepPlan) -> int:
        """Compute the step at once."""
        batch = build_batch(plan, self._config.block_size)
        tokens = self._run(batch)
        self._done[plan.step_id] = StepOutput(plan.step_id, [[t] for t in tokens])
        return plan.step_id

    def collect(self, handle: int) -> StepOutput:
        """The tokens of a step that `submit` has computed."""
        return self._done.pop(handle)

    def _run(self, batch: Batch) -> list[int]:
        if len(batch.copies):
            self._ops.copy_blocks(self._kv_caches, batch.copies)
        step = self._ops.begin_step(batch)
        hidden = self._model.forward(step, self._kv_caches, self._work)
        num_logits = len(batch.logits_tokens)
        if num_logits == 0:
            return []
        rows = self._hidden[:num_logits]
        self._ops.gather_rows(rows, hidden, batch.logits_tokens)
        logits = self._logits[:num_logits]
        self._model.compute_logits(logits, rows)
        tokens: list[int] = self._sampler(logits, batch.sampling).tolist()
        return tokens


class NullRunner:
    """Computes nothing and draws `token_id` for every sample."""

    def __init__(self, token_id: int = 0) -> None:
        self._token_id = token_id
        self._num_samples: dict[int, int] = {}

    def submit(self, plan: StepPlan) -> int:
        """Remember how many tokens the step draws."""
        self._num_samples[plan.step_id] = sum(e.num_samples for e in plan.scheduled)
        return plan.step_id

    def collect(self, handle: int) -> StepOutput:
        """The same token for every sample."""
        return StepOutput(handle, [[self._token_id]] * self._num_samples.pop(handle))
