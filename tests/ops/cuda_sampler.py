"""`CudaSampling` of a device as the tests call it: host arrays in, host values out.

Logits lie between guards of NaN, which are looked at afterwards.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupaged.engine.sampling_batch import SamplingBatch
from cupaged.ops.cuda_draws import CudaDraws, column_arrays, edit_arrays
from cupaged.ops.cuda_sampling import CudaSampling
from cupaged.ops.numpy_ops import NumpyOps
from cupaged.runtime.protocol import Array, Runtime
from cupaged.runtime.results import ResultBuffer
from cupaged.runtime.staging import StagingBuffer
from tests.ops.kernel_arrays import Guarded, same_bits

F32, I32 = np.float32, np.int32


class Sampler:
    """The device under test, from the host."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.ops = CudaSampling(runtime, ResultBuffer(runtime))
        self._staging = StagingBuffer(runtime)

    def draws(self, sampling: SamplingBatch) -> CudaDraws:
        """The batch on the device."""
        columns, edits = column_arrays(sampling), edit_arrays(sampling.edits)
        there = self._staging.upload([*columns, *edits])
        return CudaDraws.of(sampling, there[: len(columns)], there[len(columns) :])

    def draw(self, logits: Array, sampling: SamplingBatch) -> Array:
        """Tokens on the device, from logits there."""
        return self.ops.sample(logits, self.draws(sampling))

    def sample(self, logits: Any, sampling: SamplingBatch) -> list[int]:
        given = Guarded.of(self.runtime, np.array(logits, F32))
        tokens = self.draw(given.array, sampling)
        given.read()
        assert self.runtime.is_device_array(tokens) and tokens.dtype == I32
        return [int(token) for token in self.runtime.to_host(tokens)]

    def logprobs(self, logits: Any, token_ids: Any, count: int) -> tuple[NDArray[Any], ...]:
        given = Guarded.of(self.runtime, np.array(logits, F32))
        ids = self.runtime.from_host(np.array(token_ids, I32))
        told = self.ops.logprobs(given.array, ids, count)
        same_bits(given.read(), np.array(logits, F32))  # the logits are only read
        return tuple(self.runtime.to_host(column) for column in told)


def check_logprobs(sampler: Sampler, logits: Any, tokens: Any, count: int) -> None:
    ids, values, ranks = sampler.logprobs(logits, tokens, count)
    expected = NumpyOps().logprobs(np.array(logits, F32), np.array(tokens, I32), count)
    assert [a.dtype.name for a in (ids, values, ranks)] == ["int32", "float32", "int32"]
    np.testing.assert_array_equal(ids, expected[0])
    np.testing.assert_array_equal(ranks, expected[2])
    wide = np.float64(np.array(logits, F32))
    top = wide.max(1, keepdims=True)
    norm = top + np.log(np.exp(wide - top).sum(1, keepdims=True))
    exact = np.take_along_axis(wide, ids, 1) - norm
    np.testing.assert_allclose(values, exact, rtol=2e-7, atol=5e-7)
