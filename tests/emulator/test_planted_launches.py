"""Wrong launches are refused before the first thread runs, and say what is due.

The kernels of `programs/buggy/launch.cu` are correct; the mistakes are the caller's. A refused
launch must leave the arrays as they were.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupaged.emulator.errors import EmulatorError, LaunchError
from tests.emulator.program_cases import compiled, f32, i32

N = np.int32(32)
FACTOR = np.float32(2)
SHAPE = np.dtype([("rows", np.int32), ("columns", np.int32)])


def half_empty(array: Any) -> Any:
    return np.repeat(array, 2)[::2]


# kernel, grid, block, arguments, shared memory, fragments of the message
Wrong = tuple[str, tuple[int, ...], tuple[int, ...], list[Any], int, list[str]]
WRONG: dict[str, Wrong] = {
    "block_over_launch_bounds": (
        "scale_bounded",
        (1,),
        (65,),
        [f32(32), FACTOR, N],
        0,
        ["65", "64"],
    ),
    "block_over_1024": ("scale", (1,), (1025,), [f32(32), FACTOR, N], 0, ["1025", "1024"]),
    "block_over_1024_by_axes": (
        "scale",
        (1,),
        (32, 32, 2),
        [f32(32), FACTOR, N],
        0,
        ["2048", "1024"],
    ),
    "block_z_over_64": ("scale", (1,), (1, 1, 65), [f32(32), FACTOR, N], 0, ["65", "64"]),
    "empty_block": ("scale", (1,), (0,), [f32(32), FACTOR, N], 0, ["0"]),
    "empty_grid": ("scale", (0,), (32,), [f32(32), FACTOR, N], 0, ["0"]),
    "grid_y_over_65535": ("scale", (1, 65536), (32,), [f32(32), FACTOR, N], 0, ["65536", "65535"]),
    "too_much_shared_memory": ("scale", (1,), (32,), [f32(32), FACTOR, N], 1 << 20, ["1048576"]),
    "negative_shared_memory": ("scale", (1,), (32,), [f32(32), FACTOR, N], -4, ["-4"]),
    "array_of_ints_for_floats": (
        "scale",
        (1,),
        (32,),
        [i32(*range(32)), FACTOR, N],
        0,
        ["x", "int32", "float"],
    ),
    "float64_array_for_floats": (
        "scale",
        (1,),
        (32,),
        [f32(32).astype(np.float64), FACTOR, N],
        0,
        ["x", "float64", "float"],
    ),
    "float64_scalar_for_float": (
        "scale",
        (1,),
        (32,),
        [f32(32), np.float64(2), N],
        0,
        ["factor", "float64"],
    ),
    "int64_scalar_for_int": (
        "scale",
        (1,),
        (32,),
        [f32(32), FACTOR, np.int64(32)],
        0,
        ["n", "int64"],
    ),
    "python_int_for_int": ("scale", (1,), (32,), [f32(32), FACTOR, 32], 0, ["n", "int"]),
    "python_float_for_float": ("scale", (1,), (32,), [f32(32), 2.0, N], 0, ["factor", "float"]),
    "int_array_for_longlong": (
        "offsets",
        (1,),
        (4,),
        [i32(*range(8)), np.int64(1)],
        0,
        ["out", "int32"],
    ),
    "int32_scalar_for_longlong": (
        "offsets",
        (1,),
        (4,),
        [np.zeros(4, np.int64), np.int32(1)],
        0,
        ["start", "int32"],
    ),
    "one_argument_too_few": ("scale", (1,), (32,), [f32(32), FACTOR], 0, ["3", "2"]),
    "one_argument_too_many": ("scale", (1,), (32,), [f32(32), FACTOR, N, N], 0, ["3", "4"]),
    "scalar_for_an_array": ("scale", (1,), (32,), [FACTOR, FACTOR, N], 0, ["x"]),
    "array_for_a_scalar": ("scale", (1,), (32,), [f32(32), f32(32), N], 0, ["factor"]),
    "list_for_an_array": ("scale", (1,), (32,), [[1.0, 2.0], FACTOR, N], 0, ["x", "list"]),
    "none_for_an_array": ("scale", (1,), (32,), [None, FACTOR, N], 0, ["x", "None"]),
    "every_second_element": (
        "scale",
        (1,),
        (32,),
        [half_empty(f32(32)), FACTOR, N],
        0,
        ["x", "contiguous"],
    ),
    "reversed_array": ("scale", (1,), (32,), [f32(32)[::-1], FACTOR, N], 0, ["x", "contiguous"]),
    "foreign_byte_order": (
        "scale",
        (1,),
        (32,),
        [f32(32).astype(">f4"), FACTOR, N],
        0,
        ["x", ">f4"],
    ),
    "struct_of_wrong_size": ("fill_shape", (1,), (1,), [i32(0), np.int32(7)], 0, ["shape"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_launch_is_refused(name: str) -> None:
    kernel_name, grid, block, args, shared_mem, fragments = WRONG[name]
    before = [a.copy() if isinstance(a, np.ndarray) else a for a in args]
    kernel = compiled("buggy/launch.cu", 0).get_function(kernel_name)
    with pytest.raises(LaunchError) as caught:
        kernel(grid, block, args, shared_mem=shared_mem)
    for fragment in [kernel_name, *fragments]:
        assert fragment in str(caught.value)
    for array, kept in zip(args, before, strict=True):
        if isinstance(array, np.ndarray):
            assert np.array_equal(array, kept)


def test_right_launches_of_the_same_kernels_pass() -> None:
    module = compiled("buggy/launch.cu", 0)
    x = f32(32)
    module.get_function("scale_bounded")((1,), (64,), [x, FACTOR, N])
    assert np.array_equal(x, 2 * f32(32))
    area = i32(0)
    module.get_function("fill_shape")((1,), (1,), [area, np.array((3, 5), SHAPE)[()]])
    assert area[0] == 15
    out = np.zeros(4, np.int64)
    module.get_function("offsets")((1,), (4,), [out, np.int64(1 << 40)])
    assert out.tolist() == [(1 << 40) + i for i in range(4)]


def test_mangled_kernel_is_not_found_and_the_error_names_extern_c() -> None:
    module = compiled("buggy/no_extern_c.cu", 0)
    with pytest.raises(EmulatorError, match='extern "C"'):
        module.get_function("scale")


def test_unknown_kernel_is_not_found_and_the_error_lists_the_known_ones() -> None:
    module = compiled("buggy/launch.cu", 0)
    with pytest.raises(EmulatorError, match="scale_bounded"):
        module.get_function("scale_bound")
