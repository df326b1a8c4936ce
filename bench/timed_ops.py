"""Measures what the operations of a step cost, by standing between the model and its ops."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any, Self

import numpy as np

from cupaged.engine.core import EngineCore

_PART = {
    "linear": "matmul",
    "paged_attention": "attention",
    "rope_and_cache": "attention",
    "sample": "sampling",
}


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

    def replay(self) -> float:
        """Seconds for the same matrix products, in the same order, with nothing between them."""
        rows = max(m for _, m in self.products)
        columns = max(w.matrix.shape[1] for w, _ in self.products)
        x = np.random.default_rng(0).standard_normal(rows * columns, np.float32)
        out = np.empty(max(m * w.matrix.shape[0] for w, m in self.products), np.float32)
        start = time.perf_counter()
        for weight, m in self.products:
            n, k = weight.matrix.shape
            np.matmul(x[: m * k].reshape(m, k), weight.matrix.T, out=out[: m * n].reshape(m, n))
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
