"""Runs CUDA kernel files on the processor of the host, under checks.

    from cupaged.emulator import EmulatedModule

    scale = EmulatedModule("scale.cu").get_function("scale")
    scale((4,), (64,), (out, x, np.int32(len(x))))

The same file loads on a GPU through `cupy.RawModule`. Nothing here needs a GPU or a CUDA toolkit,
only NumPy and a C++ compiler; of cupaged it uses the error tree and the folder of compiled code.
"""

from cupaged.emulator.errors import (
    AsyncCopyError,
    CompileError,
    DataRaceError,
    DeadlockError,
    DeviceAssertError,
    DivergentBarrierError,
    EmulatorError,
    EndlessLoopError,
    KernelCrashError,
    KernelError,
    LaunchError,
    MisalignedError,
    OutOfBoundsError,
    ReadOnlyError,
    SharedMemoryError,
    StackOverflowError,
    ToolchainError,
    UndefinedBehaviourError,
    UninitializedReadError,
    WarpMaskError,
)
from cupaged.emulator.module import EmulatedFunction, EmulatedModule

__all__ = [
    "AsyncCopyError",
    "CompileError",
    "DataRaceError",
    "DeadlockError",
    "DeviceAssertError",
    "DivergentBarrierError",
    "EmulatedFunction",
    "EmulatedModule",
    "EmulatorError",
    "EndlessLoopError",
    "KernelCrashError",
    "KernelError",
    "LaunchError",
    "MisalignedError",
    "OutOfBoundsError",
    "ReadOnlyError",
    "SharedMemoryError",
    "StackOverflowError",
    "ToolchainError",
    "UndefinedBehaviourError",
    "UninitializedReadError",
    "WarpMaskError",
]
