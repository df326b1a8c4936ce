"""The step path takes no memory of the device and asks CuPy for no kernel of its own.

An engine runs on a runtime that writes launches down and runs nothing. An array of it refuses what
CuPy would compile a kernel for (arithmetic, comparison, conversion, assignment, fancy indexing,
reading a value). From the first step on the runtime refuses every allocation, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cupaged.engine.device_memory import step_limits
from cupaged.errors import EngineError
from cupaged.ops import StepContext
from cupaged.ops.cuda_ops import CudaOps
from cupaged.request import CoreRequest
from cupaged.runtime.cupy_runtime import CuPyRuntime
from cupaged.runtime.device_arrays import DeviceArrayError
from cupaged.runtime.host_runtime import HostRuntime
from cupaged.runtime.protocol import Runtime
from cupaged.sampling_params import SamplingParams
from tests.forced import LoadedModel
from tests.ops.writing_runtime import WritingRuntime
from tests.tiny_models import TINY, TINY_WIDE_HEAD, write_hf_folder
from tests.unit.fake_cupy import FakeGpu, install

DTYPES = ("float32", "float16", "bfloat16")
LIMITS: dict[str, Any] = {
    "kv_sanitizer": False,  # it looks at memory between steps
    "num_blocks": 11, "max_model_len": 128, "max_num_seqs": 8, "max_num_batched_tokens": 64,
    "watermark": 0.0,
}  # fmt: skip


class ArmedRuntime(WritingRuntime):
    """Allocations fail once `armed` is set; kernels are counted."""

    def __init__(self) -> None:
        super().__init__()
        self.armed = False
        self.refused: list[tuple[tuple[int, ...], str]] = []

    def _take(self, shape: Any, dtype: Any) -> None:
        if self.armed:
            self.refused.append((tuple(shape), np.dtype(dtype).name))
            raise AssertionError(f"a step allocates {np.dtype(dtype).name} {list(shape)}")

    def empty(self, shape: Any, dtype: Any) -> Any:
        self._take(shape, dtype)
        return super().empty(shape, dtype)

    def zeros(self, shape: Any, dtype: Any) -> Any:
        self._take(shape, dtype)
        return super().zeros(shape, dtype)

    def from_host(self, host: NDArray[Any]) -> Any:
        self._take(host.shape, host.dtype)
        return super().from_host(host)

    def empty_pinned(self, shape: Any, dtype: Any) -> NDArray[Any]:
        self._take(shape, dtype)
        return super().empty_pinned(shape, dtype)


class Engine:
    """A tiny model whose draws are made and overwritten: no kernel has run."""

    def __init__(
        self, folder: Path, dtype: str, runtime: Runtime | None = None, **limits: Any
    ) -> None:
        self.runtime: Any = runtime or ArmedRuntime()
        self.ops = CudaOps(self.runtime, dtype)
        self.core = LoadedModel(folder, self.ops).core(sampler=self._draw, **{**LIMITS, **limits})
        self._number = 0

    def _draw(self, logits: Any, step: StepContext) -> Any:
        drawn = self.ops.sample(logits, step.sampling)
        assert self.runtime.is_device_array(drawn) and drawn.dtype == np.int32
        self.runtime.copy_to_device(drawn, np.full(drawn.shape, 5, np.int32))
        return drawn

    def run(self, *params: SamplingParams, length: int = 20) -> None:
        """One request for each of `params`, all at once, to their ends."""
        for asked in params:
            self._number += 1
            prompt = tuple(3 + (self._number + i) % 500 for i in range(length))
            self.core.add_request(CoreRequest(str(self._number), prompt, asked, seed=self._number))
        while self.core.has_unfinished_requests:
            self.core.step()
        self.core.audit()


def asked(**changes: Any) -> SamplingParams:
    fields = {"temperature": 0.8, "top_p": 0.9, "max_tokens": 20, "ignore_eos": True, **changes}
    return SamplingParams(**fields)


WORK = {
    "greedy": [asked(temperature=0)],
    "eight at once": [asked(top_k=i) for i in range(8)],
    "forked": [asked(n=3), asked(n=4)],
    "edited": [
        asked(repetition_penalty=1.2),
        asked(presence_penalty=1, frequency_penalty=0.5),
        asked(logit_bias={7: 2.0, 8: -1.0}),
        asked(allowed_token_ids=[5, 6, 7]),
        asked(min_tokens=6, stop_token_ids=[9]),
        asked(min_p=0.1, temperature=2.0),
    ],
    "forced": [asked(trace_decode_token_ids=[4, 4])],
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("models")
    return {s.name: write_hf_folder(place / s.name, s) for s in (TINY, TINY_WIDE_HEAD)}


def armed(folder: Path, dtype: str, **limits: Any) -> Engine:
    """An engine that has run nothing yet, and may allocate nothing from now on."""
    engine = Engine(folder, dtype, **limits)
    engine.runtime.armed = True
    engine.runtime.launches.clear()
    return engine


@pytest.mark.parametrize("name", ["tiny", "tiny_wide_head"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_step_allocates_and_computes_nothing_by_itself(
    dtype: str, name: str, folders: dict[str, Path]
) -> None:
    """From the first step on."""
    engine = armed(folders[name], dtype)
    for params in WORK.values():
        engine.run(*params)
        engine.run(*params, length=1)
    assert engine.core.stats().num_preemptions_total > 0
    assert not engine.runtime.refused
    launched = {kernel for kernel, *_ in engine.runtime.launches}
    assert launched >= {"paged_attention", "sample", "copy_blocks", "rms_norm", "gather_rows"}


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_prompts_under_penalties_and_many_log_probabilities(
    dtype: str, folders: dict[str, Path]
) -> None:
    """What goes up and comes down is largest here, and fits what was taken at the start."""
    limits: dict[str, Any] = {
        "num_blocks": 600, "max_num_seqs": 40, "max_num_batched_tokens": 512
    }  # fmt: skip
    engine = armed(folders["tiny"], dtype, **limits)
    asking = asked(
        repetition_penalty=1.2, frequency_penalty=1, allowed_token_ids=[5, 6], logit_bias={5: 1.0},
        prompt_logprobs=20, logprobs=20, max_tokens=3,
    )  # fmt: skip
    engine.run(*[asking] * 40, length=120)
    assert not engine.runtime.refused


def test_more_edits_than_there_is_room_for(folders: dict[str, Path]) -> None:
    """They go up by themselves, in memory that grows once; the step's own addresses stay."""
    engine = Engine(
        folders["tiny"], "bfloat16", num_blocks=100, max_num_seqs=40, max_num_batched_tokens=512
    )
    limits = step_limits(engine.core.config, 3, [])
    assert 2 * engine.ops._memory(limits).edit_bytes < 40 * 506 * (8 + 12)
    staged = engine.ops._staging
    place, before = engine.runtime.address(staged._device), engine.runtime.allocations
    ids = range(3, 509)
    many = asked(allowed_token_ids=ids, logit_bias=dict.fromkeys(ids, 1.0), max_tokens=1)
    engine.run(*[many] * 40, length=4)
    assert 0 < engine.runtime.allocations - before <= 2  # edits, and logits of allowed tokens
    engine.runtime.armed = True
    engine.run(*[many] * 40, length=4)
    assert engine.runtime.address(staged._device) == place


