"""Kernels that check what they read of the KV pool: damaged ones are found, by layer and slot."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, cast

import pytest

from cupaged.emulator.module import EmulatedModule
from cupaged.engine.core import EngineCore
from cupaged.errors import KVSanitizerError
from cupaged.ops.cuda_ops import CudaOps
from cupaged.ops.kv_checked_runtime import KVCheckedRuntime
from cupaged.outputs import CoreOutput
from cupaged.request import CoreRequest
from cupaged.runtime.kernels import kernel_folder
from cupaged.runtime.protocol import Defines, Kernel
from cupaged.sampling_params import SamplingParams
from tests.fast_runtime import FastRuntime, fast_ops
from tests.forced import LoadedModel
from tests.tiny_models import TINIER, write_hf_folder

DTYPE = "bfloat16"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf_folder(tmp_path_factory.mktemp("models") / "tinier", TINIER)


class DamagedRuntime(FastRuntime):
    """Kernels of a copy of `cuda/` in which one text of one file is another."""

    def __init__(self, place: Path, file: str, old: str, new: str) -> None:
        super().__init__()
        self._place = place / "cuda"
        shutil.copytree(kernel_folder(), self._place)
        text = (self._place / file).read_text(encoding="utf-8")
        assert text.count(old) == 1, f"{file} has {old!r} {text.count(old)} times"
        (self._place / file).write_text(text.replace(old, new), encoding="utf-8")

    def load_kernel(self, file: str, name: str, defines: Defines) -> Kernel:
        if file not in ("rope.cu", "kv_cache.cu", "paged_attention.cu"):
            return super().load_kernel(file, name, defines)
        module = EmulatedModule(
            self._place / file, dict(defines), mode="plain", opt_level=1, isolated=False
        )
        return module.get_function(name)


def checked(runtime: FastRuntime) -> CudaOps:
    return CudaOps(cast(Any, KVCheckedRuntime(cast(Any, runtime))), DTYPE)


def play(
    folder: Path, ops: CudaOps, *, warm_up: bool = False
) -> tuple[EngineCore, list[CoreOutput]]:
    """Two samples of a prompt of 20 tokens, and the same beginning again; then a longer prompt."""
    core = LoadedModel(folder, ops).core(num_blocks=12, max_model_len=120, max_num_seqs=4)
    if warm_up:
        core._runner.inner.warm_up()  # type: ignore[attr-defined]
    first = tuple(range(3, 23))
    two = SamplingParams(n=2, temperature=1.0, max_tokens=4, ignore_eos=True)
    one = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    core.add_request(CoreRequest("a", first, two, seed=1))
    core.add_request(CoreRequest("b", first[::-1], one, seed=2))
    outputs = []
    for step in range(12):
        if step == 6:
            core.add_request(CoreRequest("c", (*first, *range(70)), one, seed=3))
        outputs += core.step()
    core.audit()
    return core, outputs


def tokens(outputs: list[CoreOutput]) -> list[tuple[str, int, list[int]]]:
    return [(o.request_id, o.index, o.new_token_ids) for o in outputs]


def test_kernels_that_are_right_read_what_is_theirs(folder: Path) -> None:
    """And compute the same bits as without checks."""
    _, plain = play(folder, fast_ops(DTYPE))
    _, outputs = play(folder, checked(FastRuntime()), warm_up=True)
    assert tokens(outputs) == tokens(plain)
    assert [o.num_cached_tokens for o in outputs if o.request_id == "c"] == [16] * 3


def test_blocks_that_were_on_the_host_are_read_again(folder: Path) -> None:
    """Two sequences of 30 tokens that both grow past a block edge, in 4 blocks and in 16."""
    one = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    outputs: list[list[CoreOutput]] = []
    for num_blocks in (4, 16):
        core = LoadedModel(folder, checked(FastRuntime())).core(
            num_blocks=num_blocks, num_host_blocks=8, max_model_len=60, watermark=0.0,
            enable_prefix_caching=False,
        )  # fmt: skip
        for name, start in (("a", 3), ("b", 100)):
            core.add_request(CoreRequest(name, tuple(range(start, start + 30)), one))
        outputs.append([])
        while core.has_unfinished_requests:
            outputs[-1] += core.step()
        assert core.stats().blocks_swapped_in_total == (2 if num_blocks == 4 else 0)
    assert sorted(tokens(outputs[0])) == sorted(tokens(outputs[1]))


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        (
            "paged_attention.cu",
            "context.blocks = block_table + (long long)work.sequence * max_blocks;",
            "context.blocks = block_table + (long long)(1 - work.sequence) * max_blocks;",
            "step 0: request 'a' sample 0 has read slot 0 of block 2 in layer 0: position 0 lies "
            "in slot 0 of block 0",
        ),
        (
            "paged_attention.cu",
            "context.end = first_position + (work.first_row + work.num_rows - 1) / group + 1;",
            "context.end = first_position + (work.first_row + work.num_rows - 1) / group + 2;",
            "step 0: request 'a' sample 0 has read slot 4 of block 1 in layer 0: no kernel has "
            "written position 20 since the block was handed out",
        ),
        (
            "attention_tiles.cuh",
            "const int offset = (tile * KV_TILE + row) % BLOCK_SIZE * HEAD_DIM + start;",
            "const int offset = (tile * KV_TILE + (row ^ 1)) % BLOCK_SIZE * HEAD_DIM + start;",
            "step 0: request 'a' sample 0 has read slot 1 of block 0 in layer 0: position 0 lies "
            "in slot 0 of block 0",
        ),
        (
            "paged_attention.cu",
            "context.block_stride = num_kv_heads * BLOCK_SIZE * HEAD_DIM;",
            "context.block_stride = 2 * num_kv_heads * BLOCK_SIZE * HEAD_DIM;",
            "step 0: request 'a' sample 0 has read slot 0 of block 2 in layer 0: position 16 lies "
            "in slot 0 of block 1",
        ),
        (
            "paged_attention.cu",
            "context.block_stride = num_kv_heads * BLOCK_SIZE * HEAD_DIM;",
            "context.block_stride = 1000000 * num_kv_heads * BLOCK_SIZE * HEAD_DIM;",
            "step 0: request 'a' sample 0 has read slot 0 of block 1000000 in layer 0: position 16 "
            "lies in slot 0 of block 1",
        ),
        (
            "rope.cu",
            "const long long slot = slot_mapping[token];",
            "const long long slot = slot_mapping[token] ^ 1;",
            "step 0: request 'a' sample 0 has read slot 0 of block 0 in layer 0: no kernel has "
            "written position 0 since the block was handed out",
        ),
        (
            "kv_cache.cu",
            "const int source = copies[2 * pair];",
            "const int source = copies[2 * pair] ^ 1;",
            "step 1: request 'a' sample 0 has read slot 0 of block 4 in layer 0: no kernel has "
            "written position 16 since the block was handed out",
        ),
    ],
    ids=["another row", "one too far", "another slot", "another block", "nowhere", "write", "copy"],
)  # fmt: skip
def test_a_kernel_that_is_wrong(
    folder: Path, tmp_path: Path, file: str, old: str, new: str, said: str
) -> None:
    with pytest.raises(KVSanitizerError) as caught:
        play(folder, checked(DamagedRuntime(tmp_path, file, old, new)))
    error = caught.value
    assert str(error).partition("\n")[0] == f"KV sanitizer: {said}"
    assert (error.request_id, error.layer) == ("a", 0)
