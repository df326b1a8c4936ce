"""`cupaged kernel resources`: what a kernel takes of each GPU, told by compiling for it.

Owns the table. The numbers come from NVRTC's assembler (registers, shared memory, spills), from
NVIDIA's rules of occupancy, and from the machine code where nvdisasm is installed.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from cupaged.cli.kernel_signatures import (
    find_kernel,
    parsed_defines,
    shown_defines,
    signatures,
    variants,
)
from cupaged.emulator.check_block import parse_blocks
from cupaged.errors import BadValueError, ConfigError
from cupaged.runtime.errors import ToolUnavailableError
from cupaged.runtime.kernels import ARCHITECTURES, CompiledKernels, compile_kernel, nvrtc_version
from cupaged.runtime.machine_code import disassembler, instruction_counts, occupancy

_DEFAULT_THREADS = 256
_KERNEL_COLUMNS = ("KERNEL", "GPU", "REGS", "SHARED", "SPILLS", "OCCUPANCY")
_CODE_COLUMNS = ("CODE", "LD128", "ST128", "MMA", "LDSM", "CP.ASYNC", "LDL+STL")


def run(args: argparse.Namespace) -> int:
    """Print the table."""
    path, kernel = find_kernel(args.name)
    archs = tuple(dict.fromkeys(args.arch or ARCHITECTURES))
    for arch in archs:
        if arch not in ARCHITECTURES:
            raise ConfigError("--arch", arch, f"one of {', '.join(ARCHITECTURES)}")
    given = parsed_defines(args.defines)
    if args.dtype is not None:
        given["DTYPE"] = args.dtype
    defines, folders = _chosen(path, given)
    version = ".".join(map(str, nvrtc_version()))
    compiled = [compile_kernel(path, defines, arch, include_dirs=folders) for arch in archs]
    try:
        disassembler()
        shows_code, missing = True, ""
    except ToolUnavailableError as error:
        shows_code, missing = False, str(error)
    threads = {k.name: args.threads or k.threads or _DEFAULT_THREADS for k in signatures(path)}
    names = [name for name in threads if name in compiled[0].resources and kernel in (None, name)]
    names += [name for name in compiled[0].resources if name not in threads]
    rows = [_KERNEL_COLUMNS + (_CODE_COLUMNS if shows_code else ())]
    for name in names:
        for one in compiled:
            rows.append(_row(one, name, threads.get(name, _DEFAULT_THREADS), shows_code))
    print(
        "  ".join(part for part in (path.name, shown_defines(defines), f"NVRTC {version}") if part)
    )
    print("\n".join(_aligned(rows)))
    print(_legend(shows_code))
    if missing:
        print(f"instructions of the machine code are left out: {missing}")
    return 0


def _chosen(path: Path, given: Mapping[str, str]) -> tuple[dict[str, str], tuple[Path, ...]]:
    """The defines to compile with, and folders of headers.

    What is not given comes from the first common variant that agrees with it, else from the first
    check block.
    """
    common = variants(path)
    agreeing = [v for v in common if all(v.get(n, value) == value for n, value in given.items())]
    if common:
        return {**(agreeing or common)[0], **given}, ()
    blocks = parse_blocks(path)
    if blocks:
        return {**blocks[0].defines, **given}, blocks[0].include_dirs
    return dict(given), ()


def _row(one: CompiledKernels, name: str, threads: int, shows_code: bool) -> tuple[str, ...]:
    """One kernel on one GPU."""
    used = one.resources[name]
    try:
        fits = occupancy(one.arch, used, threads)
        share = f"{fits.fraction:.0%} ({fits.blocks} x {threads}, {fits.limited_by})"
    except BadValueError as error:
        share = f"none: {error}"
    spills = used.spill_store_bytes + used.spill_load_bytes
    row = (name, one.arch, str(used.registers), f"{used.shared_bytes} B", f"{spills} B", share)
    if not shows_code:
        return row
    counts = instruction_counts(one.path)[name]
    return row + tuple(
        str(count)
        for count in (
            counts.total, counts.wide_loads, counts.wide_stores, counts.matrix, counts.ldmatrix,
            counts.async_copies, counts.spills,
        )
    )  # fmt: skip


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """Names to the left, numbers to the right; a name is shown once."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left = (0, 1, 5)
    lines = []
    before = ""
    for row in rows:
        shown = ("" if row[0] == before else row[0], *row[1:])
        before = row[0]
        cells = [
            f"{cell:{'<' if column in left else '>'}{width}}"
            for column, (cell, width) in enumerate(zip(shown, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def _legend(shows_code: bool) -> str:
    lines = [
        "REGS of a thread. SHARED of a block (static). OCCUPANCY: blocks x threads, limited by."
    ]
    if shows_code:
        lines.append(
            "CODE: instructions. LD128, ST128: 16 bytes of global memory. MMA: products of"
        )
        lines.append(
            "matrices. LDSM: ldmatrix. CP.ASYNC: copies to shared memory. LDL+STL: spills."
        )
    return "\n".join(lines)
