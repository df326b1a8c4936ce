"""Logits of a model under given tokens: what it would have said, whatever it would have drawn.

The engine runs as always, but for its sampler, which keeps the logits; the requests state the
tokens to take. So prompts, chunks, batches and preemption go through the code that serves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupaged.config import EngineConfig
from cupaged.engine.core import EngineCore
from cupaged.engine.runner import ModelRunner, Sampler
from cupaged.loading.model_files import ModelFiles, load_model, open_model
from cupaged.ops import KVCacheSpec, Ops, StepContext
from cupaged.ops.cuda_ops import CudaOps
from cupaged.ops.numpy_ops import NumpyOps
from cupaged.request import CoreRequest
from cupaged.sampling_params import SamplingParams

F32 = NDArray[np.float32]


class RecordingSampler:
    """Keeps the logits that `ops` draw from. Requests are told apart by their seeds, 0, 1, 2 ..."""

    def __init__(
        self, num_requests: int, ops: Ops, to_host: Callable[[Any], F32] = np.array
    ) -> None:
        """`to_host` copies logits to the host."""
        self._ops = ops
        self._to_host = to_host
        self._logits: list[dict[int, F32]] = [{} for _ in range(num_requests)]

    def __call__(self, logits: Any, step: StepContext) -> Any:
        shown, sampling = self._to_host(logits), step.batch.sampling
        for i, row in enumerate(sampling.logits_row):
            position = int(sampling.output_position[i])
            self._logits[int(sampling.seed[i])][position] = shown[row]
        return self._ops.sample(logits, step.sampling)

    def logits_of(self, request: int) -> F32:
        """The logits before each output token, [num_output_tokens, vocab_size]."""
        kept = self._logits[request]
        return np.stack([kept[position] for position in range(len(kept))])


class LoadedModel:
    """A model and its weights, to be run under several engine configurations.

    Args:
        ops: of the device; by default NumPy's.
    """

    def __init__(self, path: Path | None, ops: NumpyOps | CudaOps | None = None) -> None:
        self.files: ModelFiles = open_model(path)
        self.ops: Any = ops or NumpyOps()
        self.to_host: Callable[[Any], Any] = np.array
        if isinstance(ops, CudaOps):
            self.to_host = ops.runtime.to_host
        length = self.files.config.max_position_embeddings
        self.model: Any = load_model(self.files, self.ops, max_model_len=length)

    def core(self, *, sampler: Sampler | None = None, **limits: Any) -> EngineCore:
        """An engine core of its own KV pool. `limits` are fields of `EngineConfig`."""
        config = self.config(**limits)
        runner = ModelRunner(
            self.model, self.kv_cache_specs(config), self.ops, config, sampler=sampler
        )
        return EngineCore(config, runner)

    def config(self, **limits: Any) -> EngineConfig:
        """A configuration for the model. `limits` are fields of it."""
        fields = {"num_blocks": 256, "max_model_len": 1024, "kv_sanitizer": True, **limits}
        return EngineConfig(vocab_size=self.files.config.vocab_size, **fields)

    def kv_cache_specs(self, config: EngineConfig) -> list[KVCacheSpec]:
        """What each layer keeps, in the ops' type."""
        specs: list[KVCacheSpec] = self.files.model_class.kv_cache_specs(
            self.files.config, config.block_size, self.ops.dtype.name
        )
        return specs

    def forced_logits(
        self, runs: Sequence[tuple[Sequence[int], Sequence[int]]], **limits: int
    ) -> list[F32]:
        """Logits before each forced token, [len(forced), vocab_size], of all runs in one batch.

        Args:
            runs: prompt ids and the tokens to draw after them.
        """
        sampler = RecordingSampler(len(runs), self.ops, self.to_host)
        core = self.core(sampler=sampler, **limits)
        for i, (prompt, forced) in enumerate(runs):
            params = SamplingParams(
                temperature=0,
                max_tokens=len(forced),
                ignore_eos=True,
                trace_decode_token_ids=list(forced),
            )
            core.add_request(CoreRequest(str(i), tuple(prompt), params, seed=i))
        while core.has_unfinished_requests:
            core.step()
            core.audit()
        assert core.stats().num_used_blocks == 0
        return [sampler.logits_of(i) for i in range(len(runs))]
