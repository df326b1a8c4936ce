"""What can go wrong with an emulated kernel.

EmulatorError
├── ToolchainError        no C++ compiler, or one that is too old
├── CompileError          the file does not compile as C++
├── LaunchError           wrong arguments, sizes or shared memory: found before the launch
└── KernelError           found while the kernel ran; says where
    ├── OutOfBoundsError, ReadOnlyError, MisalignedError
    ├── DataRaceError, UninitializedReadError, AsyncCopyError
    ├── DivergentBarrierError, WarpMaskError, DeadlockError, EndlessLoopError
    ├── StackOverflowError, UndefinedBehaviourError, DeviceAssertError
    ├── SharedMemoryError
    └── KernelCrashError
"""

from __future__ import annotations

from cupaged.errors import CupagedError

__all__ = [
    "AsyncCopyError",
    "CompileError",
    "DataRaceError",
    "DeadlockError",
    "DeviceAssertError",
    "DivergentBarrierError",
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

Index3 = tuple[int, int, int]


class EmulatorError(CupagedError):
    """Root of the emulator's errors."""


class ToolchainError(EmulatorError):
    """There is no usable C++ compiler."""


class CompileError(EmulatorError):
    """A kernel file does not compile. `file` and `line` name the first error, if known."""

    def __init__(self, message: str, file: str | None = None, line: int | None = None) -> None:
        super().__init__(message)
        self.file = file
        self.line = line


class LaunchError(EmulatorError, ValueError):
    """A launch that a GPU would refuse, or would run with wrong arguments."""


class KernelError(EmulatorError):
    """A fault of a kernel, found while it ran.

    kernel, file, line: where; file and line are None when the compiler kept no place.
    block, thread: indices (x, y, z) of the thread that was stopped.
    argument, element: name of the array and index in it, flat, where one is involved; for
        shared memory the name of the variable.
    """

    def __init__(
        self,
        message: str,
        *,
        kernel: str,
        file: str | None,
        line: int | None,
        block: Index3,
        thread: Index3,
        argument: str | None = None,
        element: int | None = None,
    ) -> None:
        super().__init__(message)
        self.kernel = kernel
        self.file = file
        self.line = line
        self.block = block
        self.thread = thread
        self.argument = argument
        self.element = element


class OutOfBoundsError(KernelError):
    """An access outside of every argument, or outside of a shared or local array."""


class ReadOnlyError(KernelError):
    """A write to an array that was passed as const, or that NumPy holds as read-only."""


class DataRaceError(KernelError):
    """Two threads touch one place, one of them writes, and no barrier lies between."""


class UninitializedReadError(KernelError):
    """A read of shared memory that no thread of the block has written."""


class MisalignedError(KernelError):
    """A vector access at an address that is no multiple of its size."""


class DivergentBarrierError(KernelError):
    """Threads of one block wait at different barriers."""


class WarpMaskError(KernelError):
    """A lane outside of its own mask, a lane that has ended, a width that is not allowed."""


class DeadlockError(KernelError):
    """No thread of the block can go on."""


class EndlessLoopError(KernelError):
    """The block ran more basic blocks than `max_steps`."""


class StackOverflowError(KernelError):
    """A thread used more stack than there is."""


class AsyncCopyError(KernelError):
    """A read of what cp.async may not have written yet, or a copy it cannot make."""


class UndefinedBehaviourError(KernelError):
    """A shift by the width or more, or an integer division by zero."""


class DeviceAssertError(KernelError):
    """An assert of the kernel failed."""


class SharedMemoryError(KernelError):
    """More shared memory than a block may have."""


class KernelCrashError(KernelError):
    """The processor stopped the kernel: what plain mode sees of a wild access."""
