"""What the tests of the emulator share: the small programs, their compiled modules, their markers.

The programs lie in `programs/buggy` (each kernel holds one planted bug) and `programs/correct` (no
kernel may be flagged). `// BUG(kernel)` in a source marks a line which the error of that kernel may
name. This file knows neither which errors are due nor which results: the test files do.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupaged.emulator.errors import EmulatorError
from cupaged.emulator.module import EmulatedModule

PROGRAMS = Path(__file__).parent / "programs"
CUDA_FOLDER = Path(__file__).parents[2] / "cuda"
LEVELS = (0, 2)

_MARKER = re.compile(r"// BUG\((\w+)\)")


@dataclass(frozen=True, slots=True)
class Planted:
    """One planted bug: how to launch it, and what the emulator must say.

    `args` makes fresh arguments for a launch. `message` is a fragment of the error's text;
    `argument`, `element`, `block`, `thread` are checked where given (they are left out where the
    order of the threads decides). `options` go to `EmulatedModule`.
    """

    file: str
    kernel: str
    error: type[EmulatorError]
    args: Callable[[], Sequence[Any]]
    grid: tuple[int, ...] = (1,)
    size: tuple[int, ...] = (32,)
    shared_mem: int = 0
    message: str = ""
    argument: str | None = None
    element: int | None = None
    block: tuple[int, int, int] | None = None
    thread: tuple[int, int, int] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


def bug_lines(file: str) -> dict[str, set[int]]:
    """Line numbers marked `// BUG(kernel)` in a buggy program, by kernel."""
    lines: dict[str, set[int]] = {}
    for number, text in enumerate((PROGRAMS / "buggy" / file).read_text().splitlines(), 1):
        for kernel in _MARKER.findall(text):
            lines.setdefault(kernel, set()).add(number)
    return lines


@functools.cache
def _module(path: Path, opt_level: int, options: tuple[tuple[str, Any], ...]) -> EmulatedModule:
    return EmulatedModule(path, opt_level=opt_level, include_dirs=[CUDA_FOLDER], **dict(options))


def compiled(file: str, opt_level: int, **options: Any) -> EmulatedModule:
    """The module of `programs/<file>` in checked mode; compiled once a process and level."""
    return _module(PROGRAMS / file, opt_level, tuple(sorted(options.items())))


def f32(*shape: int, start: float = 1.0) -> NDArray[np.float32]:
    """float32 values start, start + 1, ... of a shape."""
    count = int(np.prod(shape))
    return np.arange(start, start + count, dtype=np.float32).reshape(shape)


def i32(*values: int) -> NDArray[np.int32]:
    """An int32 array of these values."""
    return np.array(values, dtype=np.int32)