@pytest.mark.parametrize("dtype", DTYPES)
def test_cupy_itself_is_asked_for_nothing_else(
    dtype: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`CuPyRuntime` on a CuPy whose arrays have views and nothing else."""
    gpu = install(FakeGpu(), monkeypatch)
    engine = Engine(folders["tiny"], dtype, CuPyRuntime())
    engine.core._runner.warm_up()  # type: ignore[attr-defined]
    gpu.calls.clear()
    gpu.launched.clear()
    for params in WORK.values():
        engine.run(*params)
    called = {call for call, *_ in gpu.calls}
    assert called <= {"copy", "record", "event synchronize", "synchronize"}
    assert len(gpu.launched) > 100


def test_the_runtime_notices(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation that allocates, or that computes on arrays, is refused: this file can fail."""
    engine = armed(folders["tiny"], "float32")
    silu_mul = CudaOps.silu_mul

    def allocating(self: CudaOps, out: Any, gate_up: Any) -> None:
        silu_mul(self, self.empty(out.shape, out.dtype), gate_up)

    def computing(self: CudaOps, out: Any, gate_up: Any) -> None:
        half = out.shape[1]
        out += gate_up[:, :half] * gate_up[:, half:]

    def converting(self: CudaOps, out: Any, gate_up: Any) -> None:
        silu_mul(self, out, gate_up.astype(np.float32))

    for planted, message in (
        (allocating, "a step allocates float32"),
        (computing, "multiply does not work on an array on the device"),
        (converting, "astype does not work on an array on the device"),
    ):
        monkeypatch.setattr(CudaOps, "silu_mul", planted)
        with pytest.raises(EngineError, match=message):
            engine.run(asked())
    assert len(engine.runtime.refused) == 1


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x + 1, lambda x: x @ x, lambda x: x == x, lambda x: x.astype(np.float16),
        lambda x: x.sum(), lambda x: np.argmax(x), lambda x: x[np.array([0])], lambda x: float(x),
        lambda x: np.concatenate([x, x]), lambda x: x.copy(), lambda x: x.__setitem__(0, 1),
    ],
)  # fmt: skip
def test_what_cupy_would_compile_a_kernel_for(use: Any) -> None:
    with pytest.raises(DeviceArrayError):
        use(HostRuntime().zeros((4, 4), np.float32))
