"""The work for which the limits of kernels are told: one step of Llama-3-8B, kernel by kernel.

Owns shapes, bytes and operations, written down by hand from the formulas in the kernels' headers.
It runs and compiles nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cupaged.ops.cuda_sampling import row_block
from cupaged.ops.launch_shapes import norm_threads

__all__ = ["CASES", "Case"]

HIDDEN, INNER, VOCAB = 4096, 14336, 128256
Q_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
SEQUENCES, CONTEXT = 64, 2048  # of a decode step
PREFILL = 2048  # tokens
HALF = 2  # bytes of bf16
KV_BYTES = 2 * KV_HEADS * HEAD_DIM * HALF  # of a position
BF16: dict[str, str | int] = {"DTYPE": "bf16"}
ATTENTION: dict[str, str | int] = {**BF16, "HEAD_DIM": HEAD_DIM, "BLOCK_SIZE": 16}


@dataclass(frozen=True, slots=True)
class Case:
    """A kernel and its work.

    num_bytes: that must cross to or from the GPU's memory. flops: with those of padding, as they
    are computed. unit: "tensor" or "fp32". streamed: of the bytes that the inner loop loads by 16
    bytes a lane, the share that comes from memory rather than from a cache.
    counted: defines with which the instructions of the inner loop are counted, where others than
    those of the launch tell better. attention: choose the variant for each architecture.
    counts: whether the inner loop tells instructions a byte: not where it has others inside, nor
    where memory is moved by less than 16 bytes a lane.
    few: one of those that must not be bound by the issue of instructions.
    """

    name: str
    file: str
    kernel: str
    work: str
    num_bytes: int
    flops: int
    defines: Mapping[str, str | int] = field(default_factory=lambda: BF16)
    threads: int = 256
    shared_bytes: int = 0
    unit: str = "fp32"
    streamed: float = 1.0
    counted: Mapping[str, str | int] = field(default_factory=dict)
    attention: bool = False
    counts: bool = True
    few: bool = False


def _move(file: str, kernel: str, work: str, num_bytes: int, flops: int = 0, **how: int) -> Case:
    return Case(
        kernel, file, kernel, work, num_bytes, flops, threads=how.get("threads", 256),
        counts=bool(how.get("counts", True)),
    )  # fmt: skip


def _product(kernel: str, tokens: int, padded: int, streamed: float, threads: int,
             shared_bytes: int = 0) -> Case:  # fmt: skip
    """The gate and up projections."""
    features = 2 * INNER
    num_bytes = HALF * (features * HIDDEN + tokens * (features + HIDDEN))
    return Case(
        kernel, f"{kernel.rsplit('_', 1)[0]}.cu", kernel, f"{tokens} tokens, 4096 to 28672",
        num_bytes, 2 * padded * features * HIDDEN, threads=threads, shared_bytes=shared_bytes,
        unit="tensor", streamed=streamed, few=tokens <= 32,
    )  # fmt: skip


def _attention() -> list[Case]:
    """Decode: rows of a KV head are padded to 16. Prefill: half of the square, four rows of it."""
    decoded, square = SEQUENCES * CONTEXT, PREFILL * (PREFILL + 1) // 2
    each = 4 * HEAD_DIM
    decode = Case(
        "attention, decode", "paged_attention.cu", "paged_attention",
        f"{SEQUENCES} sequences of {CONTEXT}", decoded * KV_BYTES,
        each * 16 * KV_HEADS * decoded, ATTENTION, 128, unit="tensor",
        counted={"ROW_TILES": 1}, attention=True, few=True,
    )  # fmt: skip
    prefill = Case(
        "attention, prefill", "paged_attention.cu", "paged_attention", f"{PREFILL} tokens",
        PREFILL * (KV_BYTES + 2 * HALF * Q_HEADS * HEAD_DIM), each * Q_HEADS * square,
        ATTENTION, 128, unit="tensor", attention=True,
    )  # fmt: skip
    partial = SEQUENCES * Q_HEADS * 8 * 4 * (HEAD_DIM + 2)
    merge = Case(
        "merge_attention_splits", "paged_attention.cu", "merge_attention_splits",
        f"{SEQUENCES} tokens of 8 splits", partial + SEQUENCES * Q_HEADS * HEAD_DIM * HALF,
        2 * partial // 4, ATTENTION, 128, attention=True,
    )  # fmt: skip
    return [decode, prefill, merge]


def _float32(kernel: str, tokens: int) -> Case:
    num_bytes = 4 * (INNER * HIDDEN + tokens * (INNER + HIDDEN))
    return Case(
        kernel, "gemm_f32.cu", kernel, f"{tokens} tokens, 4096 to 14336", num_bytes,
        2 * tokens * INNER * HIDDEN, {"DTYPE": "f32"}, 128, counts=False,
    )  # fmt: skip


def _logits(file: str, kernel: str, flops_each: int, threads: int) -> Case:
    size = SEQUENCES * VOCAB
    work = f"{SEQUENCES} rows of {VOCAB}, read once"
    return Case(kernel, file, kernel, work, 4 * size, flops_each * size, {}, threads)


_ROW = HIDDEN * HALF
_TOKENS = f"{PREFILL} tokens"
_BLOCK = 16 * KV_HEADS * HEAD_DIM * HALF
_ROPE_BYTES = HALF * HEAD_DIM * (2 * Q_HEADS + 3 * KV_HEADS + 2 * KV_HEADS)

CASES = (
    *_attention(),
    _product("gemm_rows_8", 8, 8, 4 / 6, 128),  # 4 of 6 loads are of the weight
    _product("gemm_rows_16", 16, 16, 4 / 8, 128),
    _product("gemm_rows_32", 32, 32, 4 / 12, 128),
    _product("gemm_tiles_64", 128, 128, 1.0, 128, 49152),
    _product("gemm_tiles_128", 512, 512, 1.0, 256, 98304),
    _product("gemm_tiles_256", 2048, 2048, 1.0, 256, 98304),
    _float32("gemm_f32_rows", 16),
    _float32("gemm_f32_tiles", 512),
    _move("gemm_pack.cu", "pack_weight", "4096 x 4096", 6 * HIDDEN * HIDDEN, counts=False),
    _move("embedding_packed.cu", "embedding_packed", _TOKENS, 3 * PREFILL * _ROW, counts=False),
    _move("gather_rows.cu", "gather_rows", f"{SEQUENCES} rows", 2 * SEQUENCES * _ROW),
    *(
        _move("norm.cu", kernel, _TOKENS, moved * PREFILL * _ROW, 4 * PREFILL * HIDDEN,
              threads=norm_threads(HIDDEN))
        for kernel, moved in (("rms_norm", 2), ("add_rms_norm", 4), ("layer_norm", 2))
    ),
    *(
        _move("activation.cu", kernel, _TOKENS, 3 * PREFILL * INNER * HALF, 20 * PREFILL * INNER)
        for kernel in ("silu_mul", "gelu_mul")
    ),
    *(
        _move("activation.cu", kernel, _TOKENS, 2 * PREFILL * INNER * HALF, flops * PREFILL * INNER)
        for kernel, flops in (("gelu", 20), ("relu", 1))
    ),
    Case("rope_and_cache", "rope.cu", "rope_and_cache", _TOKENS, PREFILL * _ROPE_BYTES,
         3 * PREFILL * HEAD_DIM * (Q_HEADS + KV_HEADS), ATTENTION),
    *(
        _move("kv_cache.cu", kernel, "64 blocks of 16", 2 * sides * 64 * _BLOCK)
        for kernel, sides in (("copy_blocks", 2), ("gather_blocks", 1), ("scatter_blocks", 1))
    ),
    _logits("sampling.cu", "sample", 20, row_block(VOCAB)),
    _logits("logits_logprobs.cu", "logprobs", 20, row_block(VOCAB)),
    _logits("logits_edits.cu", "forbid_rows", 0, 256),
)  # fmt: skip
