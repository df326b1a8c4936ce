"""Measures what the operations of a step cost, by standing between the model and its ops."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from cupaged.engine.core import EngineCore
from cupaged.ops.blas import use_threads
from cupaged.ops.numpy_ops import NumpyWeight
from cupaged.resources import read_resources

_PART = {
    "linear": "matmul",
    "paged_attention": "attention",
    "rope_and_cache": "attention",
    "sample": "sampling",
}


def _shape(weight: Any) -> tuple[int, int]:
    """(out_features, in_features) of a packed weight of the `cpu` device."""
    if isinstance(weight, NumpyWeight):
        rows, columns = weight.matrix.shape
        return rows, columns
    return weight.out_features, weight.in_features


def packed_bytes(timed: TimedOps) -> int:
    """Of all weights that were multiplied with, each once."""
    weights = {id(weight): weight for weight, _ in timed.products}.values()
    return sum(
        weight.matrix.nbytes if isinstance(weight, NumpyWeight) else weight.packed.nbytes
        for weight in weights
    )


class TimedOps:
    """Wraps the ops, the runner and the core of an engine; use `around`.

    seconds: by part: matmul, attention, sampling, rest_of_runner.
    core_seconds: of all steps of the core. num_steps: how many there were.
    """

    def __init__(self) -> None:
        self.products: list[tuple[Any, int]] = []  # (weight, rows of x), in the order of the run
        self.reset()

    def reset(self) -> None:
        """Forget what was measured."""
        self.seconds: dict[str, float] = defaultdict(float)
        self.core_seconds = 0.0
        self.num_steps = 0
        self.products.clear()

    @classmethod
    def around(cls, core: EngineCore) -> Self:
        """Time everything the core's runner does from now on."""
        timed = cls()
        runner: Any = core._runner
        ops = runner._ops
        for name, part in _PART.items():
            setattr(ops, name, timed._timed(getattr(ops, name), part))
        submit, step = runner.submit, core.step

        def timed_submit(plan: Any) -> Any:
            start, inside = time.perf_counter(), sum(timed.seconds.values())
            try:
                return submit(plan)
            finally:
                elapsed = time.perf_counter() - start
                timed.seconds["rest_of_runner"] += elapsed - (sum(timed.seconds.values()) - inside)

        def timed_step() -> Any:
            start = time.perf_counter()
            try:
                return step()
            finally:
                timed.core_seconds += time.perf_counter() - start
                timed.num_steps += 1

        runner.submit = timed_submit
        core.step = timed_step  # type: ignore[method-assign]
        return timed

    def replay(self, threads: int | None = None) -> float:
        """Seconds of BLAS for products of the same sizes, in the same order, with nothing between.

        Each weight has a float32 matrix of its own, as in a model; its numbers do not matter.

        Args:
            threads: of BLAS; None for the fastest number in a trial.
        """
        use_threads(threads, read_resources().cores)
        matrices: dict[int, NDArray[np.float32]] = {}
        for weight, _ in self.products:
            if id(weight) not in matrices:
                matrices[id(weight)] = np.full(_shape(weight), 0.01, np.float32)
        rows = max(m for _, m in self.products)
        columns = max(matrix.shape[1] for matrix in matrices.values())
        x = np.random.default_rng(0).standard_normal(rows * columns, np.float32)
        out = np.empty(max(m * len(matrices[id(w)]) for w, m in self.products), np.float32)
        start = time.perf_counter()
        for weight, m in self.products:
            matrix = matrices[id(weight)]
            n, k = matrix.shape
            np.matmul(x[: m * k].reshape(m, k), matrix.T, out=out[: m * n].reshape(m, n))
        return time.perf_counter() - start

    def _timed(self, call: Any, part: str) -> Any:
        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args)
            finally:
                self.seconds[part] += time.perf_counter() - start
                if part == "matmul":
                    self.products.append((args[2], len(args[1])))

        return timed
