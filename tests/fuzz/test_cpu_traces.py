"""Random traces on `cpu`: a request gives in any company what it gives alone.

Its log probabilities to 1e-4 by NumPy, whose products add in another order for another number of
rows; everything it computes, bit by bit, by the native kernels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupaged.ops import _native as native
from cupaged.ops.numpy_ops import NumpyOps
from tests.fuzz.device_harness import check_seeds, run_seed

QUICK_TRACES = 20


@pytest.mark.parametrize("device", ["numpy", "native"])
def test_traces(device: str) -> None:
    check_seeds(device, range(QUICK_TRACES))


@pytest.mark.parametrize(
    ("device", "stop"),
    [
        pytest.param(device, stop, marks=pytest.mark.slow if stop <= 100 else pytest.mark.long)
        for device, most in (("numpy", 500), ("native", 200))
        for stop in range(2 * QUICK_TRACES, most + 1, QUICK_TRACES)
    ],
)
def test_more_traces(device: str, stop: int) -> None:
    check_seeds(device, range(stop - QUICK_TRACES, stop))


def test_a_small_error_in_steps_of_several_tokens_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: attention scales wrongly by one in a thousand."""
    attend = NumpyOps.paged_attention

    def planted(self: NumpyOps, step: Any, out: Any, qkv: Any, cache: Any, scale: float) -> None:
        attend(self, step, out, qkv, cache, scale * (1.001 if step.num_tokens > 8 else 1.0))

    monkeypatch.setattr(NumpyOps, "paged_attention", planted)
    failures = [run_seed("numpy", seed, shrunk=False)[0] for seed in range(5)]
    assert any("are off by" in failure for failure in failures if failure)


@pytest.mark.parametrize("wrong", ["attend", "multiply"])
def test_one_bit_in_steps_of_several_tokens_shows(
    wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a kernel would be that adds in another order for more rows."""
    kernel = getattr(native, wrong)

    def planted(out: Any, x: Any, *rest: Any) -> None:
        kernel(out, x, *rest)
        if len(x) > 8:
            out[0, 0] = np.nextafter(out[0, 0], np.float32(9))

    monkeypatch.setattr(native, wrong, planted)
    assert any(run_seed("native", seed, shrunk=False)[0] for seed in range(5))
