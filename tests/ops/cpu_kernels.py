"""The `cpu` device's operations in all forms that this machine can run: NumPy's, and the native
kernels for each kind of processor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cupaged.ops import _native as native
from cupaged.ops.native_ops import NativeOps
from cupaged.ops.numpy_ops import NumpyOps

NUMPY = "numpy"
INSTRUCTIONS = native.all_instructions()
CPU_KERNELS = [NUMPY, *INSTRUCTIONS]
INTEGER_PRODUCTS = {"vnni", "amx"}  # of quantised weights; the others expand them to float32


@contextmanager
def using(instructions: str, threads: int = 3) -> Iterator[None]:
    """Let the native kernels use these instructions and so many threads."""
    before, threads_before = native.instructions(), native.num_threads()
    native.use_instructions(instructions)
    native.set_threads(threads)
    yield
    native.use_instructions(before)
    native.set_threads(threads_before)


@contextmanager
def cpu_ops(kernels: str) -> Iterator[NumpyOps]:
    """Operations by one of `CPU_KERNELS`."""
    if kernels == NUMPY:
        yield NumpyOps()
        return
    with using(kernels):
        yield NativeOps()
