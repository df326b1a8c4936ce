"""What can go wrong between a kernel's source and code that a GPU loads.

CupagedError
├── KernelNotFoundError        no such file among the kernels, or no such kernel in a file
├── KernelCompileError         the compiler refused a source
├── CompilerUnavailableError   NVRTC, or the headers that it needs, are not installed
└── ToolUnavailableError       a disassembler is not installed, or cannot read a file
"""

from __future__ import annotations

from pathlib import Path

from cupaged.errors import CupagedError

__all__ = [
    "CompilerUnavailableError",
    "KernelCompileError",
    "KernelNotFoundError",
    "ToolUnavailableError",
]


class KernelNotFoundError(CupagedError):
    """No such file among the kernels, or no such kernel in it."""


class KernelCompileError(CupagedError):
    """The compiler refused a source.

    Attributes:
        file, line: where its first error is; None and 0 where it names no place.
        log: all that the compiler said.
    """

    def __init__(self, message: str, file: Path | None, line: int, log: str) -> None:
        super().__init__(message)
        self.file = file
        self.line = line
        self.log = log


class CompilerUnavailableError(CupagedError):
    """NVRTC, or the headers that it needs, are not installed."""


class ToolUnavailableError(CupagedError):
    """A disassembler is not installed, or cannot read a file."""
