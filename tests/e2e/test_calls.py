"""A step makes the same number of calls, Python's and C's, however many sequences are in it.

Counted with `sys.setprofile` while a plan becomes tokens: batch, forward pass and sampling. Python
costs microseconds a call, so a loop over sequences, tokens or heads would soon cost more than the
arithmetic.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterator
from types import FrameType
from typing import Any

import numpy as np
import pytest

from cupaged.engine.batch import StepPlan
from cupaged.engine.core import EngineCore
from cupaged.request import CoreRequest
from cupaged.sampling_params import SamplingParams
from tests.forced import LoadedModel
from tests.tiny_models import TINY, TINY_WIDE_HEAD, write_hf_folder

SIZES = (1, 4, 16, 64)
SPECS = {spec.name: spec for spec in (TINY, TINY_WIDE_HEAD)}


@pytest.fixture(scope="module", params=list(SPECS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path = tmp_path_factory.mktemp("models") / request.param
    return LoadedModel(write_hf_folder(path, SPECS[request.param]))


class Counted:
    """An engine whose runner counts the calls in `submit`."""

    def __init__(self, model: LoadedModel) -> None:
        self.core: EngineCore = model.core(
            num_blocks=600, max_num_batched_tokens=4096, kv_sanitizer=False
        )
        self.calls: Counter[str] = Counter()
        runner = self.core._runner
        submit = runner.submit

        def counted(plan: StepPlan) -> int:
            self.calls = Counter()
            sys.setprofile(self._on_event)
            try:
                return submit(plan)
            finally:
                sys.setprofile(None)

        runner.submit = counted  # type: ignore[method-assign]

    def _on_event(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            self.calls[frame.f_code.co_qualname] += 1
        elif event == "c_call":
            self.calls[f"{arg.__qualname__} in {frame.f_code.co_qualname}"] += 1

    def add(self, prompt: list[int], params: SamplingParams) -> None:
        number = len(self.core._requests)
        self.core.add_request(CoreRequest(str(number), tuple(prompt), params, (2,), number))


@pytest.fixture
def only_our_calls() -> Iterator[None]:
    """Nothing else is called meanwhile; a profiler of somebody else's is put back.

    A collection of garbage comes when it likes and calls what others registered in `gc.callbacks`.
    """
    before, collecting = sys.getprofile(), gc.isenabled()
    gc.disable()
    yield
    sys.setprofile(before)
    if collecting:
        gc.enable()


def decode_calls(model: LoadedModel, num_seqs: int, params: SamplingParams) -> Counter[str]:
    """Calls of one step in which each sequence computes one token and draws one."""
    counted = Counted(model)
    rng = np.random.default_rng(num_seqs)
    for length in rng.integers(1, 90, num_seqs):
        counted.add(rng.integers(3, 509, length).tolist(), params)
    counted.core.step()
    assert len(counted.core.step()) == num_seqs
    return counted.calls


def check_equal(counts: list[Counter[str]]) -> None:
    """Message: the calls that differ."""
    names = sorted(set().union(*counts))
    differing = {name: [c[name] for c in counts] for name in names}
    assert not {name: n for name, n in differing.items() if len(set(n)) > 1}
    assert counts[0].total() > 100


@pytest.mark.usefixtures("only_our_calls")
@pytest.mark.parametrize(
    "how",
    [
        {"temperature": 0},
        {"temperature": 1},
        {"temperature": 1, "top_k": 5},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1, "top_k": 9, "top_p": 0.5, "min_tokens": 20, "stop_token_ids": [7, 8]},
        {"temperature": 1, "min_p": 0.1, "trace_decode_token_ids": [3]},
        {"repetition_penalty": 1.2, "presence_penalty": 0.5, "logit_bias": {3: 1, 4: -1}},
        {"temperature": 0, "frequency_penalty": 1, "allowed_token_ids": [3, 5, 8, 400]},
    ],
    ids=str,
)
def test_decode(how: dict[str, Any], model: LoadedModel) -> None:
    params = SamplingParams(max_tokens=30, **how)
    check_equal([decode_calls(model, num_seqs, params) for num_seqs in SIZES])


@pytest.mark.usefixtures("only_our_calls")
def test_prefill(model: LoadedModel) -> None:
    """One prompt of 8 or 256 tokens, or 16 of 100."""
    counts = []
    for lengths in ([8], [256], [100] * 16):
        counted = Counted(model)
        for length in lengths:
            counted.add([5] * length, SamplingParams(temperature=0, max_tokens=2))
        assert len(counted.core.step()) == len(lengths)
        counts.append(counted.calls)
    check_equal(counts)


@pytest.mark.usefixtures("only_our_calls")
def test_the_number_of_layers_counts(model: LoadedModel) -> None:
    """What does grow: the same calls in every layer. It shows that calls are seen at all."""
    calls = decode_calls(model, 4, SamplingParams(temperature=0, max_tokens=4))
    layers = model.files.config.num_layers
    assert calls["NumpyOps.paged_attention"] == layers
    assert calls["NumpyOps.linear"] == 4 * layers + 1
    assert calls["NumpyOps.rms_norm"] == 2 * layers + 1
