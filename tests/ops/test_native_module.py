"""The native module by itself: sizes that do not fit are refused, its threads serve everybody."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cupaged.errors import ConfigError
from cupaged.ops import _native as native
from cupaged.ops.native_ops import NativeOps, use_native_threads
from tests.ops.cpu_kernels import INSTRUCTIONS, using
from tests.ops.test_cpu_ops import normal, poisoned

FLOATS, BYTES = poisoned(6, 4), np.zeros(16 * 4 * 4, np.uint8)
IDS, LONGS = np.zeros(6, np.int32), np.zeros(6, np.int64)
PAGES = (poisoned(2, 1, 4, 2), poisoned(2, 1, 4, 2), 1, 4, 2, 2, 1)  # of 1 query head: 6 wide
QKV, OUT, TABLE = poisoned(6, 6), poisoned(6, 2), poisoned(2, 9, 1)
BLOCKS, TASKS = np.zeros((1, 2), np.int32), np.array([[0, 0, 6]], np.int32)


ODD = np.zeros(6 * 4 * 4 + 1, np.uint8)[1:]
READ_ONLY = poisoned(6, 5)
READ_ONLY.flags.writeable = False


def with_one(values: tuple[Any, ...], place: int, value: Any) -> tuple[Any, ...]:
    return (*values[:place], value, *values[place + 1 :])


MULTIPLY = (poisoned(6, 5), FLOATS, None, BYTES, 0, 5, 4)
GATHER = (FLOATS, IDS, BYTES, 0, 5, 4)
PACK = (BYTES, poisoned(5, 4), 0, 0, 5, 4)
NORM = (FLOATS, FLOATS, FLOATS, poisoned(4), 1e-5)
ROTATE = (QKV, IDS, TABLE, LONGS, *PAGES)
ATTEND = (OUT, QKV, IDS, BLOCKS, TASKS, 1, 0.5, *PAGES)


def test_what_the_others_differ_from_is_right() -> None:
    native.multiply(*MULTIPLY)
    native.gather(*GATHER)
    native.pack(*PACK)
    native.rms_norm(*NORM)
    native.rotate_and_keep(*ROTATE)
    native.attend(*ATTEND)


@pytest.mark.parametrize(
    ("call", "values", "place", "value", "message"),
    [
        (native.multiply, MULTIPLY, 0, poisoned(29), "out has no whole rows"),
        (native.multiply, MULTIPLY, 1, poisoned(5, 4), "x has not the size of out's rows"),
        (native.multiply, MULTIPLY, 2, poisoned(4), "bias has not the size of out_features"),
        (native.multiply, MULTIPLY, 3, BYTES[1:], "packed has not the size"),
        (native.multiply, MULTIPLY, 4, 4, "format is none of 0 to 3"),
        (native.multiply, MULTIPLY, 4, 2, "quantised weights must be a multiple of 32"),
        (native.multiply, MULTIPLY, 6, 0, "in_features is 0, must be at least 1"),
        (native.multiply, MULTIPLY, 0, READ_ONLY, "read-only"),
        (native.multiply, MULTIPLY, 1, ODD, "x is not aligned to 4 bytes"),
        (native.multiply, MULTIPLY, 5, 2**62, "out_features is 4611686018427387904, must be at "),
        (native.packed_bytes, (0, 5, 4), 2, 2**31, "in_features is 2147483648, must be at most"),
        (native.silu_mul, (FLOATS, poisoned(6, 8), 4), 2, 2**62, "must be at most 1073741824"),
        (native.gather, GATHER, 1, IDS[1:], "out has not the size of ids"),
        (native.gather, GATHER, 1, IDS + 5, "ids has one that is no row"),
        (native.gather, GATHER, 1, IDS - 1, "ids has one that is no row"),
        (native.pack, PACK, 0, BYTES[1:], "packed has not the size"),
        (native.pack, PACK, 1, poisoned(5, 3), "rows has not the size"),
        (native.pack, PACK, 2, 5, "stored is none of 0 to 4"),
        (native.pack, PACK, 2, 2, "stored so cannot be packed so"),
        (native.rms_norm, NORM, 1, poisoned(5, 4), "residual has 80 bytes, must have 96"),
        (native.rms_norm, NORM, 2, poisoned(5, 4), "x has not the size of out"),
        (native.rms_norm, NORM, 3, poisoned(5), "out has no whole rows of weight"),
        (native.silu_mul, (FLOATS, poisoned(6, 8), 4), 1, FLOATS, "gate_up has 96 bytes"),
        (native.rotate_and_keep, ROTATE, 0, OUT, "qkv has not the size of positions"),
        (native.rotate_and_keep, ROTATE, 1, IDS + 9, "positions has one that is not in"),
        (native.rotate_and_keep, ROTATE, 3, LONGS + 8, "slots has one that is in no block"),
        (native.rotate_and_keep, ROTATE, 4, poisoned(15), "k has no whole blocks"),
        (native.rotate_and_keep, ROTATE, 5, poisoned(3, 1, 4, 2), "v has not the blocks of k"),
        (native.rotate_and_keep, ROTATE, 8, 3, "k has no whole blocks"),
        (native.rotate_and_keep, ROTATE, 6, 2**30, "k has no whole blocks"),
        (native.rotate_and_keep, ROTATE, 7, 2**32, "block_size is 4294967296, must be at most"),
        (native.rotate_and_keep, ROTATE, 8, 2**17, "k_dim is 131072, must be at most 65536"),
        (native.attend, ATTEND, 0, QKV, "out has not the size of positions"),
        (native.attend, ATTEND, 2, IDS + 8, "block_table is too narrow"),
        (native.attend, ATTEND, 2, IDS - 1, "positions has a negative one"),
        (native.attend, ATTEND, 3, BLOCKS + 2, "block_table has what is no block"),
        (native.attend, ATTEND, 3, BLOCKS - 1, "block_table has what is no block"),
        (native.attend, ATTEND, 4, TASKS + 1, "tasks has one that is not in the step"),
        (native.attend, ATTEND, 5, 3, "block_table has no whole rows"),
    ],
)
def test_sizes_that_do_not_fit(
    call: Callable[..., None], values: tuple[Any, ...], place: int, value: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        call(*with_one(values, place, value))


def test_wrong_calls() -> None:
    with pytest.raises(ValueError, match="multiply: takes 7 arguments, got 1"):
        native.multiply(FLOATS)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="bytes-like"):
        native.multiply(5, *MULTIPLY[1:])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="contiguous"):
        native.multiply(np.empty((12, 5), np.float32)[::2], *MULTIPLY[1:])
    with pytest.raises(TypeError, match="int"):
        native.multiply(*with_one(MULTIPLY, 5, "5"))
    with pytest.raises(ValueError, match="no 'avx9000'"):
        native.use_instructions("avx9000")
    with pytest.raises(ValueError, match="count is 0, must be at least 1"):
        native.set_threads(0)


def test_a_task_of_too_many_queries() -> None:
    tokens = 1025
    positions, tasks = np.zeros(tokens, np.int32), np.array([[0, 0, tokens]], np.int32)
    out, qkv = poisoned(tokens, 2), poisoned(tokens, 6)
    with pytest.raises(ValueError, match="tasks has one of more than 1024 queries"):
        native.attend(out, qkv, positions, BLOCKS, tasks, *ATTEND[5:])


@pytest.mark.skipif(sys.platform != "linux", reason="limits the memory of a process")
def test_threads_that_the_system_does_not_give() -> None:
    """The address space has no room for their stacks. The kernels work on, on one thread."""
    code = """
