"""Modules and launches: arguments, modes, orders of threads, compilers and the cache."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupaged.emulator import (
    CompileError,
    DeadlockError,
    EmulatedModule,
    EmulatorError,
    EndlessLoopError,
    KernelCrashError,
    LaunchError,
    OutOfBoundsError,
    ReadOnlyError,
    StackOverflowError,
    ToolchainError,
    UndefinedBehaviourError,
)
from cupaged.emulator.module import Mode

SOURCE = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>
struct Options { int width; float scale; };
extern "C" __global__ void scale(float* out, const float* x, float factor, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = x[i] * factor;
}
extern "C" __global__ void scalars(double* out, char a, unsigned char b, short c, long long d,
                                   bool e, double f, __half g, __nv_bfloat16 h, Options o) {
  out[0] = a; out[1] = b; out[2] = c; out[3] = d; out[4] = e; out[5] = f;
  out[6] = __half2float(g); out[7] = __bfloat162float(h); out[8] = o.width; out[9] = o.scale;
}
extern "C" __global__ void raw(void* out, const uint4* in) {
  static_cast<uint4*>(out)[threadIdx.x] = in[threadIdx.x];
}
extern "C" __global__ void wild(float* out) { out[1ll << 40] = 1; }
extern "C" __global__ void forever(volatile int* flag) { while (*flag == 0) {} }
extern "C" __global__ void stuck() { if (threadIdx.x == 0) __syncwarp(); else __syncthreads(); }
extern "C" __global__ void deep(int* out, int n);
__device__ int down(int n, int* out) { out[0] = n; return n == 0 ? 0 : down(n - 1, out) + out[0]; }
extern "C" __global__ void deep(int* out, int n) { out[1] = down(n, out); }
extern "C" __global__ void order(int* out, int* next) { out[atomicAdd(next, 1)] = threadIdx.x; }
extern "C" __global__ void total(int* out) {
  __shared__ int s[64];
  s[threadIdx.x] = threadIdx.x;
  __syncthreads();
  for (int step = 32; step > 0; step /= 2) {
    if (threadIdx.x < step) s[threadIdx.x] += s[threadIdx.x + step];
    __syncthreads();
  }
  if (threadIdx.x == 0) out[blockIdx.x] = s[0] + __popc(__activemask() & 1);
}
extern "C" __global__ void dynamic(float* out) {
  extern __shared__ float s[];
  s[threadIdx.x] = 1;
  out[threadIdx.x] = s[threadIdx.x];
}
extern "C" __global__ void divide(int* out, const int* by) { out[0] /= by[0]; }
extern "C" __global__ void rest(long long* out, const long long* by) { out[0] %= by[0]; }
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("module") / "module.cu"
    file.write_text(SOURCE)
    return file


def run(module: EmulatedModule, name: str, *args: Any, threads: int = 1) -> None:
    module.get_function(name)((1,), (threads,), args)


def test_every_kind_of_scalar_arrives(path: Path) -> None:
    options = np.zeros((), [("width", np.int32), ("scale", np.float32)])
    options[...] = (12, 0.5)
    out = np.zeros(10)
    run(
        EmulatedModule(path), "scalars", out, np.int8(-5), np.uint8(250), np.int16(-300), 2**40,
        True, 2.5, np.float16(0.25), ml_dtypes.bfloat16(-8), options[()],
    )  # fmt: skip
    assert out.tolist() == [-5, 250, -300, 2.0**40, 1, 2.5, 0.25, -8, 12, 0.5]


def test_packs_of_sixteen_bytes_take_any_array(path: Path) -> None:
    x = np.arange(16, dtype=np.float16)
    out = np.zeros(16, ml_dtypes.bfloat16)
    run(EmulatedModule(path), "raw", out, x.view(np.int8), threads=2)
    assert (out.view(np.uint16) == x.view(np.uint16)).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"factor": 2.0}, r"'factor' is float32, and a Python float .* 8 bytes: .*np.float32"),
        ({"n": 4}, r"'n' is int32, and a Python int would be passed in 8 bytes: pass np.int32"),
        ({"n": np.int64(4)}, r"'n' is int32 of 4 bytes, got int64 of 8 bytes"),
        ({"n": np.float32(4)}, r"'n' is int32 of 4 bytes, got float32 of 4 bytes"),
        ({"n": "4"}, r"'n' is int32, got str: pass a NumPy scalar"),
        ({"n": np.zeros(2, np.int32)}, r"'n' is passed by value, got an array of shape \(2,\)"),
        ({"x": np.zeros(4)}, r"'x' points to float32, got an array of float64"),
        ({"x": np.zeros(4, np.int32)}, r"'x' points to float32, got an array of int32"),
        ({"x": np.zeros(8, np.float32)[::2]}, r"'x' must be contiguous, .* strides \(8,\)"),
        ({"x": np.zeros(4, ">f4")}, r"'x' must have native byte order, got >f4"),
        ({"x": [1.0]}, r"'x' is a pointer to float32 and needs an array, got list"),
        ({"x": None}, r"'x' is a pointer to float32 and needs an array, got NoneType"),
        ({"x": np.uint64(4096)}, r"'x' is a pointer; an address other than 0 cannot be checked"),
    ],
)
def test_wrong_arguments_are_refused(path: Path, change: dict[str, Any], message: str) -> None:
    out = np.full(4, 9, np.float32)
    arguments = {
        "out": out, "x": np.ones(4, np.float32), "factor": np.float32(2), "n": np.int32(4)
    }  # fmt: skip
    with pytest.raises(LaunchError, match=message):
        run(EmulatedModule(path), "scale", *(arguments | change).values(), threads=4)
    assert (out == 9).all()


@pytest.mark.parametrize(
    ("grid", "block", "shared", "message"),
    [
        ((0,), (1,), 0, r"grid.x must be a whole number from 1 to 2147483647, got 0"),
        ((1, 65536), (1,), 0, r"grid.y must be a whole number from 1 to 65535, got 65536"),
        ((1,), (1025,), 0, r"block.x must be a whole number from 1 to 1024, got 1025"),
        ((1,), (32, 33), 0, r"a block of 1056 threads is larger than 1024, .*the hardware"),
        ((1,), (1, 1, 65), 0, r"block.z must be a whole number from 1 to 64, got 65"),
        ((1.0,), (1,), 0, r"grid.x must be a whole number"),
        (1, (1,), 0, r"grid must be a tuple of one to three sizes, got 1"),
        ((1, 1, 1, 1), (1,), 0, r"grid must be a tuple of one to three sizes"),
        ((1,), (1,), -1, r"shared_mem must be a number of bytes, got -1"),
        ((1,), (1,), 49153, r"49153 bytes .* max_dynamic_shared_size_bytes, which is 49152"),
    ],
)
def test_wrong_launches_are_refused(
    path: Path, grid: Any, block: Any, shared: int, message: str
) -> None:
    kernel = EmulatedModule(path).get_function("dynamic")
    with pytest.raises(LaunchError, match=message):
        kernel(grid, block, (np.zeros(1, np.float32),), shared_mem=shared)


def test_large_shared_memory_is_asked_for_first(path: Path) -> None:
    kernel = EmulatedModule(path).get_function("dynamic")
    kernel.max_dynamic_shared_size_bytes = 227 * 1024
    out = np.zeros(8, np.float32)
    kernel((1,), (8,), (out,), shared_mem=227 * 1024)
    assert (out == 1).all()
    kernel.max_dynamic_shared_size_bytes = 227 * 1024 + 1
    with pytest.raises(LaunchError, match="must be at most 232448, got 232449"):
        kernel((1,), (8,), (out,), shared_mem=4)


def test_an_index_that_reaches_another_array_is_found(path: Path) -> None:
    both = np.zeros(16, np.float32)  # the two halves touch
    out, x = both[:8], both[8:]
    with pytest.raises(OutOfBoundsError, match="element 8 of 'x'"):
        run(EmulatedModule(path), "scale", out, x, np.float32(1), np.int32(9), threads=9)
    copy = np.zeros(8, np.float32)
    with pytest.raises(ReadOnlyError, match="element 8 of 'x'"):  # `x` goes on where `out` ends
        run(EmulatedModule(path), "scale", out, both, np.float32(1), np.int32(9), threads=9)
    run(EmulatedModule(path), "scale", copy, out, np.float32(1), np.int32(8), threads=9)


def test_an_array_may_be_its_own_output(path: Path) -> None:
    for mode in ("checked", "plain"):
        x = np.arange(5, dtype=np.float32)
        run(EmulatedModule(path, mode=mode), "scale", x, x, np.float32(2), np.int32(5), threads=8)
        assert x.tolist() == [0, 2, 4, 6, 8]


@pytest.mark.parametrize("isolated", [True, False])
@pytest.mark.parametrize("portable", [True, False])
@pytest.mark.parametrize("mode", ["checked", "plain"])
def test_barriers_under_every_switch(path: Path, mode: Any, portable: bool, isolated: bool) -> None:
    module = EmulatedModule(path, mode=mode, portable_switch=portable, isolated=isolated)
    out = np.zeros(3, np.int32)
    module.get_function("total")((3,), (64,), (out,))
    assert out.tolist() == [2017] * 3
    with pytest.raises(DeadlockError, match=r"(?s)thread 0 waits in __syncwarp with mask .*"
                       r"threads 1 to 31 wait in __syncthreads"):  # fmt: skip
        run(module, "stuck", threads=32)
    run(module, "scale", np.zeros(1, np.float32), np.zeros(1, np.float32), np.float32(1),
        np.int32(1))  # fmt: skip


def test_a_crash_in_plain_mode_stays_in_the_child(path: Path) -> None:
    module = EmulatedModule(path, mode="plain")
    with pytest.raises(KernelCrashError, match="Segmentation fault") as found:
        run(module, "wild", np.zeros(1, np.float32))
    assert found.value.line == 17
    with pytest.raises(StackOverflowError, match="stack of 256 KiB is full"):
        run(module, "deep", np.zeros(2, np.int32), np.int32(10**6))
    run(module, "deep", np.zeros(2, np.int32), np.int32(100))


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="no trap elsewhere")
@pytest.mark.parametrize("mode", ["checked", "plain"])
@pytest.mark.parametrize(("name", "dtype"), [("divide", np.int32), ("rest", np.int64)])
def test_the_smallest_number_by_minus_one(path: Path, name: str, dtype: Any, mode: Mode) -> None:
    """Its result does not fit; processors end the program."""
    module = EmulatedModule(path, mode=mode)
    smallest = np.array([np.iinfo(dtype).min], dtype)
    with pytest.raises(UndefinedBehaviourError, match="of the smallest number by -1") as found:
        run(module, name, smallest, np.array([-1], dtype))
    (line,) = (i for i, text in enumerate(SOURCE.splitlines(), 1) if f"void {name}(" in text)
    assert found.value.line == line
    given = np.array([7], dtype)
    run(module, name, given, np.array([-2], dtype))  # the next launch goes well
    assert given.tolist() == [-3 if name == "divide" else 1]
    with pytest.raises(UndefinedBehaviourError, match="an integer division by zero"):
        run(module, name, given, np.zeros(1, dtype))


def test_threads_run_in_the_order_of_the_seed(path: Path) -> None:
    def order(seed: int | None) -> list[int]:
        out, count = np.zeros(40, np.int32), np.zeros(1, np.int32)
        run(EmulatedModule(path, seed=seed), "order", out, count, threads=40)
        return [int(thread) for thread in out]

    assert order(None) == list(range(40))
    assert sorted(order(1)) == list(range(40))
    assert order(1) == order(1) != order(2)
    assert order(1) != order(None)


def test_an_endless_loop_ends(path: Path) -> None:
    module = EmulatedModule(path, max_steps=100_000)
    with pytest.raises(EndlessLoopError, match="no end after 100000 basic blocks") as found:
        run(module, "forever", np.zeros(1, np.int32), threads=3)
    assert found.value.line == 18


@pytest.mark.parametrize("mode", ["checked", "plain"])
def test_ctrl_c_ends_a_launch(path: Path, mode: Any) -> None:
    """A process of its own: Ctrl-C goes to the child of plain mode too."""
    code = (
        "import sys, numpy as np\n"
        "from cupaged.emulator import EmulatedModule\n"
        f"kernel = EmulatedModule({str(path)!r}, mode={mode!r}).get_function('forever')\n"
        "print('ready', flush=True)\n"
        "try:\n    kernel((1,), (1,), (np.zeros(1, np.int32),))\n"
        "except KeyboardInterrupt:\n    print('interrupted')\n"
    )
    EmulatedModule(path, mode=mode)
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    threading.Timer(0.3, os.killpg, (process.pid, signal.SIGINT)).start()
    assert process.communicate(timeout=30)[0] == "interrupted\n"


def test_unknown_modes_are_refused(path: Path) -> None:
    with pytest.raises(EmulatorError, match="mode must be 'checked' or 'plain', got 'fast'"):
        EmulatedModule(path, mode="fast")  # type: ignore[arg-type]
    with pytest.raises(EmulatorError, match="opt_level must be 0, 1, 2 or 3, got 4"):
        EmulatedModule(path, opt_level=4)
    with pytest.raises(EmulatorError, match="max_steps must be at least 1, got 0"):
        EmulatedModule(path, max_steps=0)


# ---- Compilers ----


def write_compiler(folder: Path, body: str) -> str:
    script = folder / "g++"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)
    return str(script)


def test_no_compiler(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolchainError, match=r"no g\+\+ and no clang\+\+ on PATH. Install g\+\+"):
        EmulatedModule(path)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ToolchainError, match=r"\$CXX is 'no-such-compiler', which cannot be run"):
        EmulatedModule(path)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("echo 9.4.0", r"is version 9\.4\.0; the emulator needs g\+\+ 11\.1 or newer"),
        ("echo", r"gives no version: ''"),
        ("exit 3", r"does not run: .*exit status 3"),
    ],
)
def test_a_compiler_that_is_not_usable(
    path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, body: str, message: str
) -> None:
    monkeypatch.setenv("CXX", write_compiler(tmp_path, body))
    monkeypatch.setenv("CUPAGED_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(ToolchainError, match=message):
        EmulatedModule(path)


# ---- The cache ----


def test_a_module_is_compiled_once(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUPAGED_CACHE_DIR", str(tmp_path / "cache"))
    header, source = tmp_path / "width.cuh", tmp_path / "width.cu"
    header.write_text("constexpr int WIDTH = 3;\n")
    source.write_text(
        '#include "width.cuh"\nextern "C" __global__ void width(int* out) { *out = WIDTH * BY; }\n'
    )

    def width(by: int) -> int:
        out = np.zeros(1, np.int32)
        run(EmulatedModule(source, {"BY": by}), "width", out)
        return int(out[0])

    assert width(1) == 3
    assert compiled.count("the emulator's runtime") == 1
    before = len(compiled)
    assert (width(1), len(compiled)) == (3, before)
    assert (width(2), compiled[before:]) == (6, ["width.cu"] * 3)  # preprocess, compile, link
    header.write_text("constexpr int WIDTH = 5;\n")  # the same size, another content
    assert width(1) == 5
    folder = tmp_path / "cache" / "emulator"
    files = sorted(file.name for file in folder.iterdir() if file.suffix != ".json")
    assert [name.partition("-")[0] for name in files] == ["runtime", "width", "width", "width"]
    header.write_text("constexpr int WIDTH = ;\n")
    with pytest.raises(CompileError, match=r"width.cuh:1:"):
        width(1)
    left = sorted(file.name for file in folder.iterdir() if file.suffix != ".json")
    assert left == files  # a failed compilation leaves nothing


def test_a_cache_that_cannot_be_used_is_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, path: Path
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("CUPAGED_CACHE_DIR", str(tmp_path / "file" / "cache"))
    out = np.zeros(1, np.float32)
    run(EmulatedModule(path), "scale", out, np.ones(1, np.float32), np.float32(3), np.int32(1))
    assert out[0] == 3
