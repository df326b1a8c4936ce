"""Devices: which share of a GPU's memory is taken, and the pool that follows from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cupaged.devices import usable_bytes
from cupaged.engine_args import EngineArgs
from cupaged.errors import CapacityError
from cupaged.ops import KVCacheSpec, StepLimits
from cupaged.ops.step_memory import StepMemory
from tests.tiny_models import TINIER, hf_weights, write_hf_folder
from tests.unit.fake_cupy import FakeGpu, install

MIB = 2**20


@pytest.mark.parametrize(
    ("total", "free", "utilization", "expected"),
    [
        (100, 100, 0.9, 90),
        (100, 95, 0.9, 85),  # others hold 5
        (100, 30, 0.9, 20),
        (100, 10, 0.9, 0),
        (100, 5, 0.9, 0),  # others hold more than is left of the share
        (100, 0, 0.9, 0),
        (100, 100, 1.0, 100),
        (100, 40, 1.0, 40),
        (100, 100, 0.001, 0),
    ],
)
def test_the_share_of_a_gpu(total: int, free: int, utilization: float, expected: int) -> None:
    assert usable_bytes(total, free, utilization) == expected


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """100 MiB, of which others hold 30; nothing runs on it."""
    fake = FakeGpu()
    fake.memory, fake.pool_counts = (70 * MIB, 100 * MIB), (0, 0, 0)
    return install(fake, monkeypatch)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_hf_folder(tmp_path / "tinier", TINIER)


WEIGHTS = 2 * sum(array.size for array in hf_weights(TINIER).values())
# A step of 64 tokens and 8 rows of logits; the buffers are 3 hidden, qkv, attended, gate and up,
# activated wide. The table of RoPE has a row a position, head_dim wide, in float32 as the logits.
STEPS = 2 * (64 * (3 * 128 + 320 + 192 + 640 + 320) + 8 * 128) + 4 * (2 * 8 * 509 + 1024 * 64)
BLOCK = 2 * 2 * 16 * 64 * 2  # layers, keys and values, tokens, one head, bytes
PRODUCTS = [(509, 128), (320, 128), (128, 192), (640, 128), (128, 320)]


def operations() -> int:
    """What operations take on the fake A100 of 108 multiprocessors."""
    limits = StepLimits(
        max_tokens=64, max_seqs=8, max_logits=8, max_context=1024, max_blocks_per_seq=64,
        vocab_size=509, max_logprobs=20, max_steps_in_flight=1, num_q_heads=3,
        kv_specs=(KVCacheSpec(0, 1, 64, 64, "bfloat16", 16),),
    )  # fmt: skip
    return StepMemory(limits, 108).total_bytes(PRODUCTS, "bfloat16")


LIMITS: dict[str, Any] = {"max_num_batched_tokens": 64, "max_num_seqs": 8}


@pytest.mark.parametrize("device", ["cuda", "auto"])
def test_the_pool_is_what_is_left_of_the_share(device: str, gpu: FakeGpu, folder: Path) -> None:
    """47 % of 100 MiB, less the 30 of others, less weights and workspace, in whole blocks."""
    config = (
        EngineArgs(
            model=folder, device=device, dtype="bfloat16", gpu_memory_utilization=0.47, **LIMITS
        )
        .build()
        .core.config
    )
    expected = (17 * MIB - WEIGHTS - STEPS - operations()) // BLOCK
    assert config.num_blocks == expected < 512


def test_no_more_than_all_requests_need(gpu: FakeGpu, folder: Path) -> None:
    config = EngineArgs(model=folder, device="cuda", **LIMITS).build().core.config
    assert config.num_blocks == 8 * 1024 // 16


def test_a_share_that_is_too_small(gpu: FakeGpu, folder: Path) -> None:
    for share, name in ((0.3, "model weights in bytes"), (0.32, "workspace in bytes")):
        with pytest.raises(CapacityError) as caught:
            EngineArgs(model=folder, device="cuda", gpu_memory_utilization=share, **LIMITS).build()
        assert caught.value.name == name
