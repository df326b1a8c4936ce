"""The emulated device in its other modes: any order of threads, and plain, give the same bits.

And what its checks say when an operation is lied to: a fault names the kernel and the argument.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cupaged.emulator.errors import OutOfBoundsError
from cupaged.ops import KVCacheSpec
from cupaged.ops.cuda_ops import CudaOps
from cupaged.runtime.errors import KernelNotFoundError
from cupaged.runtime.host_runtime import HostRuntime
from tests.ops.kernel_arrays import normal
from tests.ops.test_attention import make_batch


def run_layers(runtime: HostRuntime) -> list[NDArray[Any]]:
    """A bit of everything that exists, in bfloat16; every array it writes."""
    ops = CudaOps(runtime, "bfloat16")
    give = runtime.from_host
    ids = np.array([3, 0, 7, 7, 1], np.int32)
    batch = make_batch([(5, 3), (0, 2)], np.array([[2, 1], [0, 3]], np.int32), 16)
    batch.token_ids[...] = ids
    step = ops.begin_step(batch)
    residual, normed = ops.empty((5, 520), ops.dtype), ops.empty((5, 520), ops.dtype)
    weight, x = give(normal(2, (520,), "bfloat16")), give(normal(3, (5, 520), "bfloat16"))
    table = ops.pack_weight(normal(1, (8, 520), "bfloat16").astype(np.float32))
    ops.embedding(residual, step.token_ids, table)
    ops.add_rms_norm(normed, residual, x, weight, 1e-5)
    centred = ops.empty((5, 520), ops.dtype)
    ops.layer_norm(centred, normed, weight, weight, 1e-5)
    activated = ops.empty((5, 260), ops.dtype)
    ops.silu_mul(activated, centred)
    cache = ops.empty_kv_cache(KVCacheSpec(0, 1, 64, 64, "bfloat16", 16), 4)
    qkv = give(normal(4, (5, 4 * 64), "bfloat16"))
    ops.rope_and_cache(step, qkv, ops.rotary_table(10.0 ** -np.arange(32.0), 16), cache)
    slots = batch.groups[0].slot_mapping
    keys = runtime.to_host(cache.k)[slots // 16, 0, slots % 16]
    arrays = (residual, normed, centred, activated, qkv)
    return [*(runtime.to_host(array) for array in arrays), keys]


def test_any_order_and_the_plain_mode_give_the_same_bits() -> None:
    expected = run_layers(HostRuntime())
    assert all(np.isfinite(array.astype(np.float32)).all() for array in expected)
    others = [HostRuntime(seed=seed) for seed in range(4)]
    for runtime in (*others, HostRuntime(mode="plain"), HostRuntime(mode="plain", isolated=True)):
        for got, wanted in zip(run_layers(runtime), expected, strict=True):
            np.testing.assert_array_equal(got.view(np.uint16), wanted.view(np.uint16))


def test_a_fault_names_the_kernel_and_the_argument() -> None:
    """The row numbers say that there are 12 rows where there are 4."""
    runtime = HostRuntime()
    out, x = runtime.zeros((1, 8), np.float16), runtime.zeros((4, 8), np.float16)
    rows = runtime.from_host(np.array([9], np.int32))
    kernel = runtime.load_kernel("gather_rows.cu", "gather_rows", {"DTYPE": "f16"})
    with pytest.raises(OutOfBoundsError) as fault:
        runtime.launch(kernel, (1,), (32,), (out, x, rows, np.int32(12), np.int32(8)))
    assert (fault.value.kernel, fault.value.argument) == ("gather_rows", "x")
    assert fault.value.element == 72
    assert not runtime.to_host(out).any()


def test_an_unknown_kernel_file() -> None:
    with pytest.raises(KernelNotFoundError, match=r"no kernel file nrm\.cu; known: .*norm\.cu"):
        HostRuntime().load_kernel("nrm.cu", "rms_norm", {})
