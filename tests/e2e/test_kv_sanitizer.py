"""The KV sanitizer on a model: what is wrong in one layer is told by that layer's number."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupaged.engine.core import EngineCore
from cupaged.engine.kv_memory import POISON_BITS
from cupaged.engine.kv_sanitizer import SanitizedRunner
from cupaged.engine_args import EngineArgs
from cupaged.errors import EngineError, KVSanitizerError
from cupaged.llm import LLM
from cupaged.ops import KVCache
from cupaged.ops.native_ops import NativeOps
from cupaged.ops.numpy_ops import NumpyOps
from cupaged.request import CoreRequest
from cupaged.runtime.dtypes import storage_dtype
from cupaged.sampling_params import SamplingParams
from tests.fast_runtime import fast_ops
from tests.forced import LoadedModel
from tests.tiny_models import TINIER, write_hf_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf_folder(tmp_path_factory.mktemp("models") / "tinier", TINIER)


class DamagedOps(NumpyOps):
    """After layer 1 has written its keys and values, something happens to them."""

    def __init__(self, damage: Any) -> None:
        super().__init__()
        self._damage = damage
        self._layers: list[int] = []

    def rope_and_cache(self, step: Any, qkv: Any, table: Any, cache: KVCache) -> None:
        super().rope_and_cache(step, qkv, table, cache)
        if id(cache) not in self._layers:
            self._layers.append(id(cache))
        if self._layers.index(id(cache)) == 1:
            self._damage(cache)


def run(folder: Path, ops: Any, length: int = 20) -> EngineCore:
    """Two steps of one request; keeps its prompt in blocks 0 and 1."""
    core = LoadedModel(folder, ops).core(num_blocks=8, max_model_len=100)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    core.add_request(CoreRequest("a", tuple(range(3, 3 + length)), params))
    for _ in range(2):
        core.step()
    return core


def poison(pages: Any, place: Any) -> None:
    pages.view(np.uint32)[place] = 0x7FC0DEAD


def keys_unwritten(cache: KVCache) -> None:
    poison(cache.k, (1, slice(None), 2))


def slot_unwritten(cache: KVCache) -> None:
    poison(cache.k, (1, slice(None), 2))
    poison(cache.v, (1, slice(None), 2))


def one_slot_more(cache: KVCache) -> None:
    cache.v[1, :, 4] = 0.0


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (keys_unwritten, "has not written slot 2 of block 1 in layer 1: a part of it holds poison"),
        (slot_unwritten, "has not written slot 2 of block 1 in layer 1: it still holds poison"),
        (one_slot_more, "has written slot 4 of block 1 in layer 1: no token of the step belongs"),
    ],
)
def test_what_one_layer_has_not_written_or_should_not_have(
    folder: Path, damage: Any, said: str
) -> None:
    with pytest.raises(KVSanitizerError, match=said) as caught:
        run(folder, DamagedOps(damage))
    error = caught.value
    assert (error.request_id, error.layer, error.block) == ("a", 1, 1)
    assert error.history == (
        "step 0: handed out to request 'a' sample 0",
        "step 0: slots 0-3 written by request 'a' sample 0",
    )


def test_a_kernel_that_reads_what_nobody_wrote(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The poison of layer 0 becomes keys and values of layer 1."""
    reference = NumpyOps.paged_attention

    def read_too_far(
        self: NumpyOps, step: Any, out: Any, qkv: Any, cache: KVCache, scale: float
    ) -> None:
        reference(self, step, out, qkv, cache, scale)
        if len(out) == 1:
            width = cache.v.shape[1] * cache.v.shape[3]
            out[0, :width] += 1e-9 * cache.v[1, :, 6].reshape(-1)

    monkeypatch.setattr(NumpyOps, "paged_attention", read_too_far)
    said = "has not written slot 4 of block 1 in layer 1: .* what was computed from poison"
    with pytest.raises(KVSanitizerError, match=said):
        run(folder, NumpyOps())


@pytest.mark.parametrize("layer", [0, 1])
def test_a_result_that_is_no_number(folder: Path, layer: int) -> None:
    """A slot of an earlier step is poison now, whoever did it."""
    core = run(folder, NumpyOps(), length=40)
    memory: Any = core._runner.inner.kv_memory  # type: ignore[attr-defined]
    poison(memory._caches[layer].v, (0, slice(None), 3))
    with pytest.raises(KVSanitizerError) as caught:
        core.step()
    assert str(caught.value).startswith(
        f"KV sanitizer: step 2: request 'a' sample 0 has read slot 3 of block 0 in layer {layer}: "
        "it holds poison, and the result is not a number\nblock 0:\n"
    )


@pytest.mark.parametrize(("dtype", "bits"), POISON_BITS.items())
def test_poison_is_no_number_in_any_type(dtype: str, bits: int) -> None:
    stored = storage_dtype(dtype)
    poison = np.array([bits], f"u{stored.itemsize}").view(stored)
    assert np.isnan(poison.astype(np.float32)).all()


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_poison_is_written_and_known_again(folder: Path, device: str) -> None:
    ops = NumpyOps() if device == "cpu" else fast_ops("bfloat16")
    core = run(folder, ops)
    runner = core._runner
    assert isinstance(runner, SanitizedRunner)
    memory: Any = runner.inner.kv_memory  # type: ignore[attr-defined]
    blocks = np.array([1, 5, 0])
    memory.poison(blocks[1:])
    for layer in range(memory.num_layers):
        share = memory.poisoned_share(layer, blocks)
        assert (share[0] == [0.0] * 5 + [1.0] * 11).all()
        assert (share[1:] == 1.0).all()


@pytest.fixture
def broken_llm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    """An engine whose every step leaves a slot unwritten."""
    for ops in (NumpyOps, NativeOps):
        monkeypatch.setattr(ops, "rope_and_cache", lambda self, step, qkv, table, cache: None)
    yield LLM(model=str(folder), device="cpu", max_model_len=100, kv_sanitizer=True)


def test_who_asked_is_told(broken_llm: LLM) -> None:
    for _ in range(2):
        with pytest.raises(EngineError, match=r"KV sanitizer: step 0: request .* layer 0"):
            broken_llm.generate(["Hello", "World"], SamplingParams(max_tokens=3), use_tqdm=False)


def test_it_is_off_unless_asked_for(folder: Path) -> None:
    assert EngineArgs.__dataclass_fields__["kv_sanitizer"].default is False
    core = EngineArgs(model=folder, device="cpu", max_model_len=64, kv_sanitizer=False).build_core()
    assert not isinstance(core.core._runner, SanitizedRunner)
