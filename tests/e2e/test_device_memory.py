"""A device with too little memory: what is said, and that it is said before anything goes wrong."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from cupaged import devices
from cupaged.devices import Device
from cupaged.engine_args import EngineArgs
from cupaged.errors import CapacityError, CupagedError
from cupaged.ops.cuda_ops import CudaOps
from cupaged.runtime.host_runtime import HostRuntime
from cupaged.runtime.protocol import DeviceMemoryError
from tests.ops.writing_runtime import WritingRuntime
from tests.tiny_models import TINIER, write_hf_folder

MIB = 2**20
LIMITS: dict[str, Any] = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "max_model_len": 256}
BLOCK = 2 * 2 * 16 * 64 * 2  # layers, keys and values, tokens, one head, bytes
BLOCKS = 4 * 16  # that four requests of max_model_len fill


class SmallRuntime(HostRuntime):
    """So much memory; nothing runs on it. most: what was ever in use."""

    def __init__(self, memory_bytes: int) -> None:
        super().__init__(memory_bytes=memory_bytes)
        self.most = 0

    def load_kernel(self, file: str, name: str, defines: Any) -> str:
        return name

    def launch(self, *_: Any, **__: Any) -> None:
        pass

    def empty(self, shape: Any, dtype: Any) -> Any:
        array = super().empty(shape, dtype)
        assert self._budget is not None
        self.most = max(self.most, self._budget.used_bytes)
        return array


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_hf_folder(tmp_path / "tinier", TINIER)


def opened(
    monkeypatch: pytest.MonkeyPatch, memory_bytes: int, planned_bytes: int | None = None
) -> SmallRuntime:
    """The device of `EngineArgs`. planned_bytes: what it says is free, if other than what is."""
    runtime = SmallRuntime(memory_bytes)
    free = memory_bytes if planned_bytes is None else planned_bytes
    device = Device("emulated", CudaOps(runtime, "bfloat16"), free, False, "")
    monkeypatch.setitem(devices._OPENERS, "emulated", lambda options: device)
    return runtime


def build(folder: Path, **options: Any) -> EngineArgs:
    return EngineArgs(model=folder, device="emulated", **{**LIMITS, **options})


def needed_bytes(folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> int:
    """What the plan says that an engine takes without its pool."""
    opened(monkeypatch, 1 << 40)
    workspace: list[int] = []
    plan = EngineArgs._workspace_bytes

    def noted(*args: Any) -> int:
        workspace.append(plan(*args))
        return workspace[-1]

    with monkeypatch.context() as patch:
        patch.setattr(EngineArgs, "_workspace_bytes", noted)
        build(folder, **options).build()
    return workspace[0] + _weights(folder)


def _weights(folder: Path) -> int:
    from cupaged.loading.model_files import open_model
    from cupaged.loading.weights import weight_bytes

    files = open_model(folder)
    device = Device("emulated", CudaOps(WritingRuntime(), "bfloat16"), 0, False, "")
    files.reader.close()
    return weight_bytes(files.entries, files.reader, files.form, device.ops)


@pytest.mark.parametrize("num_host_blocks", [0, 40])
@pytest.mark.parametrize("max_num_batched_tokens", [64, 8, 1])
def test_the_plan_holds_to_the_byte(
    max_num_batched_tokens: int,
    num_host_blocks: int,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With exactly the memory that was planned an engine starts, and takes nearly all of it.

    Blocks of the host take a staging area on the device, and room for their ids.
    """
    options = {
        "max_num_batched_tokens": max_num_batched_tokens,
        "swap_space": num_host_blocks * BLOCK / 2**30,
        "preemption_mode": "swap" if num_host_blocks else "auto",
    }
    needed = needed_bytes(folder, monkeypatch, **options)
    runtime = opened(monkeypatch, needed + 20 * BLOCK)
    core = build(folder, **options).build().core
    assert core.config.num_blocks == 20
    assert needed + 20 * BLOCK - 8192 < runtime.most <= needed + 20 * BLOCK


def test_whatever_is_free_the_plan_is_refused_or_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No size of memory ends in anything but an engine or one clear refusal."""
    needed = needed_bytes(folder, monkeypatch)
    outcomes = set()
    for memory in (0, 1, _weights(folder), needed - 1, needed, needed + BLOCK, needed + 99 * BLOCK):
        opened(monkeypatch, memory)
        try:
            blocks = build(folder).build().core.config.num_blocks
            assert 1 <= blocks <= BLOCKS
            outcomes.add("built")
        except CapacityError as error:
            assert isinstance(error.value, int) and error.value >= 0 and "-" not in error.allowed
            outcomes.add(error.name)
    assert outcomes == {
        "model weights in bytes", "workspace in bytes", "max_model_len", "built"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("missing", "what"),
    [
        ("weights", r"the weights: '(embed|\d\.\w+|norm)': \d+ bytes for an array \[.*\] of \w+ "),
        ("buffers", r"the buffers of a step: \d+ bytes for an array \[.*\] of \w+ "),
        ("pool", r"layer \d of 2 of the KV pool \(64 blocks, 524288 bytes in all\): 131072 bytes "),
    ],
)
def test_memory_that_is_gone_when_it_is_taken(
    missing: str, what: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process took some after the plan was made."""
    needed, weights = needed_bytes(folder, monkeypatch), _weights(folder)
    memory = {
        "weights": weights // 2,
        "pool": weights + BLOCKS * BLOCK // 4 + MIB // 2,  # with the RoPE table and packing
        "buffers": needed + BLOCKS * BLOCK - MIB // 4,
    }[missing]
    assert memory < needed + BLOCKS * BLOCK
    opened(monkeypatch, memory, needed + BLOCKS * BLOCK)
    with pytest.raises(CupagedError) as caught:
        build(folder).build()
    message = str(caught.value)
    assert isinstance(caught.value, DeviceMemoryError) and len(message.splitlines()) == 1
    options = {
        "weights": "use a type of fewer bits (dtype), or a device with more memory",
        "buffers": "lower max_num_batched_tokens, max_num_seqs or max_logprobs",
        "pool": "lower num_gpu_blocks_override, kv_cache_memory_bytes or gpu_memory_utilization",
    }[missing]
    pattern = rf"no memory for {what}.*do not fit: \d+ of {memory} bytes are free; "
    assert re.match(pattern, message), message
    assert message.endswith(options)


def test_a_step_that_needs_more_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(monkeypatch, needed_bytes(folder, monkeypatch) + 4 * BLOCK * 16)
    with pytest.raises(CapacityError, match=r"lower max_num_batched_tokens=4096, max_num_seqs=4"):
        build(folder, max_num_batched_tokens=4096).build()
