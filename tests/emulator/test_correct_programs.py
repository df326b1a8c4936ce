"""No false alarm: correct programs run clean and give NumPy's results.

Each program of `programs/correct` runs at -O0 and -O2 in checked mode, in the plain thread order
and in random orders (seeds); correct_cases.py says how.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.emulator.correct_cases import PROGRAMS
from tests.emulator.program_cases import LEVELS, compiled

ORDERS = (None, 0, 1, 2, 3)
BETWEEN_BLOCKS = ("last_block_sum", "spin_lock", "float_maximum", "all_atomics", "histogram")


def run(name: str, level: int, seed: int | None, **options: Any) -> None:
    file, kernel_name, make = PROGRAMS[name]
    launch = make()
    if file == "language.cu":
        options["name_expressions"] = ("scale_by<float, 3>", "scale_by<int, -2>")
    if seed is not None:
        options["seed"] = seed
    kernel = compiled(f"correct/{file}", level, **options).get_function(kernel_name)
    kernel(launch.grid, launch.size, launch.args, shared_mem=launch.shared_mem)
    for place, expected in launch.expected.items():
        actual = launch.args[place].reshape(expected.shape)
        if launch.tolerance == 0.0:
            np.testing.assert_array_equal(actual, expected.astype(actual.dtype))
        else:
            np.testing.assert_allclose(actual, expected, rtol=0, atol=launch.tolerance)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_correct_program_gives_numpy_result_in_every_order(name: str, level: int) -> None:
    for seed in ORDERS:
        run(name, level, seed)


@pytest.mark.parametrize("name", BETWEEN_BLOCKS)
def test_correct_orders_between_blocks_are_not_flagged(name: str) -> None:
    for seed in ORDERS:
        run(name, 0, seed, global_races=True)


def test_module_variable_keeps_its_value_between_launches() -> None:
    kernel = compiled("correct/language.cu", 0).get_function("tickets")
    for _ in range(2):
        out = np.full(64, -1, np.int32)
        kernel((1,), (64,), [out])
        assert sorted(out) == list(range(64))


@pytest.mark.parametrize("level", LEVELS)
def test_printf_prints_once(level: int, capfd: pytest.CaptureFixture[str]) -> None:
    compiled("correct/language.cu", level).get_function("hello")((3,), (8,), [np.int32(42)])
    assert capfd.readouterr().out == "block 1 says 42 and 0.25\n"
