"""Emulator equals device, primitive by primitive; part of `gpu_smoke`.

Every kernel of gpu_smoke_primitives.cu runs on both with the same inputs. All results are compared
bit for bit, but for products of 16-bit numbers, which a tensor core adds up in an order of its own,
and library functions, which differ by the last places.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.gpu_smoke_checks import BF16, Check, Checks, Device, same
from cupaged.runtime.protocol import Runtime

__all__ = ["primitives"]

SOURCE: Any = Path(__file__).with_suffix(".cu")  # a path, where a runtime expects a name
DEFINES = {"DTYPE": "f32"}
F32, U32, U8 = np.float32, np.uint32, np.uint8
PRODUCT_TOLERANCE = 1e-5  # of the sum of |a| |b|: float32 sums in another order, maybe cut off
FUNCTION_ULPS = 4  # CUDA promises 2 for all but the extremes; the host's library about 1


def primitives(device: Device) -> Checks:
    """All of them."""
    yield from _products(device)
    for count in (1, 2, 4):
        for suffix in ("", "_trans"):
            rows = _random(U32, 32, 4)
            name = f"ldmatrix_x{count}{suffix}"
            yield from _equal(device, name, f"{name}_of", [((32, count), U32)], rows)
    for size in (4, 8, 16):
        data, out = _random(U8, 32, size), [((32, size), U8)]
        counts = (np.arange(32) % (size + 1)).astype(np.int32)
        yield from _equal(device, f"cp.async {size}", f"copy_{size}", out, data)
        yield from _equal(
            device, f"cp.async {size}, zeros", f"copy_or_zero_{size}", out, data, counts
        )
    yield from _equal(device, "cp.async groups", "two_groups", [((64,), U32)], _random(U32, 64))
    yield from _equal(device, "shuffles and votes", "shuffles", [((6, 32), U32)], _random(U32, 32))
    x, y, z = (_floats(seed) for seed in (1, 2, 3))
    yield from _equal(device, "warp and block sums", "sums", [((4, 256), F32)], x)
    yield from _equal(device, "float arithmetic", "arithmetic", [((6, 256), F32)], x, y, z)
    outs = [((256,), np.float16), ((256,), BF16), ((2, 256), F32)]
    yield from _equal(device, "conversions", "conversions", outs, x)
    yield _functions(device)


def _products(device: Device) -> Checks:
    """mma: a random product, with bits of each lane's registers as they come."""
    rng = np.random.default_rng(5)
    for name, dtype in (("mma_f16", np.dtype(np.float16)), ("mma_bf16", BF16)):
        a, b = (rng.standard_normal((32, n)).astype(dtype) for n in (8, 4))
        c = rng.standard_normal((32, 4)).astype(F32)
        (got,), (expected,), (size,) = (
            _run(runtime, f"{name}_of", [c_in], a_in.view(U32), b_in.view(U32))
            for runtime, c_in, a_in, b_in in (
                (device.runtime, c, a, b),
                (device.emulator, c, a, b),
                (device.emulator, np.abs(c), np.abs(a), np.abs(b)),
            )
        )
        error = float((np.abs(got.astype(np.float64) - expected) / size).max())
        said = f"error {error:.1e} of the sum of |a| |b|, at most {PRODUCT_TOLERANCE:.0e}"
        yield Check(name, said, error <= PRODUCT_TOLERANCE, {"error": error})
    sums = rng.integers(-(2**31), 2**31, (32, 4)).astype(np.int32)
    operands = (_random(U32, 32, 4), _random(U32, 32, 2))
    results = [_run(r, "mma_s8_of", [sums], *operands) for r in (device.runtime, device.emulator)]
    yield same("mma_s8", results[0][0], results[1][0])


def _functions(device: Device) -> Check:
    """How far apart the libraries' functions are, in units of the last place."""
    x = np.linspace(-20, 20, 256, dtype=F32)
    got, expected = (
        _run(r, "functions", [np.zeros((5, 256), F32)], x, threads=256)[0]
        for r in (device.runtime, device.emulator)
    )
    apart = np.abs(got.astype(np.float64) - expected) / np.spacing(np.abs(expected))
    worst = dict(
        zip(("expf", "exp2f", "tanhf", "erff", "logf"), apart.max(1).tolist(), strict=True)
    )
    said = ", ".join(f"{name} {ulps:.0f}" for name, ulps in worst.items())
    passed = max(worst.values()) <= FUNCTION_ULPS
    return Check("library functions", f"apart by ulps: {said}", passed, worst)


def _equal(
    device: Device,
    name: str,
    kernel: str,
    outs: Sequence[tuple[tuple[int, ...], Any]],
    *inputs: Any,
) -> Checks:
    threads = 256 if inputs[0].size == 256 and inputs[0].dtype == F32 else 32
    given = [np.zeros(shape, dtype) for shape, dtype in outs]
    got, expected = (
        _run(runtime, kernel, given, *inputs, threads=threads)
        for runtime in (device.runtime, device.emulator)
    )
    yield same(
        name,
        np.concatenate([a.reshape(-1).view(U8) for a in got]),
        np.concatenate([a.reshape(-1).view(U8) for a in expected]),
    )


def _run(
    runtime: Runtime, kernel: str, outs: list[NDArray[Any]], *inputs: Any, threads: int = 32
) -> list[NDArray[Any]]:
    """The outputs on the host, which start with the values of `outs`."""
    loaded = runtime.load_kernel(SOURCE, kernel, DEFINES)
    arrays = [runtime.from_host(out) for out in outs]
    given = [runtime.from_host(array) for array in inputs]
    runtime.launch(loaded, (1,), (threads,), [*arrays, *given])
    return [runtime.to_host(array) for array in arrays]


def _random(dtype: Any, *shape: int) -> NDArray[Any]:
    return np.random.default_rng(len(shape)).integers(0, np.iinfo(dtype).max, shape, dtype)


def _floats(seed: int) -> NDArray[np.float32]:
    """Of many magnitudes, denormal results of float16 among them."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(256) * 10.0 ** rng.integers(-7, 5, 256)).astype(F32)
