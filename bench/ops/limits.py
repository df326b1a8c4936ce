"""What limits each kernel on each architecture, told from its machine code without a GPU.

For a step of Llama-3-8B: bytes, operations and the time that memory, arithmetic and the issue of
instructions need at least on one GPU of each architecture; the largest should bind. Memory and
arithmetic are from the documents named below, instructions from the kernel's inner loop: all of it
counts, so that theirs is an upper bound. Latency, caches and bank conflicts are not in it.

    python bench/ops/limits.py [--arch sm_80 sm_90]

prints a table and writes bench/results/limits.json. It needs CuPy's NVRTC and nvdisasm.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench import report
from bench.ops.cases import ATTENTION, CASES, Case
from bench.ops.loops import code_of, main_loop, whole_code
from cupaged.ops.attention_plan import choose_variant
from cupaged.runtime.kernels import ARCHITECTURES, compile_kernel
from cupaged.runtime.machine_code import LIMITS, disassemble, occupancy

_SCHEDULERS = 4  # of a multiprocessor: each issues one instruction of a warp a clock
_HEAD_DIM = int(ATTENTION["HEAD_DIM"])


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, from public documents.

    ghz: boost clock, with the tensor cores busy where that makes a difference. tensor_tflops: dense
    products of 16-bit numbers, summed in float. From sm_90 on, `mma.sync`, which is what the
    kernels use, does not reach it: newer instructions would. fp32_tflops: without tensor cores.
    """

    name: str
    multiprocessors: int
    ghz: float
    gb_per_s: float
    tensor_tflops: float
    fp32_tflops: float

    @property
    def slots_per_byte(self) -> float:
        """Instructions of a warp that can be issued while memory moves a byte."""
        return _SCHEDULERS * self.multiprocessors * self.ghz / self.gb_per_s


GPUS = {
    # NVIDIA A100 Tensor Core GPU Datasheet: memory, products, float. NVIDIA A100 Tensor Core GPU
    # Architecture (white paper): multiprocessors, clock; deviceQuery says the same.
    "sm_80": Gpu("A100 SXM 80 GB", 108, 1.41, 2039, 312, 19.5),
    # NVIDIA A10 Tensor Core GPU Datasheet; multiprocessors and clock from TechPowerUp's GPU
    # Database, "NVIDIA A10 PCIe". As on the A40, sums in float cost no speed.
    "sm_86": Gpu("A10", 72, 1.695, 600, 125, 31.2),
    # NVIDIA L40S Datasheet; clock from TechPowerUp's GPU Database, "NVIDIA L40S". The data sheet
    # counts products at 2.49 GHz, the clock of the L40.
    "sm_89": Gpu("L40S", 142, 2.52, 864, 362, 91.6),
    # NVIDIA H100 Tensor Core GPU Architecture (white paper). Products at 1.83 GHz, float at 1.98.
    "sm_90": Gpu("H100 SXM", 132, 1.83, 3352, 989.4, 66.9),
    # NVIDIA Blackwell Architecture Technical Brief, HGX B200: products. Multiprocessors and memory,
    # 7,680 bits at 3,996 MHz, as the device reports them in pytorch/ao's pull request 4002; NVIDIA
    # writes "up to 8 TB/s". NVIDIA states no clock: 1.86 GHz for products, 1.98 for float, from
    # HMC Tech, "NVIDIA B200 vs NVIDIA B100".
    "sm_100": Gpu("B200", 148, 1.86, 7672, 2250, 75),
    # NVIDIA RTX Blackwell GPU Architecture (white paper), GeForce RTX 5090.
    "sm_120": Gpu("RTX 5090", 170, 2.407, 1792, 209.5, 104.8),
}


@dataclass(frozen=True, slots=True)
class Limit:
    """Of one kernel on one architecture.

    slots_per_byte: instructions of a warp in the inner loop a byte from memory; None where the loop
    does not tell. all_slots_per_byte: the same of the variant that is launched, every branch of it,
    where slots_per_byte was counted in another (see Case.counted). memory_us, arithmetic_us,
    issue_us: the least time for each. bound: what takes longest. issue_share: issue_us over
    the longer of the other two.
    """

    case: str
    arch: str
    work: str
    num_bytes: int
    flops: int
    registers: int
    blocks: int
    occupancy: float
    slots_per_byte: float | None
    all_slots_per_byte: float | None
    memory_us: float
    arithmetic_us: float
    issue_us: float | None
    bound: str
    issue_share: float | None


