"""Check blocks: found, run, and failing where they should; and those of the kernels hold."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupaged.emulator import (
    CompileError,
    DataRaceError,
    EmulatedModule,
    LaunchError,
    OutOfBoundsError,
)
from cupaged.emulator.check_block import CheckBlock, CheckBlockError, parse_blocks, suggested_block
from cupaged.emulator.check_runner import BlockRunner, Failure, Outcome, RunOptions
from cupaged.emulator.check_values import CheckValues, ExpectationError, compare
from cupaged.emulator.errors import EmulatorError
from cupaged.runtime.kernels import kernel_files, kernel_folder, kernel_names

KERNELS = """\
#ifndef FACTOR
#define FACTOR 2.0f
#endif
extern "C" __global__ void scale(float* out, const float* x, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = FACTOR * x[i];
}
template <class T> __global__ void fill(T* out, T value) { out[threadIdx.x] = value; }
// Who comes first writes its number.
extern "C" __global__ void first_of(int* out, int* count) {
  if (atomicAdd(count, 1) == 0) *out = threadIdx.x;
}
extern "C" __global__ void everybody_writes(float* out) { *out = blockIdx.x; }
"""
GOOD = """\
/* check
x = normal(100)
out = empty(100)
scale((2,), (64,), (out, x, np.int32(100)))
expect(out, 2 * x)
*/
"""
# Line of GOOD (its opening is 0), the code in its place; error, its line, a piece of the message.
WRONG: list[tuple[int, str, type[BaseException], int, str]] = [
    (2, "out = empty(99)", OutOfBoundsError, 3, "launched at kernels.cu:{line}"),
    (3, "scale((2,), (64,), (out, x, 100))", LaunchError, 3, "{line}: scale: 'n' is int32"),
    (
        3,
        "scale((1,), (64,), (out, x, np.int32(100)))",
        ExpectationError,
        4,
        "{line}: out[64] is na",
    ),
    (4, "expect(x + out, 2 * x)", ExpectationError, 4, "{line}: x + out[0] is "),
    (1, "x = nomral(100)", NameError, 1, "{line}: NameError: name 'nomral' is not defined"),
    (3, "scale((2,), (64,), out x)", SyntaxError, 3, "{line}: SyntaxError: "),
    (3, "kernel('scael')((1,), (1,), ())", LaunchError, 3, "{line}: kernels.cu has no kernel 'sc"),
    (3, "raise SystemExit(0)", SystemExit, 3, "{line}: SystemExit: 0"),
    (3, "out[:] = 2 * x", EmulatorError, 0, "{line}: this check block launches no kernel"),
]
BLOCKS = {
    "good": GOOD,
    "other define": GOOD.replace("check", "check -DFACTOR=7.0f").replace("2 * x", "3 * x"),
    "does not compile": GOOD.replace("check", "check -DFACTOR=nothing"),
    "template": """\
/* check --name fill<short>
out = empty(5, dtype=np.int16)
kernel('fill<short>')((1,), (5,), (out, np.int16(-3)))
expect(out, -3)
*/
""",
    "order": """\
/* check
out, count = empty(1, dtype=np.int32), zeros(1, dtype=np.int32)
first_of((1,), (64,), (out, count))
expect(out, 0)
*/
""",
    "race between blocks": """\
