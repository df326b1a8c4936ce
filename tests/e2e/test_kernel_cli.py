"""`cupaged kernel`: its words, its exit codes, and the tutorial of cuda/README.md step by step."""

from __future__ import annotations

import os
import re
import signal
import stat
import sys
from pathlib import Path

import pytest

from cupaged.cli import kernel_check
from cupaged.runtime.errors import CompilerUnavailableError
from tests.e2e.cli import Inline, Terminal, command, process
from tests.e2e.kernel_tutorial import READMES, Command, File, has, printed, steps

NO_NVRTC = "no NVRTC installed: GPU compile skipped (pip install 'cupaged[cuda12-jit]')"
FILE = """\
#include "factor.cuh"
template <int N> __device__ float times(float x) { return N * x; }

extern "C" __global__ void scale(
    float* __restrict__ out,      // [n]
    const float* __restrict__ x,  // [n]
    int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = times<FACTOR>(x[i]);
}

extern "C" __global__ __launch_bounds__(64) void first_of(int* out, int* count) {
  if (atomicAdd(count, 1) == 0) *out = threadIdx.x;
}

/* check -DOTHER=1
out, x = empty(70), normal(70)
scale((2,), (64,), (out, x, np.int32(70)))
expect(out, 2 * x)
*/

/* check
out, count = empty(1, dtype=np.int32), zeros(1, dtype=np.int32)
first_of((1,), (64,), (out, count))
expect(out, 0)
*/
"""


@pytest.fixture
def no_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without NVRTC, wherever the tests run: its compile takes seconds."""

    def version() -> tuple[int, int]:
        raise CompilerUnavailableError("NVRTC is not installed; install cupaged[cuda12-jit]")

    monkeypatch.setattr(kernel_check, "nvrtc_version", version)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all tests: what has been compiled there once need not be again."""
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture
def file(folder: Path) -> Path:
    (folder / "factor.cuh").write_text("#ifndef FACTOR\n#define FACTOR 2\n#endif\n")
    path = folder / "mine.cu"
    path.write_text(FILE)
    return path


# The tutorial


def alike(text: str, *, mask_all: bool) -> list[str]:
    """Lines without what differs from machine to machine: times, last digits, NVRTC or none."""
    text = re.sub(r"\b\d+(\.\d+)? (ms|s)\b", r"# \2", text)
    text = re.sub(r"\d+\.\d+(e[-+]\d+)?", "#", text)
    if mask_all:
        text = re.sub(r"\d+", "#", re.sub(" +", " ", text))
    return [line for line in text.splitlines() if "for sm_90" not in line and NO_NVRTC not in line]


def test_what_the_tutorials_do() -> None:
    short, long = (list(steps(readme)) for readme in READMES)
    assert [s.name if isinstance(s, File) else s.line.split()[0] for s in short] == [
        "row_sum.cu", "cupaged", "sed", "cupaged"
    ]  # fmt: skip
    lines = [step.line for step in long if isinstance(step, Command)]
    assert [step.name for step in long if isinstance(step, File)] == ["softmax.cu", "run.py"]
    assert len(lines) >= 8 and any("resources" in line for line in lines)


@pytest.mark.parametrize("readme", READMES, ids=["README", "cuda/README"])
def test_the_tutorial(readme: Path, tmp_path: Path) -> None:
    todo = list(steps(readme))
    for step in todo:
        if isinstance(step, File):
            (tmp_path / step.name).write_text(step.content)
            continue
        shown, resources = step.shown, "resources" in step.line
        if resources and not has("nvrtc"):
            continue
        if resources and not has("nvdisasm"):
            column = shown.index("  CODE") - shown.index("KERNEL")
            table = [line[:column].rstrip() for line in shown.splitlines()[1:4]]
            shown = "\n".join([shown.splitlines()[0], *table])
        done = alike(printed(step, tmp_path), mask_all=resources)
        expected = alike(shown, mask_all=resources)
        assert done[: len(expected) if resources else None] == expected, step.line


def test_the_tutorial_on_a_gpu(tmp_path: Path) -> None:
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    if not has("nvrtc"):
        pytest.skip("NVRTC is not installed")
    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        pytest.skip(f"no GPU: {error}")
    for step in steps(READMES[1]):
        if isinstance(step, File):
            (tmp_path / step.name).write_text(step.content)
    done = printed(Command("python run.py --gpu", ""), tmp_path)
    assert re.fullmatch(r"sums of the rows: \[(1\.|1\.0+\d|0\.9{5}\d*| )+\]\n", done), done


# check


