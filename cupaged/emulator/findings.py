"""From what the native runtime found to a Python exception that shows the line.

Addresses in the compiled module become file and line through `addr2line`, and names of variables
through `nm`, which come with every compiler; they run only when there is something to report.
"""

from __future__ import annotations

import linecache
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cupaged.emulator import errors
from cupaged.emulator.launch_abi import Finding, Kind, ThreadPlace
from cupaged.emulator.toolchain import INCLUDE_DIR
from cupaged.errors import NotSupportedError

KINDS: dict[Kind, tuple[type[errors.KernelError], str]] = {
    Kind.OUT_OF_BOUNDS: (errors.OutOfBoundsError, "out of bounds"),
    Kind.READ_ONLY: (errors.ReadOnlyError, "write to a read-only array"),
    Kind.RACE: (errors.DataRaceError, "data race"),
    Kind.UNINITIALIZED: (errors.UninitializedReadError, "uninitialised shared memory"),
    Kind.MISALIGNED: (errors.MisalignedError, "misaligned access"),
    Kind.DIVERGENT_BARRIER: (errors.DivergentBarrierError, "divergent barrier"),
    Kind.WARP_MASK: (errors.WarpMaskError, "wrong warp operation"),
    Kind.DEADLOCK: (errors.DeadlockError, "deadlock"),
    Kind.ENDLESS_LOOP: (errors.EndlessLoopError, "endless loop"),
    Kind.STACK_OVERFLOW: (errors.StackOverflowError, "stack overflow"),
    Kind.ASYNC_COPY: (errors.AsyncCopyError, "asynchronous copy"),
    Kind.UNDEFINED: (errors.UndefinedBehaviourError, "undefined behaviour"),
    Kind.DEVICE_ASSERT: (errors.DeviceAssertError, "assertion failed"),
    Kind.CRASH: (errors.KernelCrashError, "crash"),
    Kind.SHARED_MEMORY: (errors.SharedMemoryError, "too much shared memory"),
}

_MODULE_VARIABLE = -2  # in place of an argument's index: `byte_offset` is an address in the module
_VARIABLE = re.compile(r"(?P<begin>[0-9a-f]+) (?P<bytes>[0-9a-f]+) [bdrsuv] (?P<name>.+)", re.I)


