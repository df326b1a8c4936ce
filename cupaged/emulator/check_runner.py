"""Runs check blocks on the emulator and collects what came of it.

Owns compiling a block's file with its defines, giving its code the kernels and the arrays, and
turning whatever goes wrong into a message with the line of the `.cu` file. It prints nothing.
"""

from __future__ import annotations

import ast
import linecache
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cupaged.emulator.check_block import CheckBlock
from cupaged.emulator.check_values import CheckValues, ExpectationError, block_dtype
from cupaged.emulator.errors import (
    CompileError,
    EmulatorError,
    KernelError,
    LaunchError,
    ToolchainError,
)
from cupaged.emulator.module import EmulatedModule, Mode
from cupaged.errors import CupagedError, NotSupportedError

__all__ = ["BlockRunner", "Failure", "Outcome", "RunOptions"]


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How blocks are run; as of `EmulatedModule`.

    defines: replace those of the block. include_dirs: searched after those of the block.
    """

    defines: Mapping[str, str] = field(default_factory=dict)
    include_dirs: tuple[Path, ...] = ()
    mode: Mode = "checked"
    opt_level: int = 1
    global_races: bool = False
    isolated: bool = True


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a block failed.

    message: all there is to say, in several lines, with file and line in front. line: of the
    block's own code; that of its opening if the kernels do not compile. error: what was raised.
    """

    message: str
    line: int
    error: BaseException


@dataclass(slots=True)
class Outcome:
    """One run of one block.

    seed: of the order of threads; None for ascending. launches, seconds: how often each kernel ran,
    and how long. failure: None if all was as the block says.
    """

    block: CheckBlock
    seed: int | None
    launches: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    num_comparisons: int = 0
    failure: Failure | None = None


class BlockRunner:
    """Runs blocks; those with equal options share a compiled module."""

    def __init__(self, options: RunOptions) -> None:
        self.options = options
        self._modules: dict[tuple[object, ...], EmulatedModule] = {}

    def defines(self, block: CheckBlock) -> dict[str, str]:
        """What the block is compiled with."""
        return {**block.defines, **self.options.defines}

    def module(self, block: CheckBlock) -> EmulatedModule:
        """The block's file, compiled.

        Raises:
            CompileError, NotSupportedError: the file does not compile.
            ToolchainError: no usable compiler.
        """
        defines, options = self.defines(block), self.options
        folders = (*block.include_dirs, *options.include_dirs)
        key = (block.path, *sorted(defines.items()), folders, block.name_expressions)
        if key not in self._modules:
            self._modules[key] = EmulatedModule(
                block.path, defines, include_dirs=folders,
                name_expressions=block.name_expressions, mode=options.mode,
                opt_level=options.opt_level, global_races=options.global_races,
                isolated=options.isolated,
            )  # fmt: skip
        return self._modules[key]

    def run(self, block: CheckBlock, seed: int | None = None) -> Outcome:
        """Run a block once.

        Args:
            seed: draws the order of threads and blocks, and the random values; None: ascending, and
                the values of seed 0.

        Raises:
            ToolchainError: no usable compiler. Whatever else goes wrong is in the outcome.
        """
        outcome = Outcome(block, seed)
        try:
            module = self.module(block)
            module.seed = seed
            values = CheckValues(
                seed or 0, block.number, block_dtype(self.defines(block)), block.mentions("bf16")
            )
            self._execute(block, module, values, outcome)
        except ToolchainError:
            raise
        except CupagedError as error:
            outcome.failure = Failure(str(error), block.line, error)
        return outcome

    @staticmethod
    def _execute(
        block: CheckBlock, module: EmulatedModule, values: CheckValues, outcome: Outcome
    ) -> None:
        names = {"__name__": "check", **values.names()}
        names |= {kernel.name: _Launcher(module, kernel.name, outcome) for kernel in module.kernels}
        names["kernel"] = lambda name: _Launcher(module, name, outcome)
        try:
            # The empty lines make Python count as the file does.
            tree = ast.parse("\n" * block.line + block.code, str(block.path))
            exec(compile(tree, str(block.path), "exec"), names)
        except ToolchainError:
            raise
        except (Exception, SystemExit) as error:
            outcome.failure = _failure(block, error)
        else:
            if not outcome.launches:
                problem = f"{block.path.name}:{block.line}: this check block launches no kernel"
                outcome.failure = Failure(problem, block.line, EmulatorError(problem))
        outcome.num_comparisons = values.num_comparisons


class _Launcher:
    """A kernel in a block: launches it, counts and takes the time."""

    def __init__(self, module: EmulatedModule, name: str, outcome: Outcome) -> None:
        self._module, self._name, self._outcome = module, name, outcome
        self.max_dynamic_shared_size_bytes: int | None = None

    def __call__(
        self, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], *, shared_mem: int = 0
    ) -> None:
        function = self._module.get_function(self._name)
        if self.max_dynamic_shared_size_bytes is not None:
            function.max_dynamic_shared_size_bytes = self.max_dynamic_shared_size_bytes
        launches, seconds = self._outcome.launches, self._outcome.seconds
        launches[self._name] = launches.get(self._name, 0) + 1
        start = time.perf_counter()
        try:
            function(grid, block, args, shared_mem=shared_mem)
        finally:
            took = time.perf_counter() - start
            seconds[self._name] = seconds.get(self._name, 0.0) + took


def _failure(block: CheckBlock, error: BaseException) -> Failure:
    """A failure with the line of the block that it came from."""
    path = str(block.path)
    linecache.checkcache(path)
    if isinstance(error, SyntaxError) and error.filename == path:
        line = error.lineno or block.line
        return Failure(_told(block, line, f"SyntaxError: {error.msg}"), line, error)
    frames = traceback.extract_tb(error.__traceback__)
    line = next((f.lineno for f in reversed(frames) if f.filename == path and f.lineno), block.line)
    if isinstance(error, KernelError):
        launched = f"launched at {block.path.name}:{line}"
        return Failure(f"{error}\n  {launched}\n{_source(block, line)}", line, error)
    if isinstance(error, ExpectationError):
        return Failure(_told(block, line, f"{_compared(block, line)}{error}"), line, error)
    if isinstance(error, (LaunchError, CompileError, NotSupportedError)):
        return Failure(_told(block, line, str(error)), line, error)
    return Failure(_told(block, line, f"{type(error).__name__}: {error}"), line, error)


def _told(block: CheckBlock, line: int, problem: str) -> str:
    return f"{block.path.name}:{line}: {problem}\n{_source(block, line)}"


def _source(block: CheckBlock, line: int) -> str:
    return f"    {line:4} | {linecache.getline(str(block.path), line).rstrip()}"


def _compared(block: CheckBlock, line: int) -> str:
    """The first argument of the `expect` at a line, as it is written."""
    for node in ast.walk(ast.parse("\n" * block.line + block.code)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "expect"
            and node.lineno <= line <= (node.end_lineno or node.lineno)
            and node.args
        ):
            return ast.unparse(node.args[0])
    return "the array"