def test_check_tells_each_block_and_kernel(file: Path, cupaged: Inline, no_nvrtc: None) -> None:
    done = cupaged("kernel", "check", str(file), "--seed", "1")
    verdicts = [line.split() for line in done.out.splitlines()]
    assert done.code == 1 and not done.err
    assert verdicts[0][:5] == ["ok", "mine.cu:16", "scale", "OTHER=1", "1"]
    assert verdicts[1] == ["failed", "mine.cu:22"]
    assert re.search(r"^  mine.cu:25: out\[0\] is \d+, expected 0$", done.out, re.MULTILINE)
    assert f"note    {NO_NVRTC}\n" in done.out
    last = r"1 failed; 2 check blocks, threads in the order of --seed 1; \d+\.\d s\n"
    assert re.search(last + r"\Z", done.out)


def test_three_orders_without_a_seed(file: Path, cupaged: Inline, no_nvrtc: None) -> None:
    done = cupaged("kernel", "check", str(file))
    assert done.code == 1
    assert re.search(r"^ok .* scale  OTHER=1  3 launches, \d+ ms$", done.out, re.MULTILINE)
    assert "  with threads in the order of --seed 1, not in ascending order\n" in done.out
    assert "threads in ascending order and in the orders of --seed 1 and 2;" in done.out


def test_options_of_check(file: Path, cupaged: Inline, no_nvrtc: None) -> None:
    text = FILE[: FILE.rindex("/* check")]
    file.write_text(text)
    plain = cupaged("kernel", "check", str(file), "--plain", "--opt-level", "0")
    assert plain.code == 0 and "all is well; 1 check block" in plain.out
    assert "without checks" in plain.out
    assert "note    no check block runs first_of\n" in plain.out
    other = cupaged("kernel", "check", str(file), "-DFACTOR=3", "--seed=5")
    assert other.code == 1 and "OTHER=1 FACTOR=3" in other.out
    assert "the order of --seed 5" in other.out and "mine.cu:19: out[0] is" in other.out
    file.write_text(text.replace("(out, x, np.int32(70)))", "(out, x, np.int32(70)))\nexpext(1)"))
    races = cupaged("kernel", "check", str(file), "--races")
    assert races.code == 1 and "mine.cu:19: NameError: name 'expext'" in races.out


def test_races_between_blocks(file: Path, cupaged: Inline, no_nvrtc: None) -> None:
    kernel = 'extern "C" __global__ void last(int* out) { *out = blockIdx.x; }\n'
    block = "/* check\nout = zeros(1, dtype=np.int32)\nlast((2,), (1,), (out,))\n*/\n"
    file.write_text(kernel + block)
    done = cupaged("kernel", "check", str(file))
    assert done.code == 0 and "mine.cu:2  expects nothing: only faults would be seen" in done.out
    done = cupaged("kernel", "check", str(file), "--races")
    assert done.code == 1 and "mine.cu:1: data race: last writes element 0 of 'out'" in done.out


def test_a_file_without_blocks(file: Path, cupaged: Inline, no_nvrtc: None) -> None:
    text = FILE[: FILE.index("/* check")]
    file.write_text(text)
    done = cupaged("kernel", "check", str(file))
    assert done.code == 0
    assert "ok      mine.cu  compiles for the emulator\n" in done.out
    assert "note    no check block runs scale, first_of\n" in done.out
    block = done.out[done.out.index("/* check") : done.out.index("*/") + 3]
    assert "first_of((16,), (64,), (out, count))\n" in block
    file.write_text(text + block)
    filled = cupaged("kernel", "check", str(file))
    assert filled.code == 1 and "expected 0" in filled.out
    file.write_text(text.replace("FACTOR", "WHAT"))
    broken = cupaged("kernel", "check", str(file))
    assert broken.code == 1 and "'WHAT' was not declared" in broken.out
    assert "/* check" not in broken.out


def test_a_kernel_by_its_name(cupaged: Inline, no_nvrtc: None) -> None:
    done = cupaged("kernel", "check", "relu", "--seed=0")
    assert done.code == 0 and "all is well; 1 check block," in done.out
    assert re.search(r"^ok      activation\.cu:\d+  relu  DTYPE=f32  1 launch, ", done.out, re.M)


@pytest.mark.skipif(not has("nvrtc"), reason="NVRTC is not installed")
def test_the_compile_for_a_gpu(file: Path, cupaged: Inline) -> None:
    only_host = "#ifndef CUPAGED_EMULATED\nint number = nothing;\n#endif\n"
    file.write_text(only_host + FILE[: FILE.rindex("/* check")])
    done = cupaged("kernel", "check", str(file), "--seed=1")
    assert done.code == 1 and "failed  mine.cu  OTHER=1  for sm_90\n" in done.out
    assert 'mine.cu(2): error: identifier "nothing" is undefined' in done.out
    assert "1 failed; 1 check block" in done.out


def test_what_nvrtc_is_not_given(file: Path, cupaged: Inline) -> None:
    if not has("nvrtc"):
        pytest.skip("NVRTC is not installed")
    file.write_text(FILE[: FILE.rindex("/* check")])
    done = cupaged("kernel", "check", str(file), "--seed=1", "-DTHIRD=1.5")
    assert done.code == 0
    assert "note    GPU compile skipped: define THIRD must be an int or a word" in done.out


