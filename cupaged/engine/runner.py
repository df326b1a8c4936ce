"""Runners: what turns a plan into tokens.

`Runner` is the protocol between the engine core and whatever computes. `ModelRunner` is the real
one; `NullRunner` computes nothing, to measure everything else. Steps are submitted in order and
collected in order; a runner may compute at either moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from cupaged.config import EngineConfig, ModelConfig
from cupaged.engine.batch import Batch, PromptLogprobsBatch, StepPlan, build_batch
from cupaged.engine.sampling_batch import SamplingBatch
from cupaged.ops import KVCache, KVCacheSpec, Ops, StepContext
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
    """Draws one token a sample: logits [num_logits, vocab_size] -> int32 [num_samples]."""

    def __call__(self, logits: Any, sampling: SamplingBatch) -> Any: ...


class ModelRunner:
    """Runs a model on a device. All memory is taken in the constructor, but for a copy of the
    logits whose logprobs are asked."""

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
        self._work = {name: ops.empty((max_tokens, n), ops.dtype) for name, n in widths.items()}
        self._hidden = ops.empty((config.max_logits, model.config.hidden_size), ops.dtype)
        self._logits = ops.empty((config.max_logits, config.vocab_size), np.float32)
        self._done: dict[int, StepOutput] = {}

    def submit(self, plan: StepPlan) -> int:
        """Compute the step at once."""
        batch = build_batch(plan, self._config.block_size)
        if len(batch.copies):
            self._ops.copy_blocks(self._kv_caches, batch.copies)
        step = self._ops.begin_step(batch)
        hidden = self._model.forward(step, self._kv_caches, self._work)
        prompt_logprobs = self._score_prompts(hidden, batch.prompt_logprobs)
        tokens, logprobs = self._draw(hidden, batch)
        self._done[plan.step_id] = StepOutput(
            plan.step_id, [[token] for token in tokens], logprobs, prompt_logprobs
        )
        return plan.step_id

    def collect(self, handle: int) -> StepOutput:
        """The tokens of a step that `submit` has computed."""
        return self._done.pop(handle)

    def _draw(
        self, hidden: Any, batch: Batch
    ) -> tuple[list[int], list[list[TokenLogprobs] | None]]:
        """A token a sample, and what the samples that asked want to know about it."""
        if not len(batch.logits_tokens):
            return [], []
        sampling = batch.sampling
        logits = self._compute_logits(hidden, batch.logits_tokens)
        asking = np.flatnonzero(sampling.num_logprobs >= 0)
        if len(asking):  # sampling edits the logits; the report is of the model's own
            own = self._ops.empty((len(asking), self._config.vocab_size), np.float32)
            self._ops.gather_rows(own, logits, sampling.logits_row[asking])
        drawn = self._sampler(logits, sampling)
        tokens = np.where((sampling.forced >= 0) & (drawn >= 0), sampling.forced, drawn)
        if not len(asking):
            return tokens.tolist(), []
        counts = sampling.num_logprobs[asking]
        known = np.maximum(tokens[asking], 0).astype(np.int32)
        report = self._ops.logprobs(own, known, int(counts.max()))
        logprobs: list[list[TokenLogprobs] | None] = [None] * len(tokens)
        for sample, told in zip(asking.tolist(), _told(report, counts.tolist()), strict=True):
            logprobs[sample] = [told]
        return tokens.tolist(), logprobs

    def _score_prompts(
        self, hidden: Any, wanted: PromptLogprobsBatch | None
    ) -> list[list[TokenLogprobs]]:
        """Log probabilities of prompt tokens, as many rows of logits at a time as there is room."""
        if wanted is None:
            return []
        told: list[TokenLogprobs] = []
        for first in range(0, len(wanted.tokens), self._config.max_logits):
            part = slice(first, first + self._config.max_logits)
            logits = self._compute_logits(hidden, wanted.tokens[part])
            counts = wanted.num_logprobs[part]
            report = self._ops.logprobs(logits, wanted.targets[part], int(counts.max()))
            told += _told(report, counts.tolist())
        ends = np.cumsum(wanted.counts).tolist()
        return [told[end - n : end] for end, n in zip(ends, wanted.counts.tolist(), strict=True)]

    def _compute_logits(self, hidden: Any, tokens: Any) -> Any:
        """Logits [len(tokens), vocab_size] of flat tokens, in the one buffer there is."""
        rows, logits = self._hidden[: len(tokens)], self._logits[: len(tokens)]
        self._ops.gather_rows(rows, hidden, tokens)
        self._model.compute_logits(logits, rows)
        return logits


def _told(report: tuple[Any, Any, Any], counts: list[int]) -> list[TokenLogprobs]:
    """The rows of `Ops.logprobs`, each cut to the number of likeliest tokens it asked for."""
    columns = (column.tolist() for column in report)
    return [
        TokenLogprobs(ids[: n + 1], values[: n + 1], ranks[: n + 1])
        for ids, values, ranks, n in zip(*columns, counts, strict=True)
    ]


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
