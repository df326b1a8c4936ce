"""The module that `cupaged/ops/native` is compiled to; see module.cpp for what each call checks."""

from typing import Any

from numpy.typing import NDArray

Array = NDArray[Any]

def multiply(
    out: Array,
    x: Array,
    bias: Array | None,
    packed: Array,
    format: int,
    out_features: int,
    in_features: int,
    /,
) -> None: ...
def gather(
    out: Array,
    ids: Array,
    packed: Array,
    format: int,
    out_features: int,
    in_features: int,
    /,
) -> None: ...
def pack(
    packed: Array,
    rows: Array,
    stored: int,
    format: int,
    out_features: int,
    in_features: int,
    /,
) -> None: ...
def packed_bytes(format: int, out_features: int, in_features: int, /) -> int: ...
def rms_norm(
    out: Array, residual: Array, x: Array | None, weight: Array, eps: float, /
) -> None: ...
def silu_mul(out: Array, gate_up: Array, columns: int, /) -> None: ...
def rotate_and_keep(
    qkv: Array,
    positions: Array,
    table: Array,
    slots: Array,
    k: Array,
    v: Array,
    kv_heads: int,
    block_size: int,
    k_dim: int,
    v_dim: int,
    query_heads: int,
    /,
) -> None: ...
def attend(
    out: Array,
    qkv: Array,
    positions: Array,
    block_table: Array,
    tasks: Array,
    sequences: int,
    scale: float,
    k: Array,
    v: Array,
    kv_heads: int,
    block_size: int,
    k_dim: int,
    v_dim: int,
    query_heads: int,
    /,
) -> None: ...
def set_threads(count: int, /) -> None: ...
def num_threads() -> int: ...
def instructions() -> str: ...
def all_instructions() -> list[str]: ...
def use_instructions(name: str, /) -> None: ...
