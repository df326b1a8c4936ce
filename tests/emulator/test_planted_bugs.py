"""Every planted bug is caught: the right error, at the right line, with the right names.

Each kernel of `programs/buggy` runs at -O0 and -O2 in checked mode, as planted_cases.py says. The
mistakes of a caller (wrong dtype, too large a block, ...) are in test_planted_launches.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cupaged.emulator.errors import KernelError
from tests.emulator.planted_cases import CASES, GLOBAL_RACES
from tests.emulator.program_cases import LEVELS, PROGRAMS, Planted, bug_lines, compiled


def check(planted: Planted, error: KernelError) -> None:
    """Compares an error with what was known beforehand."""
    assert type(error) is planted.error, str(error)
    assert error.kernel == planted.kernel
    assert error.file is not None and Path(error.file).name == planted.file
    assert error.line in bug_lines(planted.file)[planted.kernel], str(error)
    assert planted.message in str(error)
    for name in ("argument", "element", "block", "thread"):
        expected = getattr(planted, name)
        if expected is not None:
            assert getattr(error, name) == expected, f"{name}: {error}"


def launch(planted: Planted, level: int, **options: Any) -> KernelError:
    kernel = compiled(f"buggy/{planted.file}", level, **options).get_function(planted.kernel)
    with pytest.raises(KernelError) as caught:
        kernel(planted.grid, planted.size, planted.args(), shared_mem=planted.shared_mem)
    return caught.value


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("planted", CASES, ids=lambda planted: planted.kernel)
def test_planted_bug_is_caught(planted: Planted, level: int) -> None:
    check(planted, launch(planted, level, **planted.options))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("planted", GLOBAL_RACES, ids=lambda planted: planted.kernel)
def test_race_between_blocks_is_caught(planted: Planted, level: int) -> None:
    check(planted, launch(planted, level, global_races=True))


def test_every_marked_kernel_has_a_case() -> None:
    files = sorted((PROGRAMS / "buggy").glob("*.cu"))
    marked = {kernel for file in files for kernel in bug_lines(file.name)}
    assert marked == {planted.kernel for planted in [*CASES, *GLOBAL_RACES]}
