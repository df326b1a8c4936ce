"""A batch on the `cpu` device, where arrays of the device are those of the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupaged.engine.batch import Batch
from cupaged.ops import KVCacheSpec
from cupaged.ops.numpy_attention import AttentionPlan

FloatArray = NDArray[np.float32]
_NOTHING = np.zeros(0, np.int32)


class NumpyStep:
    """A batch, as `StepContext` says, and what is worked out once and used by every layer."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.num_tokens = batch.num_tokens
        self.token_ids = batch.token_ids
        self.logits_tokens = batch.logits_tokens
        self.sampling = batch.sampling
        self.told_samples = np.flatnonzero(batch.sampling.num_logprobs >= 0)
        self.told_rows = batch.sampling.logits_row[self.told_samples]
        prompts = batch.prompt_logprobs
        self.prompt_tokens = _NOTHING if prompts is None else prompts.tokens
        self.prompt_targets = _NOTHING if prompts is None else prompts.targets
        self._plans: dict[int, AttentionPlan] = {}
        self._rotations: dict[int, tuple[FloatArray, FloatArray]] = {}

    def plan(self, spec: KVCacheSpec) -> AttentionPlan:
        """Where the layers of the spec's KV group write and read."""
        if spec.group not in self._plans:
            self._plans[spec.group] = AttentionPlan(self.batch, spec.group, spec.block_size)
        return self._plans[spec.group]

    def rotation(self, table: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Cosines and sines of the step's tokens, each [T, 1, D / 2]."""
        if id(table) not in self._rotations:
            rows = table[:, self.batch.positions, None, :]
            self._rotations[id(table)] = (rows[0], rows[1])
        return self._rotations[id(table)]


class NumpyDownload:
    """Arrays that are on the host already."""

    def __init__(self, arrays: Sequence[NDArray[Any]]) -> None:
        self._arrays = list(arrays)

    def wait(self) -> list[NDArray[Any]]:
        """The arrays themselves."""
        return self._arrays
