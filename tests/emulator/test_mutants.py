"""Mutants of our kernels die: a check of the emulator stops them, or a reference case sees them.

Some named ones run always. `pytest -m slow` runs a third of those of the first kernels, and of a
fixed sample of the attention, the products, sampling and the PTX wrappers; `pytest -m long` the
other thirds, and all of the files in COMPLETE.
Survivors are allowed only if EXPLAINED or mutant_explained.py say why no test can tell them from
the original; an entry that no longer applies fails.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import shutil
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from cupaged.emulator.errors import CompileError, KernelError, LaunchError
from cupaged.emulator.module import EmulatedModule
from tests.emulator.mutant_cases import SUBJECTS, Variant
from tests.emulator.mutant_cases_attention import ATTENTION
from tests.emulator.mutant_cases_gemm import GEMM
from tests.emulator.mutant_cases_ptx import HEADERS, PTX
from tests.emulator.mutant_cases_sampling import SAMPLING
from tests.emulator.mutant_explained import EXPLAINED_LATER
from tests.emulator.mutants import Mutant, mutants_of
from tests.emulator.program_cases import CUDA_FOLDER, PROGRAMS

FAMILIES = {"attention": ATTENTION, "gemm": GEMM, "sampling": SAMPLING, "ptx": PTX}
LATER = {file: cases for family in FAMILIES.values() for file, cases in family.items()}
# Of which `long` runs every mutant.
COMPLETE = [*ATTENTION, *GEMM, "logits_edits.cu", "philox.cuh", "sampling_mass.cuh"]
SAMPLE_SEED = 20261129  # of the mutants that `slow` and `long` run
LATER_ORIGINALS = [
    "attention_products.cuh", "gemm.cuh", "gemm_f32.cu", "gemm_pack.cu", "gemm_tile_order.cuh",
    "gemm_tile_store.cuh", "embedding_packed.cu", "logits_edits.cu", "philox.cuh",
    "logits_logprobs.cu", "ptx_host.cuh",
]  # fmt: skip
SAMPLE_SIZES = {"attention": 60, "gemm": 60, "sampling": 60, "ptx": 40}
SLOW_SHARE = 3  # one in so many is for `slow`

PARTS = ("reductions.cu", "tile_order.cu", "random_numbers.cu")
SURVIVED = "survived"
WRONG = "wrong result"
CRASHED = "the process ended"
CHILD_SECONDS = 300

# fmt: off
# One or two of each operator, and who catches it. They run in every test run.
SAMPLE = {
    "embedding_packed.cu: const int row = clip_row(ids[[blockIdx.x -> blockIdx.x + 1]],"
    " vocab_size);": "OutOfBoundsError",
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
    "attention_tiles.cuh: const bool inside = position >= context.begin && position [< -> <=]"
    " context.end;": WRONG,
    "attention_tiles.cuh: [copy_async_wait<SLOTS - 2>(); -> ]": "AsyncCopyError",
    "gemm_tiles.cu: [__syncthreads(); -> ] // the stage is there, and the one that is refilled has"
    " been used": "UninitializedReadError",
    "gemm_f32.cu: if ([!sum_chunks(sum, used, partial, tickets, share) -> false]) return;":
        "DataRaceError",
    "philox.cuh: low += 0x[9E3779B9 -> 9e3779ba]u;": WRONG,
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


def sample_of(family: str) -> list[Mutant]:
    """As many mutants of a family as SAMPLE_SIZES says: those whose names hash lowest.

    So a mutant is drawn by its own name, and an edit of a kernel hardly changes the sample.
    """

    def draw(mutant: Mutant) -> bytes:
        return hashlib.sha256(f"{SAMPLE_SEED} {mutant.name}".encode()).digest()

    mutants = [mutant for file in FAMILIES[family] for mutant in all_mutants(file)]
    return sorted(mutants, key=draw)[: SAMPLE_SIZES[family]]


def copy_sources(folder: Path) -> None:
    """Our kernels, and the programs that run parts of them alone, in one new folder."""
    folder.mkdir()
    for source in [*CUDA_FOLDER.glob("*.cu*"), *(PROGRAMS / "correct" / name for name in PARTS)]:
        shutil.copy(source, folder)
    (folder / "headers.cu").write_text(HEADERS, encoding="utf-8")


def shrink(folder: Path, variant: Variant) -> None:
    """Constants of the copied sources as the variant's cases want them."""
    for file, (constant, smaller) in variant.smaller.items():
        text = (folder / file).read_text(encoding="utf-8")
        (folder / file).write_text(text.replace(constant, smaller), encoding="utf-8")


def run_cases(file: str, folder: Path) -> None:
    """Compiles and runs the cases of `file` from the sources in a folder.

    Raises:
        CompileError, KernelError, LaunchError, AssertionError: the source differs.
    """
    for variant in (SUBJECTS | LATER)[file]:
        shrink(folder, variant)
        path = folder / variant.program
        module = EmulatedModule(
            path,
            variant.defines,
            opt_level=variant.opt_level,
            max_steps=variant.max_steps,
            global_races=variant.global_races,
        )
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
    except (KernelError, LaunchError) as error:
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


