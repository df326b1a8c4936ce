"""Check blocks: Python in a comment of a `.cu` file that runs its kernels and states the result.

    /* check -DDTYPE=f32
    x = normal(1000)
    out = empty(1000)
    scale((4,), (256,), (out, x, np.int32(1000)))
    expect(out, 2 * x)
    */

What doctests are for a function, these are for a kernel. Owns finding the blocks of a file and
running them on the emulator. It prints nothing. The code of a block runs with the rights of whoever
runs it, as a test does.
"""

from __future__ import annotations

import ast
import linecache
import re
import shlex
import textwrap
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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

__all__ = [
    "BlockRunner",
    "CheckBlock",
    "CheckBlockError",
    "Failure",
    "Outcome",
    "RunOptions",
    "parse_blocks",
    "suggested_block",
]

# A line that holds nothing else opens a block; prose that starts with "check" does not.
_BLOCK = re.compile(
    r"^[ \t]*/\*[ \t]*check(?P<options>(?:[ \t]+-[^\n]*)?)[ \t]*\n(?P<code>.*?)\*/",
    re.MULTILINE | re.DOTALL,
)


class CheckBlockError(EmulatorError):
    """A check block whose first line cannot be read. file, line: where."""

    def __init__(self, path: Path, line: int, problem: str) -> None:
        super().__init__(f"{path.name}:{line}: {problem}")
        self.file = str(path)
        self.line = line


@dataclass(frozen=True, slots=True)
class CheckBlock:
    """One block of a file.

    number: 1 for the first. line: of its opening. defines, include_dirs, name_expressions: of its
    first line; folders are absolute. code: the Python, at column 0; its first line is line + 1.
    """

    path: Path
    number: int
    line: int
    defines: Mapping[str, str]
    include_dirs: tuple[Path, ...]
    name_expressions: tuple[str, ...]
    code: str

    def mentions(self, kernel: str) -> bool:
        """Whether a word of the code is this one."""
        return re.search(rf"\b{re.escape(kernel)}\b", self.code) is not None


def parse_blocks(path: Path) -> list[CheckBlock]:
    """The check blocks of a file, in its order.

    Raises:
        CheckBlockError: a first line with an unknown option.
        OSError, UnicodeDecodeError: the file cannot be read.
    """
    text = path.read_text(encoding="utf-8")
    blocks = []
    for number, match in enumerate(_BLOCK.finditer(text), start=1):
        line = text.count("\n", 0, match.start("options")) + 1
        defines, folders, names = _options(path, line, match["options"])
        code = textwrap.dedent(match["code"])
        blocks.append(CheckBlock(path, number, line, defines, folders, names, code))
    return blocks


def _options(
    path: Path, line: int, text: str
) -> tuple[dict[str, str], tuple[Path, ...], tuple[str, ...]]:
    """Defines, folders of headers and name expressions of a block's first line."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise CheckBlockError(path, line, f"{text.strip()}: {error}") from None
    defines: dict[str, str] = {}
    folders, names = [], []
    position = 0
    while position < len(words):
        word = words[position]
        option, value = (word, "") if word.startswith("--") else (word[:2], word[2:])
        if option not in ("-D", "-I", "--name"):
            problem = f"{word!r} is no option of a check block: it takes -D, -I and --name"
            raise CheckBlockError(path, line, problem)
        if not value:
            position += 1
            if position == len(words):
                raise CheckBlockError(path, line, f"{word} needs a value")
            value = words[position]
        position += 1
        if option == "-D":
            name, _, content = value.partition("=")
            defines[name] = content if "=" in value else "1"
        elif option == "-I":
            folders.append((path.parent / value).absolute())
        else:
            names.append(value)
    return defines, tuple(folders), tuple(names)


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

    message: all there is to say, in several lines, with file and line in front. line: of the block's
    own code; that of its opening if the kernels do not compile. error: what was raised.
    """

    message: str
    line: int
    error: BaseException


@dataclass(slots=True)
class Outcome:
    """One run of one block.

    seed: of the order of threads; None for ascending. launches: how often each kernel ran.
    seconds: the time in kernels. failure: None if all was as the block says.
    """

    block: CheckBlock
    seed: int | None
    launches: dict[str, int] = field(default_factory=dict)
    num_comparisons: int = 0
    seconds: float = 0.0
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
        launches = self._outcome.launches
        launches[self._name] = launches.get(self._name, 0) + 1
        start = time.perf_counter()
        try:
            function(grid, block, args, shared_mem=shared_mem)
        finally:
            self._outcome.seconds += time.perf_counter() - start


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


def suggested_block(module: EmulatedModule, defines: Mapping[str, str]) -> str:
    """A check block for the first kernel of a module: it runs, and fails until it says what is right.

    Sizes are guesses.
    """
    kernel = module.kernels[0]
    threads = min(256, kernel.max_threads_per_block)
    flags = "".join(f" -D{name}={value}" for name, value in defines.items())
    lines, arguments, output = [f"/* check{flags}"], [], ""
    for parameter in kernel.parameters:
        dtype = _python_dtype(parameter.type_name)
        if not parameter.is_pointer:
            arguments.append(f"np.{dtype}({1000 if 'int' in dtype else 1.0})")
            continue
        arguments.append(parameter.name)
        named = {"float32": "", "float16": ", dtype=f16", "bfloat16": ", dtype=bf16"}.get(dtype)
        if not parameter.is_const:
            output = output or parameter.name
            shape = "1000" + (f", dtype=np.{dtype}" if named is None else named)
            lines.append(f"{parameter.name} = empty({shape})")
        elif named is None and "int" in dtype:
            lines.append(f"{parameter.name} = integers(0, 1000, 1000, dtype=np.{dtype})")
        else:
            shape = "1000" + (f", dtype=np.{dtype}" if named is None else named)
            lines.append(f"{parameter.name} = normal({shape})")
    call = f"(({-(-1000 // threads)},), ({threads},), ({', '.join(arguments)},))"
    lines.append(f"{kernel.name}{call}")
    if output:
        lines.append(f"expect({output}, 0.0)  # in place of 0.0: what NumPy says it should be")
    return "\n".join([*lines, "*/"])


def _python_dtype(type_name: str) -> str:
    """NumPy's name of a kernel's scalar; bytes stand for what has none."""
    return {"bool": "bool_", "bytes": "uint8"}.get(type_name, type_name)
