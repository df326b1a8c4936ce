"""`EmulatedModule`: a `.cu` file that runs on this machine's processor, with CuPy's calling form.

Owns loading and launching. One launch runs at a time in a process: a module's state is its
library's.
"""

from __future__ import annotations

import ctypes
import operator
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from cupaged.emulator.arguments import PackedArguments, Parameter
from cupaged.emulator.build import BuildOptions, build
from cupaged.emulator.errors import EmulatorError, LaunchError
from cupaged.emulator.findings import raise_finding
from cupaged.emulator.launch_abi import Finding, KernelInfo, LaunchSpec, StackRegion
from cupaged.emulator.relocation import Relocation

Mode = Literal["checked", "plain"]

MAX_THREADS_PER_BLOCK = 1024
MAX_SHARED_BYTES = 227 * 1024  # of a block on sm_90
DEFAULT_DYNAMIC_SHARED_BYTES = 48 * 1024
_GRID_LIMITS = (2**31 - 1, 65535, 65535)
_BLOCK_LIMITS = (1024, 1024, 64)
_INTERRUPTED = -1  # of emulator_launch


class _Process:
    """What launches of all modules share: their order, and the stacks of threads."""

    def __init__(self) -> None:
        self.launching = threading.Lock()
        self.stacks = StackRegion()
        if hasattr(os, "register_at_fork"):  # another thread of the parent may hold the lock
            os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self.launching = threading.Lock()


_process = _Process()