def test_operators_of_guards_waits_and_bits() -> None:
    text = "if (a && b) continue;\ncopy_async_wait<SLOTS - 2>();\nx = y >> 0x0Fu;"
    found = {mutant.name.removeprefix("k.cu: ") for mutant in mutants_of("k.cu", text)}
    assert found == {
        "if ([a && b -> false]) continue;",
        "if (a [&& -> ||] b) continue;",
        "[copy_async_wait<SLOTS - 2>(); -> ]",
        "copy_async_wait<SLOTS [- -> +] 2>();",
        "copy_async_wait<SLOTS - [2 -> 3]>();",
        "x = y [>> -> <<] 0x0Fu;",
        "x = y >> 0x[0F -> 10]u;",
    }


def test_repeated_lines_have_names_of_their_own() -> None:
    names = [mutant.name for mutant in mutants_of("k.cu", "x += 1.0f;\ny += n;\nx += 1.0f;")]
    assert "k.cu: x [+= -> =] 1.0f;" in names
    assert "k.cu: x [+= -> =] 1.0f; (2)" in names
    assert len(names) == len(set(names)) == 5


def test_every_later_variant_is_among_the_originals() -> None:
    covered = [variant for file in LATER_ORIGINALS for variant in LATER[file]]
    assert all(variant in covered for cases in LATER.values() for variant in cases)


@pytest.mark.parametrize(
    "file",
    [*SUBJECTS, "philox.cuh"]
    + [pytest.param(f, marks=pytest.mark.slow) for f in LATER_ORIGINALS if f != "philox.cuh"],
)
def test_original_passes_its_cases(file: str, tmp_path: Path) -> None:
    copy_sources(tmp_path / "sources")
    run_cases(file, tmp_path / "sources")


def test_named_mutants_exist() -> None:
    names = {mutant.name for file in SUBJECTS | LATER for mutant in all_mutants(file)}
    assert {*SAMPLE, *EXPLAINED, *EXPLAINED_LATER} <= names


def test_samples_have_their_sizes() -> None:
    for family, files in FAMILIES.items():
        drawn = sample_of(family)
        assert len(drawn) == len({mutant.name for mutant in drawn}) == SAMPLE_SIZES[family]
        assert {mutant.file for mutant in drawn} <= set(files)


@pytest.mark.parametrize("name", SAMPLE)
def test_sampled_mutant_is_caught(name: str, tmp_path: Path) -> None:
    (mutant,) = [m for m in all_mutants(name.split(":")[0]) if m.name == name]
    assert outcome(mutant, tmp_path / "sources") == SAMPLE[name]


def tell_outcome(mutant: Mutant, folder: Path, answer: Connection) -> None:
    signal.alarm(CHILD_SECONDS)
    try:
        answer.send(outcome(mutant, folder))
    except BaseException as error:
        answer.send(f"unexpected {error!r}")


def outcome_in_child(mutant: Mutant, folder: Path) -> str:
    """As `outcome`, in a process of its own: what a mutant does on the host may end it.

    It is forked from a server of such processes, which has no threads: a test before this one may
    have started some here, and a fork of them may wait for ever.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=tell_outcome, args=(mutant, folder, theirs))
    child.start()
    theirs.close()
    try:
        said: str = ours.recv()
    except EOFError:
        said = CRASHED
    child.join()
    ours.close()
    assert not said.startswith("unexpected"), f"{mutant.name}: {said}"
    return said if child.exitcode == 0 else CRASHED


def survivors_of(mutants: list[Mutant], folder: Path) -> set[str]:
    survivors = set()
    for number, mutant in enumerate(mutants):
        if outcome_in_child(mutant, folder / str(number)) == SURVIVED:
            survivors.add(mutant.name)
        shutil.rmtree(folder / str(number))
    return survivors


PARTS_OF_A_RUN = [
    pytest.param(part, marks=pytest.mark.long if part else pytest.mark.slow)
    for part in range(SLOW_SHARE)
]


@pytest.mark.parametrize("file", SUBJECTS)
@pytest.mark.parametrize("part", PARTS_OF_A_RUN)
def test_every_mutant_is_caught_or_explained(file: str, part: int, tmp_path: Path) -> None:
    mutants = all_mutants(file)[part::SLOW_SHARE]
    assert survivors_of(mutants, tmp_path) == EXPLAINED.keys() & {m.name for m in mutants}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("part", PARTS_OF_A_RUN)
def test_sampled_mutants_are_caught_or_explained(family: str, part: int, tmp_path: Path) -> None:
    drawn = sample_of(family)[part::SLOW_SHARE]
    assert survivors_of(drawn, tmp_path) == EXPLAINED_LATER.keys() & {m.name for m in drawn}


@pytest.mark.long
@pytest.mark.parametrize("file", COMPLETE)
def test_every_later_mutant_is_caught_or_explained(file: str, tmp_path: Path) -> None:
    survivors = survivors_of(all_mutants(file), tmp_path)
    assert survivors == {name for name in EXPLAINED_LATER if name.startswith(f"{file}:")}
