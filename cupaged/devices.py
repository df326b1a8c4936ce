"""Devices by their names: what computes there, in which type, and how much memory it has.

The one place that knows `cpu`, `emulated` and `cuda` apart; behind it everything is `Ops`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import cast

from cupaged.errors import ConfigError, NotSupportedError
from cupaged.estimate import half_dtype
from cupaged.ops import BYTES_PER_ELEMENT, KVCacheSpec, Ops
from cupaged.ops.blas import use_threads
from cupaged.ops.numpy_ops import NumpyOps
from cupaged.resources import Resources
from cupaged.runtime.protocol import DeviceUnavailableError, Runtime

_logger = logging.getLogger(__name__)

MIB = 2**20
CPU_KERNELS = ("auto", "native", "numpy")
CPU_WEIGHT_DTYPES = ("auto", "float32", "bfloat16", "q8", "file")


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """What a device needs to know.

    dtype: "auto" or a type. stored_dtype: what the model's configuration names.
    threads: that compute on `cpu`; None to find out.
    cpu_kernels: what computes there: "native", "numpy", or "auto", native where it was built.
    cpu_weight_dtype: how the native kernels keep weights, one of `CPU_WEIGHT_DTYPES`.
    gpu_memory_utilization: share of a GPU's memory that the engine may take.
    kv_sanitizer: kernels check what they read of the KV pool.
    """

    dtype: str
    stored_dtype: str
    threads: int | None
    gpu_memory_utilization: float
    resources: Resources
    kv_sanitizer: bool = False
    cpu_kernels: str = "auto"
    cpu_weight_dtype: str = "auto"


@dataclass(frozen=True, slots=True)
class Device:
    """An open device.

    available_bytes: memory for weights, buffers and the KV pool.
    shares_memory: other programs live off the same memory, so the pool takes part of it only.
    warms_up: kernels are to be loaded before the first request.
    """

    name: str
    ops: Ops
    available_bytes: int
    shares_memory: bool
    description: str
    warms_up: bool = False

    @property
    def dtype(self) -> str:
        """Type of weights, activations and KV cache."""
        return str(self.ops.dtype.name)

    @property
    def element_bytes(self) -> int:
        """Of that type."""
        return BYTES_PER_ELEMENT[self.dtype]

    def check_attention(self, num_q_heads: int, specs: Iterable[KVCacheSpec]) -> None:
        """Whether the device has a kernel for each layer's attention, asked before weights are
        read.

        Raises:
            NotSupportedError: there is none; it names what there is.
        """
        if self.name == "cpu":
            return
        from cupaged.ops.attention_shapes import AttentionShape, check_attention_shape

        for spec in set(specs):
            check_attention_shape(
                AttentionShape(num_q_heads, spec.num_kv_heads, spec.k_dim, spec.block_size)
            )


def check_device(name: object) -> None:
    """Raises ConfigError for a name that is no device."""
    if name not in ("auto", *DEVICES):
        raise ConfigError("device", name, f"'auto' or one of {', '.join(DEVICES)}")


def open_device(name: str, options: DeviceOptions) -> Device:
    """Open a device; "auto" is a GPU where there is one, else the processor.

    Raises:
        ConfigError: no such device, or a type that it does not compute in.
        DeviceUnavailableError: the device cannot be used, and why.
    """
    check_device(name)
    if name != "auto":
        return _OPENERS[name](options)
    if find_spec("cupy") is None:
        return _open_cpu(options)
    try:
        return _open_cuda(options)
    except DeviceUnavailableError as error:
        _logger.info("device auto: cpu, because %s", error)
        return _open_cpu(options)


def _open_cpu(options: DeviceOptions) -> Device:
    if options.dtype not in ("auto", "float32"):
        raise NotSupportedError(
            f"dtype={options.dtype!r} is not supported on cpu; use 'float32' or 'auto'"
        )
    resources = options.resources
    ops, description = _cpu_ops(options)
    description += f", {_host(resources)}"
    return Device("cpu", ops, resources.available_bytes, True, description)


def _cpu_ops(options: DeviceOptions) -> tuple[Ops, str]:
    """The operations that were asked for, or can be had, and a word about them."""
    cores, weights = options.resources.cores, options.cpu_weight_dtype
    if options.cpu_kernels != "numpy":
        try:
            from cupaged.ops.native_ops import NativeOps, use_native_threads
        except ImportError as error:
            missing = f"the native kernels were not built ({error})"
            if options.cpu_kernels == "native":
                raise DeviceUnavailableError(f"cpu_kernels='native': {missing}") from None
            _logger.warning("%s: NumPy computes, which is slower", missing)
        else:
            threads, instructions = use_native_threads(options.threads, cores)
            word = "thread" if threads == 1 else "threads"
            return NativeOps(weights), f"{instructions} kernels, {threads} {word}"
    if weights not in ("auto", "float32"):
        raise NotSupportedError(
            f"cpu_weight_dtype={weights!r} is not supported by NumPy; use 'float32' or 'auto', or "
            "the native kernels"
        )
    return NumpyOps(), f"NumPy, {use_threads(options.threads, cores)} BLAS threads"


def _open_emulated(options: DeviceOptions) -> Device:
    from cupaged.runtime.host_runtime import HostRuntime  # needs a C++ compiler only here

    dtype, resources = half_dtype(options.dtype, options.stored_dtype), options.resources
    ops = _cuda_ops(HostRuntime(), dtype, options)
    description = f"kernels under checks, {dtype}, {_host(resources)}"
    return Device("emulated", ops, resources.available_bytes, True, description)


def _open_cuda(options: DeviceOptions) -> Device:
    from cupaged.runtime.cupy_runtime import CuPyRuntime  # imports CuPy

    dtype = half_dtype(options.dtype, options.stored_dtype)
    runtime = CuPyRuntime()
    ops = _cuda_ops(runtime, dtype, options)
    memory, properties = runtime.memory_info(), runtime.properties
    available = usable_bytes(memory.total_bytes, memory.free_bytes, options.gpu_memory_utilization)
    description = (
        f"{properties.name} ({properties.arch}), {dtype}, {available / MIB:.0f} of "
        f"{memory.total_bytes / MIB:.0f} MiB usable, {memory.free_bytes / MIB:.0f} free"
    )
    return Device("cuda", ops, available, False, description, warms_up=True)


_OPENERS: dict[str, Callable[[DeviceOptions], Device]] = {
    "cpu": _open_cpu, "emulated": _open_emulated, "cuda": _open_cuda
}  # fmt: skip
DEVICES = tuple(_OPENERS)


def usable_bytes(total_bytes: int, free_bytes: int, utilization: float) -> int:
    """Memory of a GPU that the engine may take: its share of all, less what others hold.

    Never negative.
    """
    used = total_bytes - free_bytes
    return max(0, min(free_bytes, int(total_bytes * utilization) - used))


def _cuda_ops(runtime: Runtime, dtype: str, options: DeviceOptions) -> Ops:
    from cupaged.ops.cuda_ops import CudaOps
    from cupaged.ops.kv_checked_runtime import KVCheckedRuntime

    if options.kv_sanitizer:
        runtime = cast(Runtime, KVCheckedRuntime(runtime))
    ops = CudaOps(runtime, dtype)
    ops.check_compiler()  # before weights are read
    return ops


def _host(resources: Resources) -> str:
    return (
        f"{resources.cores} cores (limited by {resources.cores_limited_by}), "
        f"{resources.available_bytes / MIB:.0f} of {resources.memory_bytes / MIB:.0f} MiB free "
        f"(limited by {resources.memory_limited_by})"
    )