def limit(case: Case, arch: str) -> Limit:
    """Compile a kernel for an architecture and tell its limits.

    Raises:
        CompilerUnavailableError: NVRTC is not installed.
        ToolUnavailableError: nvdisasm is not installed.
    """
    gpu = GPUS[arch]
    defines, shared_bytes = dict(case.defines), case.shared_bytes
    if case.attention and case.file == "paged_attention.cu":
        variant = choose_variant(_HEAD_DIM, 2, LIMITS[arch].block_shared_bytes)
        defines |= {"ROW_TILES": variant.row_tiles, "SLOTS": variant.slots}
        shared_bytes = variant.shared_bytes if case.kernel == "paged_attention" else 0
    used = compile_kernel(case.file, defines, arch).resources[case.kernel]
    fits = occupancy(arch, used, case.threads, shared_bytes)
    slots = _slots_per_byte(case, {**defines, **case.counted}, arch)
    all_slots = _slots_per_byte(case, defines, arch) if case.counted else None
    memory = case.num_bytes / gpu.gb_per_s / 1e3
    peak = gpu.tensor_tflops if case.unit == "tensor" else gpu.fp32_tflops
    arithmetic = case.flops / peak / 1e6
    times = {"memory": memory, "tensor cores" if case.unit == "tensor" else "fp32": arithmetic}
    issue = None
    if slots is not None:
        issue = memory * slots / gpu.slots_per_byte
        times["issue"] = issue
    return Limit(
        case=case.name,
        arch=arch,
        work=case.work,
        num_bytes=case.num_bytes,
        flops=case.flops,
        registers=used.registers,
        blocks=fits.blocks,
        occupancy=round(fits.fraction, 3),
        slots_per_byte=None if slots is None else round(slots, 4),
        all_slots_per_byte=None if all_slots is None else round(all_slots, 4),
        memory_us=round(memory, 2),
        arithmetic_us=round(arithmetic, 2),
        issue_us=None if issue is None else round(issue, 2),
        bound=max(times, key=lambda what: times[what]),
        issue_share=None if issue is None else round(issue / max(memory, arithmetic), 3),
    )


def _slots_per_byte(case: Case, defines: dict[str, str | int], arch: str) -> float | None:
    """Of the inner loop; of all the code of a kernel that has none. None: it cannot be told.

    Tiles of many tokens take their operands from L2 many times over: a byte from memory is not
    what their loop loads.
    """
    if not case.counts or (case.unit == "tensor" and not case.few):
        return None
    compiled = compile_kernel(case.file, defines, arch)
    lines = code_of(disassemble(compiled.path), case.kernel)
    loop = main_loop(lines) or whole_code(lines)
    moved = loop.loads * case.streamed + loop.stores * (not case.few)
    return loop.instructions / moved if moved else None


def verdicts(limits: list[Limit]) -> list[str]:
    """For decode attention and products of few tokens: whether issue binds them."""
    few = {case.name for case in CASES if case.few}
    return [
        f"{found.case} on {found.arch} ({GPUS[found.arch].name}): "
        f"{'BOUND BY ISSUE' if found.bound == 'issue' else 'not issue-bound'}, "
        f"{found.slots_per_byte:.3f} slots a byte of {GPUS[found.arch].slots_per_byte:.3f}, "
        f"{found.issue_share:.0%} of the time that {found.bound} takes{_estimate(found)}"
        for found in limits
        if found.case in few and found.arch in ("sm_80", "sm_90")
    ]


def _estimate(found: Limit) -> str:
    """What the count rests on, where it is not that of the launched variant."""
    if found.all_slots_per_byte is None:
        return ""
    counted = next(case.counted for case in CASES if case.name == found.case)
    how = ", ".join(f"{name}={value}" for name, value in counted.items())
    return (
        f"; an estimate: counted with {how}, as tiles without rows are skipped; with every branch "
        f"of the launched variant {found.all_slots_per_byte:.3f}"
    )


def _row(found: Limit) -> str:
    slots = "     -" if found.slots_per_byte is None else f"{found.slots_per_byte:6.3f}"
    share = "    -" if found.issue_share is None else f"{found.issue_share:5.0%}"
    return (
        f"{found.case:22} {found.arch:6} {found.num_bytes / 1e6:9.1f} {found.flops / 1e9:9.1f} "
        f"{found.registers:4} {found.blocks:6} {found.occupancy:5.0%} {slots} {share} "
        f"{found.memory_us:9.1f} {found.arithmetic_us:9.1f}  {found.bound}"
    )


def main(argv: list[str] | None = None) -> None:
    """Print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--arch", nargs="+", choices=ARCHITECTURES, default=list(ARCHITECTURES))
    asked = parser.parse_args(argv).arch
    print(
        f"{'KERNEL':22} {'GPU':6} {'MB':>9} {'GFLOP':>9} REGS BLOCKS  OCC. SLOT/B ISSUE "
        f"{'MEM us':>9} {'ARITH us':>9}  BOUND BY"
    )
    limits: list[Limit] = []
    for case in CASES:
        for arch in asked:
            limits.append(limit(case, arch))
            print(_row(limits[-1]), flush=True)
    told = verdicts(limits)
    print("\n".join(["", *told]))
    results: dict[str, Any] = {
        "gpus": {a: {**asdict(GPUS[a]), "slots_per_byte": GPUS[a].slots_per_byte} for a in asked},
        "verdicts": told,
        "limits": [asdict(found) for found in limits],
    }
    print(f"written to {report.write('limits', results)}")


if __name__ == "__main__":
    main()
