"""Random traces on `emulated`: in any company a request has the very bits that it has alone."""

from __future__ import annotations

from typing import Any

import pytest

from cupaged.ops.cuda_ops import CudaOps
from tests.fuzz.device_harness import check_seeds, run_seed

TRACES, SLOW_TRACES, CHUNK = 12, 100, 22


def test_traces() -> None:
    check_seeds("emulated", range(TRACES))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(TRACES, SLOW_TRACES, CHUNK))
def test_more_traces(first: int) -> None:
    """With those above a hundred."""
    check_seeds("emulated", range(first, first + CHUNK))


def test_one_unit_in_the_last_place_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: in steps of several tokens, attention scales by the next float."""
    attend = CudaOps.paged_attention

    def planted(self: CudaOps, step: Any, out: Any, qkv: Any, cache: Any, scale: float) -> None:
        attend(self, step, out, qkv, cache, scale * (1 + (step.num_tokens > 8) * 2.0**-23))

    monkeypatch.setattr(CudaOps, "paged_attention", planted)
    failures = (run_seed("emulated", seed, shrunk=False)[0] for seed in range(TRACES))
    assert "differ: " in next(filter(None, failures))