@dataclass(frozen=True, slots=True)
class ArrayArgument:
    """name: the parameter. dtype, shape: of the array passed for it."""

    name: str
    dtype: Any
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements."""
        size = 1
        for length in self.shape:
            size *= length
        return size


def raise_finding(
    finding: Finding, kernel: str, library: Path, arguments: dict[int, ArrayArgument]
) -> None:
    """Raise what was found.

    Args:
        kernel: the name of the kernel that ran.
        library: the compiled module.
        arguments: the arrays, by index of the parameter.
    """
    if finding.kind == Kind.UNSUPPORTED:
        raise NotSupportedError(f"{kernel}: {finding.message.decode(errors='replace')}")
    kind, title = KINDS[Kind(finding.kind)]
    here = [finding.here_code] if finding.here_code else finding.pcs[: finding.num_pcs]
    places = _symbolize(library, [*here, finding.other_pc])
    file, line = _place(finding, places[:-1])
    argument = arguments.get(finding.argument)
    element: int | None = None
    name: str | None = None
    if argument is not None:
        name, element = argument.name, finding.byte_offset // argument.dtype.itemsize
    elif finding.object:
        name, element = finding.object.decode(), finding.byte_offset // finding.element_bytes
    elif finding.argument == _MODULE_VARIABLE:
        name = _name_variable(finding, library)
    lines = [f"{_short(file)}:{line}: {title}: {_what(finding, kernel, argument, name)}"]
    lines.append(f"  {_thread(finding.here)} of {kernel}")
    lines += _source(file, line)
    if finding.has_other:
        other_file, other_line = _user_place(places[-1])
        if finding.other_line:
            other_file, other_line = finding.other_file.decode(), finding.other_line
        verb = "wrote" if finding.other_is_write else "read"
        what = "asked for the copy" if "Async" in kind.__name__ else f"{verb} it"
        lines.append(f"  {_thread(finding.other)} {what} at {_short(other_file)}:{other_line}")
        if (other_file, other_line) != (file, line):
            lines += _source(other_file, other_line)
    raise kind(
        "\n".join(lines),
        kernel=kernel,
        file=file,
        line=line,
        block=_index(finding.here.block),
        thread=_index(finding.here.thread),
        argument=name,
        element=element,
    )


def _what(finding: Finding, kernel: str, argument: ArrayArgument | None, name: str | None) -> str:
    """The sentence after the title."""
    message: str = finding.message.decode(errors="replace")
    is_variable = finding.argument == _MODULE_VARIABLE
    if name is None and not is_variable:
        if finding.kind == Kind.OUT_OF_BOUNDS and finding.access_bytes:
            return f"{kernel} {'writes' if finding.is_write else 'reads'} {message}"
        return message
    itemsize = argument.dtype.itemsize if argument else max(finding.element_bytes, 1)
    kind_of = "" if argument else "the module's variable " if is_variable else "shared "
    what = f"{_elements(finding, itemsize)} of {kind_of}'{name}'"
    if name is None:
        what = f"a variable of the module at address 0x{finding.byte_offset:x}"
    if finding.kind == Kind.MISALIGNED:
        return f"{message}: {what}"
    text = f"{kernel} {'writes' if finding.is_write else 'reads'} {what}"
    if argument is not None:
        kind = f"{argument.dtype} {'x'.join(map(str, argument.shape)) or 'scalar'}"
        text = f"{text} ({kind})"
        message = f"elements 0 to {argument.size - 1}" if argument.size else "no elements"
    elif finding.kind == Kind.OUT_OF_BOUNDS:
        message = f"{message} {'bytes' if itemsize == 1 else 'elements'}"
    return {
        Kind.OUT_OF_BOUNDS: f"{text}, which has {message}",
        Kind.READ_ONLY: f"{text}, which is const or a read-only array",
        Kind.RACE: f"{text}, and nothing orders the two accesses",
        Kind.UNINITIALIZED: f"{text}, which no thread of the block has written yet: "
        "is a barrier missing?",
        Kind.ASYNC_COPY: f"{text}, to which a cp.async copies that its thread has not waited for",
    }[Kind(finding.kind)]


def _elements(finding: Finding, itemsize: int) -> str:
    """The elements that an access touches."""
    what = "byte" if itemsize == 1 else "element"
    first, rest = divmod(finding.byte_offset, itemsize)
    last = first + (rest + max(finding.access_bytes, 1) - 1) // itemsize
    return f"{what} {first}" if last <= first else f"{what}s {first} to {last}"


def _thread(place: ThreadPlace) -> str:
    thread = ",".join(map(str, place.thread))
    return f"block ({','.join(map(str, place.block))}), thread ({thread})"


def _index(values: Any) -> errors.Index3:
    return (int(values[0]), int(values[1]), int(values[2]))


def _short(file: str | None) -> str:
    return "?" if file is None else Path(file).name


def _source(file: str | None, line: int | None) -> list[str]:
    if file is None or not line:
        return []
    text = linecache.getline(file, line).rstrip()
    return [f"    {line:4} | {text}"] if text else []


def _place(
    finding: Finding, places: Sequence[list[tuple[str, int]]]
) -> tuple[str | None, int | None]:
    """The innermost line that is not the emulator's own."""
    file = finding.file.decode(errors="replace")
    if finding.line and file and not _is_own(file):
        return file, finding.line
    for frames in places:
        found = _user_place(frames)
        if found[0] is not None:
            return found
    return (file, finding.line) if file else (None, None)


def _user_place(frames: Sequence[tuple[str, int]]) -> tuple[str | None, int | None]:
    for file, line in frames:
        if not _is_own(file):
            return file, line
    return None, None


def _is_own(file: str) -> bool:
    own = str(INCLUDE_DIR.parent)
    return file.startswith((own, "?", "<", "/usr/include", "/usr/lib")) or not file


def _name_variable(finding: Finding, library: Path) -> str | None:
    """The variable at `byte_offset`, which then counts from its start; None if it is not known."""
    tool = shutil.which("nm")
    output = "" if tool is None else subprocess.run(
        [tool, "-C", "-S", str(library)], capture_output=True, text=True, check=False
    ).stdout  # fmt: skip
    for symbol in map(_VARIABLE.fullmatch, output.splitlines()):
        if symbol is None:
            continue
        begin, size = int(symbol["begin"], 16), int(symbol["bytes"], 16)
        if begin <= finding.byte_offset < begin + size:
            finding.byte_offset -= begin
            return symbol["name"]
    return None


def _symbolize(library: Path, addresses: Sequence[int]) -> list[list[tuple[str, int]]]:
    """For each address the lines it stands for, innermost first when calls were inlined."""
    tool = shutil.which("addr2line")
    if tool is None:
        return [[] for _ in addresses]
    wanted = [f"0x{address:x}" for address in addresses]
    output = subprocess.run(
        [tool, "-a", "-i", "-e", str(library), *wanted],
        capture_output=True, text=True, check=False,
    ).stdout  # fmt: skip
    places: list[list[tuple[str, int]]] = []
    for text in output.splitlines():
        if text.startswith("0x") and ":" not in text:
            places.append([])
            continue
        file, _, number = text.partition(" (discriminator")[0].rpartition(":")
        if places and number.isdigit():
            places[-1].append((file, int(number)))
    places += [[] for _ in range(len(addresses) - len(places))]
    return places
