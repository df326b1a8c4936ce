"""What emulation costs: a switch between threads, the checks, compiling, and a save-to-verdict.

The assembly switch is compared with ucontext, and checked runs with plain ones, in the same run.
Writes bench/results/emulator.json. Run it with `python bench/emulator.py` on an idle machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import report
from cupaged.emulator import EmulatedModule
from cupaged.emulator.module import Mode

ROOT = Path(__file__).resolve().parent.parent
REPEATS = 5
SWITCHES = """
extern "C" __global__ void barriers(int n) {
  for (int i = 0; i < n; ++i) __syncthreads();
}
extern "C" __global__ void shuffles(int* out, int n) {
  int value = threadIdx.x;
  for (int i = 0; i < n; ++i) value = __shfl_xor_sync(0xffffffffu, value, 1);
  out[threadIdx.x] = value;
}
extern "C" __global__ void nothing() {}
"""


def seconds(run: Callable[[], Any]) -> float:
    """The median time of a call."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return median(times)


def switches(folder: Path) -> dict[str, float]:
    """Nanoseconds a thread's barrier, shuffle and start take, without checks."""
    path = folder / "switches.cu"
    path.write_text(SWITCHES)
    found: dict[str, float] = {}
    out, count = np.empty(32, np.int32), 2000
    for name, portable in (("ucontext_", True), ("", False)):
        module = EmulatedModule(path, mode="plain", isolated=False, portable_switch=portable)
        barriers = partial(module.get_function("barriers"), (1,), (256,), (np.int32(count),))
        found[f"{name}barrier_ns"] = seconds(barriers) / (256 * count) * 1e9
        shuffles = partial(module.get_function("shuffles"), (1,), (32,), (out, np.int32(count)))
        found[f"{name}shuffle_ns"] = seconds(shuffles) / (32 * count) * 1e9
    nothing = module.get_function("nothing")
    found["empty_thread_ns"] = seconds(lambda: nothing((1000,), (256,), ())) / 256_000 * 1e9
    launch = partial(nothing, (1,), (1,), ())
    found["launch_us"] = seconds(lambda: [launch() for _ in range(100)]) * 1e4
    return found


def rms_norm(mode: Mode, **options: Any) -> float:
    """Nanoseconds an element of cuda/norm.cu takes: 64 rows of 2,048 floats."""
    module = EmulatedModule(
        ROOT / "cuda" / "norm.cu", {"DTYPE": "f32"}, mode=mode, isolated=False, **options
    )
    kernel = module.get_function("rms_norm")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 2048), np.float32)
    out, weight = np.zeros_like(x), np.ones(2048, np.float32)
    arguments = (out, x, weight, np.int32(2048), np.float32(1e-5))
    return seconds(lambda: kernel((64,), (256,), arguments)) / x.size * 1e9


def compiling() -> dict[str, float]:
    """Seconds from a kernel file to a loaded module: nothing cached, and all cached."""
    first: list[float] = []
    runtime_ready: list[float] = []
    cached: list[float] = []
    for _ in range(3):
        with tempfile.TemporaryDirectory() as cache:
            os.environ["CUPAGED_CACHE_DIR"] = cache
            for times, dtype in ((first, "f32"), (runtime_ready, "bf16"), (cached, "bf16")):
                start = time.perf_counter()
                EmulatedModule(ROOT / "cuda" / "norm.cu", {"DTYPE": dtype})
                times.append(time.perf_counter() - start)
    del os.environ["CUPAGED_CACHE_DIR"]
    return {
        "first_compile_s": median(first),
        "compile_s": median(runtime_ready),
        "cached_load_ms": median(cached) * 1e3,
    }


def verdict(folder: Path) -> float:
    """Seconds of `cupaged kernel check` on a changed RMSNorm, from the start of the process."""
    source = (ROOT / "cuda" / "norm.cu").read_text()
    times = []
    for run in range(3):
        path = folder / "norm.cu"
        path.write_text(f"// change {run} {time.time_ns()}\n{source}")
        for header in (ROOT / "cuda").glob("*.cuh"):
            (folder / header.name).write_bytes(header.read_bytes())
        start = time.perf_counter()
        command = [sys.executable, "-m", "cupaged", "kernel", "check", str(path)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run(command, check=True, capture_output=True, env=environment)
        times.append(time.perf_counter() - start)
    return median(times)


def main() -> None:
    """Measure, print, write."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        results: dict[str, Any] = dict(switches(folder))
        results["rms_norm_plain_ns"] = rms_norm("plain", opt_level=2)
        results["rms_norm_checked_ns"] = rms_norm("checked")
        results["rms_norm_global_races_ns"] = rms_norm("checked", global_races=True)
        results |= compiling()
        results["verdict_s"] = verdict(folder)
    results["checked_to_plain"] = results["rms_norm_checked_ns"] / results["rms_norm_plain_ns"]
    results["ucontext_to_assembly"] = results["ucontext_barrier_ns"] / results["barrier_ns"]
    for name, value in results.items():
        print(f"{name:28} {value:10.2f}")
    print(f"written to {report.write('emulator', results)}")


if __name__ == "__main__":
    main()