def test_a_file_that_is_no_text(file: Path, cupaged: Inline) -> None:
    file.write_bytes(b"\xff\xfe")
    for verb in ("check", "resources"):
        done = cupaged("kernel", verb, str(file))
        assert done.code == 2 and "the kernel file must be text in UTF-8, got " in done.err


USAGE = [
    ((), "a command is missing"),
    (("chek",), "unknown command 'chek'; perhaps check"),
    (("check",), "the following arguments are required: FILE_OR_NAME"),
    (("check", "rms_nrm"), "a name that `cupaged kernel list` shows, perhaps rms_norm, got"),
    (("check", "no/such.cu"), "the kernel file must be an existing file, got 'no/such.cu'"),
    (("check", "norm", "--wach"), "unknown option --wach; perhaps --watch"),
    (("check", "norm", "--seed", "-1"), "--seed must be at least 0, got -1"),
    (("check", "norm", "--seed", "x"), "invalid int value: 'x'"),
    (("check", "norm", "--opt-level", "4"), "invalid choice: 4"),
    (("check", "norm", "-D", "1X=2"), "-D must be NAME or NAME=VALUE, got '1X=2'"),
    (("check", "norm", "--plain", "--races"), "without --plain, which checks nothing"),
    (("resources", "norm", "--arch", "sm_70"), "--arch must be one of sm_80, sm_86, sm_89, "),
    (("list", "norm"), "unexpected argument 'norm'"),
]


@pytest.mark.parametrize(("words", "message"), USAGE)
def test_wrong_usage(words: tuple[str, ...], message: str, cupaged: Inline) -> None:
    done = cupaged("kernel", *words)
    assert done.code == 2 and message in done.err and done.err.count("\n") == 1
    assert not done.out


@pytest.mark.parametrize("words", [(), ("check",), ("list",), ("resources",)])
def test_help(words: tuple[str, ...], cupaged: Inline) -> None:
    done = cupaged("kernel", *words, "--help")
    assert done.code == 0 and "cupaged kernel" in done.out and "example:\n" in done.out
    assert "in-process" not in done.out


def test_watching(file: Path) -> None:
    file.write_text(FILE[: FILE.rindex("/* check")])
    terminal = Terminal(*command("kernel", "check", str(file), "--watch", "--seed", "1"))
    try:
        shown = terminal.wait_for(r"all is well; .* s\n", 60)
        assert re.match(r"--- \d\d:\d\d:\d\d mine\.cu -{10,}", shown)
        header = file.with_name("factor.cuh")
        header.write_text("#define FACTOR 3\n")
        assert "out[0] is" in terminal.wait_for(r"1 failed; .* s\n", 60)
        header.write_text("#define FACTOR 2\n")
        terminal.wait_for(r"all is well; .* s\n", 60)
        file.unlink()
        terminal.wait_for(r"cannot be read: .*\n", 60)
        file.write_text(FILE.replace("if (i < n)", "").replace("empty(70)", "empty(71)"))
        said = terminal.wait_for(r"2 failed; .* s\n", 60)
        assert re.search(r"out of bounds: scale (reads|writes) element \d+ of '(x|out)'", said)
        assert "\x1b[31mfailed" in terminal.written and "\x1b[32mok" in terminal.written
        terminal.type("\x03")
        assert terminal.end() == 0
    finally:
        if terminal.process.poll() is None:
            terminal.process.send_signal(signal.SIGKILL)
            terminal.process.wait()


def test_gdb_is_given_the_same_check(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cupaged: Inline
) -> None:
    gdb = tmp_path / "gdb"
    gdb.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    gdb.chmod(gdb.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    done = process("kernel", "check", str(file), "--gdb", "-D", "FACTOR=2", "--seed=4")
    words = done.stdout.decode().splitlines()
    assert done.returncode == 0 and words[:1] == ["-q"]
    split = words.index("--args")
    assert words[1:split:2] == ["-ex"] * 4
    assert words[2:split:2] == ["set breakpoint pending on", "break scale", "break first_of", "run"]
    assert words[split + 1 : split + 4] == [sys.executable, "-m", "cupaged"]
    inner = words[split + 4 :]
    assert inner[-2:] == ["--seed=4", "-DFACTOR=2"] and {"--plain", "--opt-level=0"} < set(inner)
    file.write_text(FILE[: FILE.rindex("/* check")])
    ran = cupaged(*inner)
    assert ran.code == 0 and "all is well; 1 check block" in ran.out and "sm_90" not in ran.out


def test_no_gdb(file: Path, monkeypatch: pytest.MonkeyPatch, cupaged: Inline) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    done = cupaged("kernel", "check", str(file), "--gdb")
    assert (done.code, done.err) == (
        1, "cupaged: gdb is not on PATH; install it (Debian: apt install gdb)\n"
    )  # fmt: skip
