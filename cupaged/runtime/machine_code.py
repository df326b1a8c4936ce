"""What a compiled kernel will be able to do on a GPU, told without one.

Owns two readings: how many warps of a kernel fit on a multiprocessor, by NVIDIA's rules of
occupancy, and how often the instructions that matter occur in its machine code, as nvdisasm prints
it. It compiles nothing and needs no GPU. nvdisasm comes from a pip wheel that must not share an
environment with CuPy for CUDA 12: with it come headers of CUDA 13, which CuPy would take.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from cupaged.errors import BadValueError, NotSupportedError
from cupaged.runtime.errors import ToolUnavailableError
from cupaged.runtime.program_log import KernelResources

__all__ = [
    "LIMITS",
    "InstructionCounts",
    "MultiprocessorLimits",
    "Occupancy",
    "count_instructions",
    "disassemble",
    "disassembler",
    "instruction_counts",
    "occupancy",
]

_WARP = 32
_MAX_THREADS = 1024  # of a block
_REGISTERS = 65536  # of a multiprocessor
_MAX_REGISTERS = 255  # of a thread
_PARTITIONS = 4  # warps and registers of a multiprocessor are spread over four
_REGISTER_UNIT = 256  # a warp's registers are given out in such pieces
_SHARED_UNIT = 128  # and a block's shared memory in these
_RESERVED_SHARED = 1024  # of each block, for the system


@dataclass(frozen=True, slots=True)
class MultiprocessorLimits:
    """What a multiprocessor holds at most.

    block_shared_bytes: shared memory that one block may ask for.
    """

    warps: int
    blocks: int
    shared_bytes: int
    block_shared_bytes: int


# From the table of compute capabilities in the CUDA Programming Guide 13, and equal to what libcu++
# states in cuda/__device/arch_traits.h, the 24 blocks of sm_120 and the constants above included;
# some of NVIDIA's guides say 32.
LIMITS = {
    "sm_80": MultiprocessorLimits(64, 32, 164 << 10, 163 << 10),
    "sm_86": MultiprocessorLimits(48, 16, 100 << 10, 99 << 10),
    "sm_89": MultiprocessorLimits(48, 24, 100 << 10, 99 << 10),
    "sm_90": MultiprocessorLimits(64, 32, 228 << 10, 227 << 10),
    "sm_100": MultiprocessorLimits(64, 32, 228 << 10, 227 << 10),
    "sm_120": MultiprocessorLimits(48, 24, 100 << 10, 99 << 10),
}


@dataclass(frozen=True, slots=True)
class Occupancy:
    """What of a kernel fits on one multiprocessor at a time.

    fraction: of the warps that it can hold. limited_by: what runs out first, among "warps",
    "blocks", "registers" and "shared memory".
    """

    blocks: int
    warps: int
    fraction: float
    limited_by: str


def occupancy(
    arch: str, resources: KernelResources, threads: int, dynamic_shared_bytes: int = 0
) -> Occupancy:
    """Occupancy of a kernel in blocks of `threads`.

    Raises:
        NotSupportedError: an architecture that is not in `LIMITS`.
        BadValueError: a block that no multiprocessor of the architecture takes.
    """
    limits = LIMITS.get(arch)
    if limits is None:
        raise NotSupportedError(
            f"GPU architecture {arch!r} is not supported; known: {', '.join(LIMITS)}"
        )
    if not 1 <= threads <= _MAX_THREADS:
        raise BadValueError("threads", threads, f"from 1 to {_MAX_THREADS}")
    if not 1 <= resources.registers <= _MAX_REGISTERS:
        raise BadValueError("registers", resources.registers, f"from 1 to {_MAX_REGISTERS}")
    shared = resources.shared_bytes + dynamic_shared_bytes
    if not 0 <= shared <= limits.block_shared_bytes:
        allowed = f"from 0 to {limits.block_shared_bytes} bytes on {arch}"
        raise BadValueError("shared memory of a block", shared, allowed)
    warps = -(-threads // _WARP)
    warp_registers = _round_up(resources.registers * _WARP, _REGISTER_UNIT)
    held_warps = _REGISTERS // _PARTITIONS // warp_registers * _PARTITIONS
    fitting = {
        "warps": limits.warps // warps,
        "blocks": limits.blocks,
        "registers": held_warps // warps,
        "shared memory": limits.shared_bytes // _round_up(shared + _RESERVED_SHARED, _SHARED_UNIT),
    }
    limited_by = min(fitting, key=lambda what: fitting[what])
    blocks = fitting[limited_by]
    if blocks == 0:
        allowed = f"at most {held_warps * _WARP} with {resources.registers} registers a thread"
        raise BadValueError("threads", threads, allowed)
    return Occupancy(blocks, blocks * warps, blocks * warps / limits.warps, limited_by)


@dataclass(frozen=True, slots=True)
class InstructionCounts:
    """How often instructions occur in a kernel's code, each counted once wherever it stands.

    wide_loads, wide_stores: 16 bytes or more, of global memory. matrix: products of matrices.
    ldmatrix: matrices from shared memory. async_copies: global to shared memory without registers.
    spills: loads and stores of local memory.
    """

    total: int
    wide_loads: int
    wide_stores: int
    matrix: int
    ldmatrix: int
    async_copies: int
    spills: int


_SECTION = re.compile(r"^//-+ \.text\.(\S+)\s+-+$", re.MULTILINE)
_INSTRUCTION = re.compile(
    r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE
)
_MATRIX = ("HMMA", "IMMA", "BMMA", "DMMA", "QMMA", "OMMA", "HGMMA", "IGMMA", "QGMMA")


def count_instructions(listing: str) -> dict[str, InstructionCounts]:
    """By kernel, out of what `nvdisasm -c` prints."""
    parts = _SECTION.split(listing)
    return {
        name: _count(_INSTRUCTION.findall(text))
        for name, text in zip(parts[1::2], parts[2::2], strict=True)
    }


def instruction_counts(cubin: Path) -> dict[str, InstructionCounts]:
    """By kernel of a cubin.

    Raises:
        ToolUnavailableError: nvdisasm is not installed, or cannot read the file.
    """
    return count_instructions(disassemble(cubin))


def disassemble(cubin: Path) -> str:
    """What `nvdisasm -c` prints of a cubin.

    Raises:
        ToolUnavailableError: nvdisasm is not installed, or cannot read the file.
    """
    tool = disassembler()
    try:
        run = subprocess.run([tool, "-c", cubin], capture_output=True, text=True, check=False)
    except OSError as error:
        raise ToolUnavailableError(f"{tool} cannot be run: {error}") from error
    if run.returncode != 0 or not _SECTION.search(run.stdout):
        said = run.stderr.strip() or "it printed no code"
        raise ToolUnavailableError(f"{tool} cannot read {cubin}: {said}")
    return run.stdout


def disassembler() -> Path:
    """nvdisasm: what $CUPAGED_NVDISASM names, on PATH, or in `.nvdisasm` beside the package.

    Raises:
        ToolUnavailableError: it is in none of these places.
    """
    given = os.environ.get("CUPAGED_NVDISASM")
    if given:
        if not Path(given).is_file():
            raise ToolUnavailableError(f"CUPAGED_NVDISASM={given} is not a file")
        return Path(given)
    on_path = shutil.which("nvdisasm")
    if on_path:
        return Path(on_path)
    environment = Path(__file__).resolve().parents[2] / ".nvdisasm"
    # The wheel puts it beside its libraries, not into the environment's bin.
    wheel = sorted(environment.glob("lib/python*/site-packages/nvidia/*/bin/nvdisasm"))
    for path in (environment / "bin" / "nvdisasm", *wheel):
        if path.is_file():
            return path
    raise ToolUnavailableError(
        "nvdisasm is not installed; in an environment of its own: "
        f"`python3 -m venv {environment} && "
        f"{environment}/bin/pip install nvidia-cuda-nvdisasm`"
    )


def _count(opcodes: list[str]) -> InstructionCounts:
    counts: Counter[str] = Counter()
    for opcode in opcodes:
        name, *modifiers = opcode.split(".")
        wide = "128" in modifiers or "256" in modifiers
        counts["wide_loads"] += name == "LDG" and wide
        counts["wide_stores"] += name == "STG" and wide
        counts["matrix"] += name in _MATRIX
        counts["ldmatrix"] += name == "LDSM"
        counts["async_copies"] += name == "LDGSTS"
        counts["spills"] += name in ("LDL", "STL")
    return InstructionCounts(total=len(opcodes), **counts)


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