import resource
import numpy as np
from cupaged.ops import _native as native
from cupaged.ops.native_ops import NativeOps, use_native_threads
from cupaged.runtime.protocol import DeviceUnavailableError
native.set_threads(2)
resource.setrlimit(resource.RLIMIT_AS, (2**31, resource.RLIM_INFINITY))
try:
    use_native_threads(1000, 1)
except DeviceUnavailableError as error:
    print(error, native.num_threads())
weight = NativeOps().pack_weight(np.ones((200, 64), np.float32))
out = np.zeros((20, 200), np.float32)
NativeOps().linear(out, np.ones((20, 64), np.float32), weight)
print((out == 64).all())
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=120, capture_output=True, text=True)
    expected = "cpu: set_threads: the system has no 1000 threads to give; set `threads` to fewer 1"
    assert done.stdout.splitlines() == [expected, "True"], done.stderr


def test_more_threads_than_the_kernels_can_use(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="threads must be at most 1024, got 1025"):
        use_native_threads(1025, 2)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1000000")
    asked: list[int] = []
    monkeypatch.setattr(native, "set_threads", asked.append)
    use_native_threads(None, 2)
    assert asked == [1024]


def test_nothing_to_do_is_no_error() -> None:
    weight = NativeOps().pack_weight(normal(0, 5, 4))
    NativeOps().linear(poisoned(0, 5), poisoned(0, 4), weight)
    NativeOps().embedding(poisoned(0, 4), IDS[:0], weight)
    native.rms_norm(poisoned(0, 4), poisoned(0, 4), None, poisoned(4), 1e-5)


def test_threads_of_python_share_the_threads_of_the_kernels() -> None:
    """Whoever finds them busy works alone; all get what they get alone."""
    weight = NativeOps().pack_weight(normal(1, 200, 64))
    inputs = [normal(i, 20, 64) for i in range(6)]

    def product(x: Any) -> Any:
        out = poisoned(len(x), 200)
        NativeOps().linear(out, x, weight)
        return out

    expected = [product(x) for x in inputs]
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(300):
            if not np.array_equal(product(inputs[i]), expected[i]):
                wrong.append(i)

    with using(INSTRUCTIONS[0], threads=4):
        workers = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert not wrong


def test_a_forked_process_works_alone() -> None:
    code = """
import os, sys
import numpy as np
from cupaged.ops import _native as native
from cupaged.ops.native_ops import NativeOps
native.set_threads(4)
weight = NativeOps().pack_weight(np.ones((200, 64), np.float32))
x, out = np.ones((20, 64), np.float32), np.zeros((20, 200), np.float32)
NativeOps().linear(out, x, weight)
child = os.fork()
if child == 0:
    out[:] = 0
    NativeOps().linear(out, x, weight)
    os._exit(0 if (out == 64).all() and native.num_threads() == 1 else 1)
_, status = os.waitpid(child, 0)
NativeOps().linear(out, x, weight)
sys.exit(status or not (out == 64).all() or native.num_threads() != 4)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], timeout=120, check=False)
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("variables", "asked", "expected"),
    [
        ({}, None, 7),
        ({}, 3, 3),
        ({"OMP_NUM_THREADS": "2"}, None, 2),
        ({"OPENBLAS_NUM_THREADS": "x", "OMP_NUM_THREADS": "5"}, None, 5),
        ({"OPENBLAS_NUM_THREADS": "0"}, None, 7),
        ({"OPENBLAS_NUM_THREADS": "2"}, 4, 4),
    ],
)
def test_who_says_how_many_threads(
    variables: dict[str, str], asked: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(os.environ):
        if name.endswith("_NUM_THREADS"):
            monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with using(INSTRUCTIONS[0]):
        assert use_native_threads(asked, 7) == (expected, INSTRUCTIONS[0])
