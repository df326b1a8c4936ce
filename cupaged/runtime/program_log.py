"""What NVRTC and the assembler behind it say, read into numbers.

Owns the two texts: the resources of each kernel, which `--ptxas-options=-v` has printed, and the
place of the first error. It compiles nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

__all__ = ["KernelResources", "first_error", "parse_resources"]

_ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+)(?:\+\d+)? bytes smem")
_CONSTANT = re.compile(r"(\d+) bytes cmem\[(\d+)\]")
_BARRIERS = re.compile(r"used (\d+) barriers")
_ERROR = re.compile(r"^(?P<file>[^\n]+?)\((?P<line>\d+)\): (?:catastrophic )?error", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class KernelResources:
    """What one kernel takes of a multiprocessor.

    registers: of a thread. shared_bytes: static shared memory of a block. stack_bytes: local memory
    of a thread. spill_store_bytes, spill_load_bytes: code that moves registers to local memory and
    back, for want of registers. constant_bytes: all banks, where the assembler tells. barriers:
    named barriers of a block.
    """

    registers: int
    shared_bytes: int = 0
    stack_bytes: int = 0
    spill_store_bytes: int = 0
    spill_load_bytes: int = 0
    constant_bytes: int = 0
    barriers: int = 0

    @classmethod
    def from_json(cls, values: object) -> KernelResources:
        """Read what `dataclasses.asdict` wrote.

        Raises:
            ValueError: it is something else.
        """
        names = {field.name for field in fields(cls)}
        if not isinstance(values, dict) or set(values) != names:
            raise ValueError(f"not the resources of a kernel: {values!r}")
        if not all(type(value) is int for value in values.values()):
            raise ValueError(f"not the resources of a kernel: {values!r}")
        return cls(**values)


def parse_resources(log: str) -> dict[str, KernelResources]:
    """By kernel. Functions that were not inlined count for the kernel they were compiled with."""
    found: dict[str, KernelResources] = {}
    parts = _ENTRY.split(log)  # before, then (name, architecture, its text) a kernel
    for name, text in zip(parts[1::3], parts[3::3], strict=True):
        used = _USED.search(text)
        if used is None:
            continue
        stacks = [tuple(int(number) for number in match) for match in _STACK.findall(text)]
        shared, barriers = _SHARED.search(text), _BARRIERS.search(text)
        found[name] = KernelResources(
            registers=int(used[1]),
            shared_bytes=int(shared[1]) if shared else 0,
            stack_bytes=max((frame for frame, _, _ in stacks), default=0),
            spill_store_bytes=sum(stores for _, stores, _ in stacks),
            spill_load_bytes=sum(loads for _, _, loads in stacks),
            constant_bytes=sum(int(size) for size, _ in _CONSTANT.findall(text)),
            barriers=int(barriers[1]) if barriers else 0,
        )
    return found


def first_error(log: str) -> tuple[str, int] | None:
    """File, as the compiler names it, and line of the first error; None if none has a place."""
    match = _ERROR.search(log)
    return None if match is None else (match["file"], int(match["line"]))
