"""Mutants of our kernels die: a check of the emulator stops them, or a reference case sees them.

A fixed sample runs always; `pytest -m slow` runs all. Survivors are allowed only if EXPLAINED says
why no test can tell them from the original; an entry that no longer applies fails.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from cupaged.emulator.errors import CompileError, KernelError
from cupaged.emulator.module import EmulatedModule
from tests.emulator.mutant_cases import SUBJECTS
from tests.emulator.mutants import Mutant, mutants_of
from tests.emulator.program_cases import CUDA_FOLDER, PROGRAMS

SURVIVED = "survived"
WRONG = "wrong result"

# fmt: off
# One or two of each operator, and who catches it. They run in every test run.
SAMPLE = {
    "embedding.cu: copy_row(out, table, blockIdx.x, clip_row(ids[[blockIdx.x -> blockIdx.x + 1]],"
    " vocab_size), hidden);": "OutOfBoundsError",
    "rows.cuh: return max(0, min(row, count [- -> +] 1));": "OutOfBoundsError",
    "rows.cuh: for (int i = threadIdx.x; i < size / N; i [+= -> =] blockDim.x) {":
        "EndlessLoopError",
    "rows.cuh: for (int i = [threadIdx.x -> threadIdx.x + 1]; i < size / N; i += blockDim.x) {":
        WRONG,
    "norm.cu: for (int i = threadIdx.x; i [< -> <=] hidden / N; i += blockDim.x) { (3)":
        "OutOfBoundsError",
    "norm.cu: const float centred = [__fsub_rn -> __fadd_rn](to_float(x.at[j]), mean);": WRONG,
    "norm.cu: for (int i = threadIdx.x; i < [hidden / N -> N / hidden]; i += blockDim.x) { (4)":
        WRONG,
    "reduce.cuh: [__syncthreads(); -> ]": "UninitializedReadError",
    "reduce.cuh: [__syncthreads(); -> ] (2)": "UninitializedReadError",
    "reduce.cuh: if ([lane == 0 -> true]) partial[threadIdx.x / 32] = value;": "DataRaceError",
    "reduce.cuh: const int lane = threadIdx.x [% -> /] 32;": "DataRaceError",
    "rope.cu: if ([slot < 0 -> false]) return;": "OutOfBoundsError",
    "rope.cu: if (slot [< -> <=] 0) return;": WRONG,
    "kv_cache.cu: for (; i < block_elements / N; i += [step -> 2 * step]) "
    "store_pack<N>(out, i, load_pack<N>(in, i));": WRONG,
    "kv_cache.cu: const int source = copies[2 [* -> /] pair];": "UndefinedBehaviourError",
}

ALL_LANES_AGREE = "warp_sum and warp_max give all lanes the same value, so any lane may store it"
SAME_WIDTH = "the width is a power of two from 1 to 8, for which both forms give the same"
EXPLAINED = {
    "reduce.cuh: if (lane == [0 -> 1]) partial[threadIdx.x / 32] = value;": ALL_LANES_AGREE,
    "reduce.cuh: if (lane == [0 -> 1]) partial[threadIdx.x / 32] = value; (2)": ALL_LANES_AGREE,
    "common.cuh: struct alignas(N [* -> /] sizeof(U)) Pack {":
        "only the width of the loads changes, which is speed",
    "common.cuh: constexpr int WIDEST = [16 -> 17] / int(sizeof(U));":
        "17 / 4 is 16 / 4, and 17 / 2 is 16 / 2",
    "norm.cu: const float centred = __fsub_rn([to_float(x.at[j]), mean -> "
    "mean, to_float(x.at[j])]);": "the difference is only squared",
    "activation.cu: __device__ __forceinline__ float relu_of(float x) "
    "{ return x [< -> <=] 0.0f ? 0.0f : x; }": "-0.0 becomes 0.0, which compares equal",
    "rope.cu: while (a % width != 0 || b % width != 0) width /= [2 -> 3];":
        "heads move in narrower pieces, which is speed",
    "rope.cu: constexpr int TABLE_WIDTH = WIDTH [< -> <=] 4 ? WIDTH : 4; "
    "// floats of the table read at a time": SAME_WIDTH,
    "rope.cu: constexpr int TABLE_WIDTH = WIDTH < [4 -> 5] ? WIDTH : 4; "
    "// floats of the table read at a time": SAME_WIDTH,
    "rope.cu: if constexpr (REST [> -> >=] 0) { // what of a key does not turn":
        "with no rest the loop inside runs no round",
    "rope.cu: if constexpr (REST > [0 -> 1]) { // what of a key does not turn":
        "the rest is even: it is not 1",
}
# fmt: on


def all_mutants(file: str) -> list[Mutant]:
    return mutants_of(file, (CUDA_FOLDER / file).read_text(encoding="utf-8"))


def copy_sources(folder: Path) -> None:
    """Our kernels, and the program that runs block_sum and block_max, in one new folder."""
    folder.mkdir()
    for source in [*CUDA_FOLDER.glob("*.cu*"), PROGRAMS / "correct" / "reductions.cu"]:
        shutil.copy(source, folder)


def run_cases(file: str, folder: Path) -> None:
    """Compiles and runs the cases of `file` from the sources in a folder.

    Raises:
        CompileError, KernelError, AssertionError: the source differs from the original.
    """
    for variant in SUBJECTS[file]:
        path = folder / variant.program
        module = EmulatedModule(path, variant.defines, opt_level=0, max_steps=2_000_000)
        try:
            variant.check(module)
        finally:
            module.library.unlink(missing_ok=True)  # nobody will ask the cache for it again


def outcome(mutant: Mutant, folder: Path) -> str:
    """What became of a mutant: `SURVIVED`, or who caught it."""
    copy_sources(folder)
    path = folder / mutant.file
    path.write_text(mutant.apply(path.read_text(encoding="utf-8")), encoding="utf-8")
    try:
        run_cases(mutant.file, folder)
    except CompileError:
        return "does not compile"
    except KernelError as error:
        return type(error).__name__
    except AssertionError:
        return WRONG
    return SURVIVED


def test_operators_change_what_they_name() -> None:
    text = "\n".join(
        [
            "// a < b",
            "#define N 4",
            "  if (i < n) x[i] += 2.5f;",
            "  __syncthreads();",
            "#ifdef CUPAGED_EMULATED",
            "  y = a - b;",
            "#endif",
            "  y = __fsub_rn(a[j], f(b, c)) / 3;",
        ]
    )
    found = {mutant.name.removeprefix("k.cu: "): mutant for mutant in mutants_of("k.cu", text)}
    assert set(found) == {
        "if ([i < n -> true]) x[i] += 2.5f;",
        "if (i [< -> <=] n) x[i] += 2.5f;",
        "if (i < n) x[[i -> i + 1]] += 2.5f;",
        "if (i < n) x[[i -> i - 1]] += 2.5f;",
        "if (i < n) x[i] [+= -> =] 2.5f;",
        "if (i < n) x[i] += [2.5f -> 2.75f];",
        "[__syncthreads(); -> ]",
        "y = __fsub_rn(a[[j -> j + 1]], f(b, c)) / 3;",
        "y = __fsub_rn(a[[j -> j - 1]], f(b, c)) / 3;",
        "y = __fsub_rn([a[j], f(b, c) -> f(b, c), a[j]]) / 3;",
        "y = [__fsub_rn -> __fadd_rn](a[j], f(b, c)) / 3;",
        "y = __fsub_rn(a[j], f(b, c)) / [3 -> 4];",
    }
    dropped = found["[__syncthreads(); -> ]"]
    assert (dropped.operator, dropped.number) == ("dropped barrier", 4)
    assert dropped.apply(text) == text.replace("__syncthreads();", "")


def test_repeated_lines_have_names_of_their_own() -> None:
    names = [mutant.name for mutant in mutants_of("k.cu", "x += 1.0f;\ny += n;\nx += 1.0f;")]
    assert "k.cu: x [+= -> =] 1.0f;" in names
    assert "k.cu: x [+= -> =] 1.0f; (2)" in names
    assert len(names) == len(set(names)) == 5


@pytest.mark.parametrize("file", SUBJECTS)
def test_original_passes_its_cases(file: str, tmp_path: Path) -> None:
    copy_sources(tmp_path / "sources")
    run_cases(file, tmp_path / "sources")


def test_named_mutants_exist() -> None:
    names = {mutant.name for file in SUBJECTS for mutant in all_mutants(file)}
    assert {*SAMPLE, *EXPLAINED} <= names


@pytest.mark.parametrize("name", SAMPLE)
def test_sampled_mutant_is_caught(name: str, tmp_path: Path) -> None:
    (mutant,) = [m for m in all_mutants(name.split(":")[0]) if m.name == name]
    assert outcome(mutant, tmp_path / "sources") == SAMPLE[name]


@pytest.mark.slow
@pytest.mark.parametrize("file", SUBJECTS)
def test_every_mutant_is_caught_or_explained(file: str, tmp_path: Path) -> None:
    survivors = set()
    for number, mutant in enumerate(all_mutants(file)):
        if outcome(mutant, tmp_path / str(number)) == SURVIVED:
            survivors.add(mutant.name)
        shutil.rmtree(tmp_path / str(number))
    assert survivors == {name for name in EXPLAINED if name.startswith(f"{file}:")}