/* check
out, x = empty(64), normal(64)
scale((1,), (64,), (out, x, np.int32(64)))
everybody_writes((2,), (1,), (out,))
*/
""",
}


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CheckBlock]:
    """All of one file, so that it is compiled once for each set of defines."""
    path = tmp_path_factory.mktemp("blocks") / "kernels.cu"
    lines = GOOD.splitlines(keepends=True)
    wrong = {
        code: "".join([*lines[:number], f"{code}\n", *lines[number + 1 :]])
        for number, code, *_ in WRONG
    }
    texts = {**BLOCKS, **wrong}
    path.write_text(KERNELS + "".join(texts.values()))
    return dict(zip(texts, parse_blocks(path), strict=True))


def run(block: CheckBlock, seed: int | None = None, **options: Any) -> Outcome:
    return BlockRunner(RunOptions(**options)).run(block, seed)


def failure_of(outcome: Outcome, kind: type[BaseException]) -> Failure:
    """Of a run that must fail in one way."""
    assert outcome.failure is not None and type(outcome.failure.error) is kind
    return outcome.failure


FILES = [file for file in kernel_files() if parse_blocks(kernel_folder() / file)]


def test_the_kernels_have_check_blocks() -> None:
    expected = {"activation", "embedding_packed", "gather_rows", "kv_cache", "norm", "rope"}
    assert expected <= {Path(file).stem for file in FILES}


@pytest.mark.parametrize("file", FILES)
def test_blocks_of_the_kernels_hold(file: str) -> None:
    runner = BlockRunner(RunOptions(global_races=True))
    launched = set()
    for block in parse_blocks(kernel_folder() / file):
        for seed in (None, 1, 2):
            outcome = runner.run(block, seed)
            assert outcome.failure is None, outcome.failure.message
            assert outcome.num_comparisons
            launched |= set(outcome.launches)
    assert launched == set(kernel_names(file)), "a kernel without a check block"


def test_a_block_of_the_kernels_notices_a_missing_barrier(tmp_path: Path) -> None:
    for source in kernel_folder().glob("*.cu*"):
        shutil.copy(source, tmp_path)
    header = tmp_path / "reduce.cuh"
    text = header.read_text()
    assert text.count("  __syncthreads();\n") == 2
    header.write_text(text.replace("  __syncthreads();\n", "\n", 1))
    outcome = BlockRunner(RunOptions()).run(parse_blocks(tmp_path / "norm.cu")[0])
    assert outcome.failure is not None
    assert isinstance(outcome.failure.error, EmulatorError)
    assert "reduce.cuh" in outcome.failure.message and "'partial'" in outcome.failure.message


def test_parsing(tmp_path: Path) -> None:
    path = tmp_path / "a.cu"
    path.write_text(
        "/* check that prose is prose */\n"
        "/* check -DA=1 */ int a;\n"
        "// /* check\n"
        "/* checks\n*/\n"
        "  /* check -DDTYPE=f16 -D N=3 -D ONLY -I include --name 'fill<float, 3>'\n"
        "    if 1:\n"
        "        scale()\n"
        "  */\n"
        "/* check\n*/\n"
    )
    first, second = parse_blocks(path)
    assert (first.number, first.line, second.number, second.line) == (1, 6, 2, 10)
    assert first.defines == {"DTYPE": "f16", "N": "3", "ONLY": "1"}
    assert first.include_dirs == (tmp_path / "include",)
    assert first.name_expressions == ("fill<float, 3>",)
    assert first.code.splitlines()[:2] == ["if 1:", "    scale()"]
    assert first.mentions("scale") and not first.mentions("cal")
    assert second.defines == {} and second.code == ""


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("-DA=1 -O2", "'-O2' is no option"),
        ("-DA=1 words", "'words' is no option"),
        ("-D", "-D needs a value"),
        ("-DA='1", "No closing quotation"),
    ],
)
def test_a_wrong_first_line_is_refused(options: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "a.cu"
    path.write_text(f"\n\n/* check {options}\n*/\n")
    with pytest.raises(CheckBlockError, match=r"^a\.cu:3: ") as caught:
        parse_blocks(path)
    assert problem in str(caught.value) and caught.value.line == 3


def test_a_block_that_holds(blocks: dict[str, CheckBlock]) -> None:
    outcome = run(blocks["good"])
    assert outcome.failure is None
    assert outcome.launches == {"scale": 1} and outcome.num_comparisons == 1
    assert set(outcome.seconds) == {"scale"}


def test_defines_of_the_run_replace_those_of_the_block(blocks: dict[str, CheckBlock]) -> None:
    failure_of(run(blocks["other define"]), ExpectationError)
    assert run(blocks["other define"], defines={"FACTOR": "3.0f"}).failure is None


@pytest.mark.parametrize(("number", "code", "kind", "error_line", "message"), WRONG)
def test_an_error_names_the_line(
    number: int,
    code: str,
    kind: type[BaseException],
    error_line: int,
    message: str,
    blocks: dict[str, CheckBlock],
) -> None:
    block = blocks[code]
    failure = failure_of(run(block), kind)
    assert failure.line == block.line + error_line
    assert message.format(line=failure.line) in failure.message
    source = block.path.read_text().splitlines()[failure.line - 1]
    assert error_line == 0 or f" {failure.line} | {source}" in failure.message


def test_a_file_that_does_not_compile(blocks: dict[str, CheckBlock]) -> None:
    failure = failure_of(run(blocks["does not compile"]), CompileError)
    assert "'nothing' was not declared" in failure.message


def test_templates_by_name_expressions(blocks: dict[str, CheckBlock]) -> None:
    outcome = run(blocks["template"])
    assert outcome.failure is None and outcome.launches == {"fill<short>": 1}


def test_the_seed_draws_the_order_of_threads(blocks: dict[str, CheckBlock]) -> None:
    assert run(blocks["order"]).failure is None
    messages = [failure_of(run(blocks["order"], s), ExpectationError).message for s in (1, 2, 1)]
    assert messages[0] == messages[2] != messages[1]


def test_races_between_blocks_when_asked_for(blocks: dict[str, CheckBlock]) -> None:
    block = blocks["race between blocks"]
    assert run(block).failure is None
    assert "everybody_writes" in failure_of(run(block, global_races=True), DataRaceError).message


def test_a_run_without_checks(blocks: dict[str, CheckBlock]) -> None:
    for isolated in (True, False):
        outcome = run(blocks["good"], mode="plain", opt_level=0, isolated=isolated)
        assert outcome.failure is None and outcome.launches == {"scale": 1}


def f32(*values: float) -> np.ndarray[Any, Any]:
    return np.array(values, np.float32)


@pytest.mark.parametrize(
    ("actual", "desired", "tolerance", "problem"),
    [
        (f32(1, 2), [1.0, 2.0], None, None),
        (f32(100.0009), [100.0], None, None),  # 9e-6 of its size
        (f32(1, 2.5, 9), [1.0, 2.0, 8.0], None, "[1] is 2.5, expected 2: the error is 2.5e+04 "
         "times the allowed 2e-05; 2 of 3 elements differ"),
        (f32(0.25), [0.5], 0.125, "[0] is 0.25, expected 0.5: the error is 2 times the "
         "allowed 0.125"),
        (f32(0.25), [0.25000001], 0.0, "[0] is 0.25, expected 0.25000001"),
        (f32(np.nan, np.inf), [np.nan, np.inf], 0.0, None),
        (f32(1, np.nan), [1.0, 2.0], None, "[1] is nan, expected 2: was it never written?; "
         "1 of 2 elements differ"),
        (f32(3), [np.nan], None, "[0] is 3, expected nan"),
        (f32(3), [np.inf], None, "[0] is 3, expected inf"),
        (f32(-np.inf), [np.inf], None, "[0] is -inf, expected inf"),
        (f32(1, 2), [1.0, 2.0, 3.0], None, " has shape 2, expected 3"),
        (f32(5, 5), 5.0, None, None),
        (np.array([1.0009765625], np.float16), [1.0], None, None),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 5]], None,
         "[1, 1] is 4, expected 5; 1 of 4 elements differ"),
        (np.array([2**60]), [2**60 + 1], None, f"[0] is {2**60}, expected {2**60 + 1}"),
        (np.array([4]), [5], 1.0, None),
    ],
)  # fmt: skip
def test_comparing(actual: Any, desired: Any, tolerance: float | None, problem: str | None) -> None:
    assert compare(actual, np.asarray(desired), tolerance) == problem


def test_values_follow_from_seed_and_block() -> None:
    def drawn(seed: int, number: int) -> list[float]:
        values = CheckValues(seed, number)
        return [*values.normal(2).tolist(), *values.uniform(2).tolist()]

    assert drawn(3, 1) == drawn(3, 1)
    assert len({tuple(drawn(seed, number)) for seed in (0, 1) for number in (1, 2)}) == 4
    whole = CheckValues(0, 1).integers(-2, 3, 4, 50)
    assert whole.dtype == np.int32 and set(whole.ravel()) == {-2, -1, 0, 1, 2}
    spread = CheckValues(0, 1).uniform(1000, low=2, high=3)
    assert spread.min() >= 2 and spread.max() <= 3 and 2.4 < spread.mean() < 2.6


def test_arrays_are_those_of_a_device() -> None:
    values = CheckValues(0, 1, "f16", with_bf16=True)
    assert np.isnan(values.empty(3)).all() and values.empty(3).dtype == np.float16
    assert (values.empty(3, dtype=np.int64) == -1).all()
    assert values.zeros(2, 2, dtype="f32").tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert values.array([1, 2]).dtype == np.int32 and values.array([1.5]).dtype == np.float16
    assert values.array(np.arange(2)).dtype == np.int64
    assert values.normal(2, dtype="bf16").dtype.name == "bfloat16"
    for array in (values.normal(7), values.empty(7), values.array([1])):
        assert array.ctypes.data % 256 == 0


def test_a_suggested_block_runs_and_fails_until_it_is_filled_in(tmp_path: Path) -> None:
    path = tmp_path / "suggested.cu"
    path.write_text(KERNELS)
    kernel = EmulatedModule(path).get_function("scale")
    path.write_text(KERNELS + suggested_block(kernel, {"FACTOR": "3.0f"}))
    (block,) = parse_blocks(path)
    assert block.defines == {"FACTOR": "3.0f"}
    message = failure_of(run(block), ExpectationError).message
    assert "out[0] is " in message and "of 1,000 elements differ" in message