class EmulatedModule:
    """A kernel file, compiled for the host.

    Args:
        path: the `.cu` file.
        defines: macros; True or None defines the name alone, False not at all.
        include_dirs: where quoted and other includes are looked up after the file's own folder.
        name_expressions: kernel templates to instantiate, as for `cupy.RawModule`.
        mode: "checked" stops at the first fault; "plain" is faster and checks barriers only.
        opt_level: 0 to 3, of the compiler.
        seed: run threads and blocks in an order drawn from it; None: in ascending order.
        global_races: look for races between blocks on global memory too (checked mode).
        max_steps: basic blocks that one block of threads may run before its loop counts as endless
            (checked mode).
        isolated: in plain mode, run each launch in a child process, which a wild kernel cannot
            leave. Arrays are copied there and back.
        separated: in checked mode, run each launch on copies of its arrays that lie far apart, so
            that a wild index cannot reach another one. Not needed for arrays that do already.
        portable_switch: switch threads by ucontext, as on processors other than x86-64.

    Raises:
        CompileError: the file cannot be read or does not compile.
        ToolchainError: no usable C++ compiler.
        NotSupportedError: the file uses a part of CUDA that is not emulated.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        defines: Mapping[str, object] | None = None,
        *,
        include_dirs: Sequence[str | os.PathLike[str]] = (),
        name_expressions: Sequence[str] = (),
        mode: Mode = "checked",
        opt_level: int = 1,
        seed: int | None = None,
        global_races: bool = False,
        max_steps: int = 1_000_000_000,
        isolated: bool = True,
        separated: bool = True,
        portable_switch: bool = False,
    ) -> None:
        if mode not in ("checked", "plain"):
            raise EmulatorError(f"mode must be 'checked' or 'plain', got {mode!r}")
        if isinstance(opt_level, bool) or opt_level not in (0, 1, 2, 3):
            raise EmulatorError(f"opt_level must be 0, 1, 2 or 3, got {opt_level!r}")
        if max_steps < 1:
            raise EmulatorError(f"max_steps must be at least 1, got {max_steps!r}")
        if defines is not None and not isinstance(defines, Mapping):
            raise EmulatorError(f"defines must map names to values, got {defines!r}")
        self.path = Path(path).absolute()
        self.mode = mode
        try:
            self.seed = None if seed is None else operator.index(seed)
        except TypeError:
            raise EmulatorError(f"seed must be a whole number or None, got {seed!r}") from None
        self.global_races = global_races
        self.max_steps = max_steps
        self.isolated = isolated and mode == "plain"
        self.relocated = self.isolated or (separated and mode == "checked")
        options = BuildOptions(
            dict(defines or {}),
            tuple(Path(folder).absolute() for folder in include_dirs),
            tuple(name_expressions),
            mode == "checked",
            opt_level,
            portable_switch,
        )
        self.library = build(self.path, options)
        try:
            self._loaded = ctypes.CDLL(str(self.library))
        except OSError as error:
            raise EmulatorError(f"{self.library} cannot be loaded: {error}") from error
        self._loaded.emulator_first_kernel.restype = ctypes.POINTER(KernelInfo)
        self._functions: dict[str, EmulatedFunction] = {}
        info = self._loaded.emulator_first_kernel()
        while info:
            function = EmulatedFunction(self, info)
            self._functions[function.name] = function
            info = info.contents.next

    @property
    def kernels(self) -> tuple[EmulatedFunction, ...]:
        """Every kernel of the file, by name."""
        return tuple(self._functions[name] for name in sorted(self._functions))

    def get_function(self, name: str) -> EmulatedFunction:
        """A kernel by its name, or by its name expression.

        Raises:
            LaunchError: there is no such kernel, or a GPU would not find it by this name.
        """
        function = self._functions.get(name)
        if function is None:
            known = ", ".join(sorted(self._functions)) or "none"
            raise LaunchError(f"{self.path.name} has no kernel {name!r}; it has: {known}")
        if not function.c_linkage:
            raise LaunchError(
                f"kernel {name!r} of {self.path.name} has a mangled name on a GPU: declare it "
                'extern "C", or list it in name_expressions'
            )
        return function

    def _launch(self, spec: LaunchSpec, finding: Finding) -> None:
        checked = int(self.mode == "checked")
        error = self._loaded.emulator_launch(ctypes.byref(spec), ctypes.byref(finding), checked)
        if error == _INTERRUPTED and threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        if error == _INTERRUPTED:
            raise EmulatorError("the launch was interrupted; its outputs are not complete")
        if error:
            raise EmulatorError(f"a child process cannot be started: {os.strerror(error)}")


class EmulatedFunction:
    """One kernel, called as `cupy.RawKernel` is: `kernel(grid, block, args, shared_mem=0)`.

    max_dynamic_shared_size_bytes: as of `cupy.RawKernel`; above 48 KiB it must be set first.
    """

    def __init__(self, module: EmulatedModule, info: Any) -> None:
        self._module = module
        self._info = info
        kernel = info.contents
        self.name: str = kernel.name.decode()
        self.c_linkage: bool = kernel.c_linkage
        self.max_threads_per_block: int = kernel.max_threads or MAX_THREADS_PER_BLOCK
        self.max_dynamic_shared_size_bytes = DEFAULT_DYNAMIC_SHARED_BYTES
        names = kernel.parameter_names.decode().split(",")
        names += [f"argument {i}" for i in range(len(names), kernel.num_parameters)]  # of a pack
        self.parameters = tuple(
            Parameter.of(names[i], kernel.parameters[i]) for i in range(kernel.num_parameters)
        )

    def __call__(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[Any],
        *,
        shared_mem: int = 0,
    ) -> None:
        """Run every thread of the grid.

        Args:
            grid, block: one to three sizes each, x first.
            args: NumPy arrays for pointers, NumPy scalars for values.
            shared_mem: bytes of dynamic shared memory.

        Raises:
            LaunchError: the launch or an argument is not what the kernel takes.
            KernelError: the kernel did something wrong; the subclass says what.
        """
        grid_sizes = _sizes(self.name, "grid", grid, _GRID_LIMITS)
        block_sizes = _sizes(self.name, "block", block, _BLOCK_LIMITS)
        num_threads = block_sizes[0] * block_sizes[1] * block_sizes[2]
        if num_threads > self.max_threads_per_block:
            bound = "__launch_bounds__" if self.max_threads_per_block < 1024 else "the hardware"
            raise LaunchError(
                f"{self.name}: a block of {num_threads} threads is larger than "
                f"{self.max_threads_per_block}, which {bound} allows"
            )
        self._check_shared(shared_mem)
        module = self._module
        finding = Finding()
        with _process.launching:  # what is copied must not change before it comes back
            copies = None
            if module.relocated:
                copies = Relocation(self.parameters, args, shared=module.isolated)
            packed = PackedArguments(
                self.name, self.parameters, args, None if copies is None else copies.addresses
            )
            spec = LaunchSpec(
                self._info, ctypes.pointer(_process.stacks), packed.pointers, packed.ranges,
                packed.num_ranges, grid_sizes, block_sizes, shared_mem, MAX_SHARED_BYTES,
                int(module.seed is not None), int(module.global_races), int(module.isolated),
                (module.seed or 0) & 0xFFFFFFFFFFFFFFFF, module.max_steps,
            )  # fmt: skip
            module._launch(spec, finding)
            if copies is not None:
                copies.give_back()
        if finding.kind:
            raise_finding(finding, self.name, module.library, packed.arrays)

    def _check_shared(self, shared_mem: int) -> None:
        if not isinstance(shared_mem, (int, np.integer)) or shared_mem < 0:
            raise LaunchError(
                f"{self.name}: shared_mem must be a number of bytes, got {shared_mem!r}"
            )
        if self.max_dynamic_shared_size_bytes > MAX_SHARED_BYTES:
            raise LaunchError(
                f"{self.name}: max_dynamic_shared_size_bytes must be at most {MAX_SHARED_BYTES}, "
                f"got {self.max_dynamic_shared_size_bytes}"
            )
        if shared_mem > self.max_dynamic_shared_size_bytes:
            raise LaunchError(
                f"{self.name}: {shared_mem} bytes of dynamic shared memory are more than "
                f"max_dynamic_shared_size_bytes, which is {self.max_dynamic_shared_size_bytes} "
                f"and can be raised to {MAX_SHARED_BYTES}"
            )


def _sizes(
    kernel: str, what: str, sizes: Sequence[int], limits: tuple[int, int, int]
) -> tuple[int, int, int]:
    if not isinstance(sizes, (tuple, list)) or not 1 <= len(sizes) <= 3:
        raise LaunchError(f"{kernel}: {what} must be a tuple of one to three sizes, got {sizes!r}")
    given = [*sizes, 1, 1][:3]
    for axis, size, limit in zip("xyz", given, limits, strict=True):
        if not isinstance(size, (int, np.integer)) or not 1 <= size <= limit:
            raise LaunchError(
                f"{kernel}: {what}.{axis} must be a whole number from 1 to {limit}, got {size!r}"
            )
    return int(given[0]), int(given[1]), int(given[2])
