"""How much memory a model takes, and how many requests then fit: arithmetic on its shape alone.

Owns the formulas and the table of GPUs. It opens no file and asks no device; the shapes come from a
model family's own tables, so that there is one truth about them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from cupaged.config import ModelConfig
from cupaged.errors import CapacityError, ConfigError
from cupaged.loading.weights import WeightEntry, expand
from cupaged.ops import BYTES_PER_ELEMENT, KVCacheSpec, StepLimits
from cupaged.ops.step_memory import StepMemory
from cupaged.resources import kv_blocks_for

GIB = 2**30
_MULTIPROCESSORS = 132  # of the GPU that an estimate is for
GPU_MEMORY_UTILIZATION = 0.92  # the rest is for the driver, the context and the kernels


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU. memory_mib: as its driver reports it, error correction on."""

    memory_mib: int
    has_bfloat16: bool = True

    @property
    def memory_bytes(self) -> int:
        """All of it."""
        return self.memory_mib << 20


GPUS = {
    "T4": Gpu(15360, has_bfloat16=False),
    "V100-16": Gpu(16384, has_bfloat16=False),
    "V100-32": Gpu(32768, has_bfloat16=False),
    "L4": Gpu(23034),
    "A10": Gpu(23028),
    "L40S": Gpu(46068),
    "A100-40": Gpu(40960),
    "A100-80": Gpu(81920),
    "H100": Gpu(81559),
    "H200": Gpu(143771),
    "B200": Gpu(183359),
    "RTX3090": Gpu(24576),
    "RTX4090": Gpu(24564),
    "RTX5090": Gpu(32607),
}


class Family(Protocol):
    """The tables of a model family, as far as they matter here; see `cupaged.models`."""

    @staticmethod
    def name_table(c: ModelConfig) -> Sequence[WeightEntry]:
        """Every weight."""

    @staticmethod
    def kv_cache_specs(c: ModelConfig, block_size: int, dtype: str) -> Sequence[KVCacheSpec]:
        """What each layer keeps a token."""

    @staticmethod
    def workspace_widths(c: ModelConfig) -> Mapping[str, int]:
        """The buffers of a step, in elements a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model as numbers of elements. A tied head counts once.

    rotary_elements_per_position: cosines and sines of the RoPE, kept for every position.
    products: (out_features, in_features) of each different linear weight.
    kv_specs: the different kinds of layers, with one position a block.
    """

    num_parameters: int
    kv_elements_per_token: int
    workspace_elements_per_token: int
    rotary_elements_per_position: int
    hidden_size: int
    vocab_size: int
    num_q_heads: int
    products: tuple[tuple[int, int], ...]
    kv_specs: tuple[KVCacheSpec, ...]

    @classmethod
    def of(cls, family: Family, config: ModelConfig) -> Shape:
        """From the family's tables; for a plain model a token keeps
        2 * num_layers * num_kv_heads * head_dim elements."""
        entries = expand(family.name_table(config), config.num_layers)
        specs = family.kv_cache_specs(config, 1, "float32")
        return cls(
            num_parameters=sum(entry.num_elements for entry in entries),
            kv_elements_per_token=sum(s.num_kv_heads * (s.k_dim + s.v_dim) for s in specs),
            workspace_elements_per_token=sum(family.workspace_widths(config).values()),
            rotary_elements_per_position=config.head_dim,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            num_q_heads=config.num_heads,
            products=tuple(
                dict.fromkeys((e.rows, e.columns) for e in entries if e.kind == "linear")
            ),
            kv_specs=tuple(dict.fromkeys(specs)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Engine options that memory depends on; the defaults are the engine's."""

    max_model_len: int
    block_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_logprobs: int = 20
    num_host_blocks: int = 0

    def __post_init__(self) -> None:
        for name in ("max_model_len", "block_size", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "an integer >= 1")

    @property
    def blocks_per_request(self) -> int:
        """Blocks that max_model_len tokens fill."""
        return -(-self.max_model_len // self.block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Bytes, and what they hold. memory_bytes: what weights, workspace and pool may take."""

    dtype: str
    limits: Limits
    num_parameters: int
    weight_bytes: int
    workspace_bytes: int
    kv_bytes_per_token: int
    memory_bytes: int
    num_blocks: int

    @property
    def pool_tokens(self) -> int:
        """Tokens that the pool holds."""
        return self.num_blocks * self.limits.block_size

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pool's blocks."""
        return self.pool_tokens * self.kv_bytes_per_token

    @property
    def num_requests(self) -> int:
        """Requests of max_model_len tokens that fit at the same time, each in whole blocks."""
        return self.num_blocks // self.limits.blocks_per_request

    @property
    def longest_tokens(self) -> int:
        """Tokens of the longest single request."""
        return min(self.limits.max_model_len, self.pool_tokens)


# Bytes that a device's operations take for themselves, see `Ops.buffer_bytes`.
BufferBytes: TypeAlias = Callable[[StepLimits, Sequence[tuple[int, int]]], int]
BlocksIn: TypeAlias = Callable[[int, int, Limits], int]  # (free bytes, bytes of a block, limits)


def estimate(
    shape: Shape,
    *,
    dtype: str,
    limits: Limits,
    memory_bytes: int,
    blocks_in: BlocksIn,
    buffer_bytes: BufferBytes,
) -> Estimate:
    """What the parts of an engine take, and the pool that is left.

    Args:
        dtype: of weights, activations and cache.
        memory_bytes: what all of it may take.
        blocks_in: the rule by which the pool is sized: `blocks_on_cpu` or `blocks_on_gpu`.
        buffer_bytes: what operations take: `no_buffers`, or `gpu_buffers` of the dtype.
    """
    size = BYTES_PER_ELEMENT[dtype]
    weights = shape.num_parameters * size
    workspace = workspace_bytes(shape, limits, size, buffer_bytes)
    per_token = shape.kv_elements_per_token * size
    left = memory_bytes - weights - workspace
    return Estimate(
        dtype=dtype,
        limits=limits,
        num_parameters=shape.num_parameters,
        weight_bytes=weights,
        workspace_bytes=workspace,
        kv_bytes_per_token=per_token,
        memory_bytes=memory_bytes,
        num_blocks=blocks_in(left, per_token * limits.block_size, limits),
    )


def workspace_bytes(
    shape: Shape, limits: Limits, element_bytes: int, buffer_bytes: BufferBytes
) -> int:
    """Buffers of the largest step: activations and hidden states, and in float32 the logits and a
    copy of those that are told about; the table of the RoPE, in float32, too; and what operations
    take for themselves."""
    activations = limits.max_num_batched_tokens * shape.workspace_elements_per_token
    num_logits = min(limits.max_num_seqs, limits.max_num_batched_tokens)
    hidden = num_logits * shape.hidden_size
    rotary = limits.max_model_len * shape.rotary_elements_per_position
    logits = (num_logits + limits.max_num_seqs) * shape.vocab_size
    own = buffer_bytes(step_limits(shape, limits), shape.products)
    return (activations + hidden) * element_bytes + (logits + rotary) * 4 + own


def step_limits(shape: Shape, limits: Limits) -> StepLimits:
    """The largest step, with a pool that holds the longest sequence."""
    return StepLimits(
        max_tokens=limits.max_num_batched_tokens,
        max_seqs=limits.max_num_seqs,
        max_logits=min(limits.max_num_seqs, limits.max_num_batched_tokens),
        max_context=limits.max_model_len,
        max_blocks_per_seq=limits.blocks_per_request,
        vocab_size=shape.vocab_size,
        max_logprobs=limits.max_logprobs,
        max_steps_in_flight=1,
        num_q_heads=shape.num_q_heads,
        kv_specs=shape.kv_specs,
        num_host_blocks=limits.num_host_blocks,
    )


def no_buffers(limits: StepLimits, products: Sequence[tuple[int, int]]) -> int:
    """The operations of `cpu` take scratch memory by need, and little."""
    return 0


def gpu_buffers(dtype: str) -> BufferBytes:
    """Of `CudaOps` on a large GPU; on a small one they may be less."""

    def total_bytes(limits: StepLimits, products: Sequence[tuple[int, int]]) -> int:
        return StepMemory(limits, _MULTIPROCESSORS).total_bytes(products, dtype)

    return total_bytes


def blocks_on_gpu(available_bytes: int, bytes_per_block: int, limits: Limits) -> int:
    """All that fit: a GPU serves nothing else."""
    return max(0, available_bytes // bytes_per_block)


def blocks_on_cpu(available_bytes: int, bytes_per_block: int, limits: Limits) -> int:
    """What the engine takes by itself on a machine that others use, too; 0 if none fits."""
    try:
        return kv_blocks_for(
            bytes_per_block=bytes_per_block,
            block_size=limits.block_size,
            max_model_len=limits.block_size,  # one block is enough: more is the caller's to judge
            max_num_seqs=limits.max_num_seqs * limits.blocks_per_request,
            available_bytes=available_bytes,
        )
    except CapacityError:
        return 0


def check_dtype(asked: object) -> None:
    """Raises ConfigError for what is neither "auto" nor a type."""
    if asked not in ("auto", *BYTES_PER_ELEMENT):
        raise ConfigError("dtype", asked, f"'auto' or one of {', '.join(BYTES_PER_ELEMENT)}")


def half_dtype(asked: str, stored: str) -> str:
    """What kernels compute in: "auto" is the stored type if that has 16 bits, else bfloat16."""
    if asked != "auto":
        return asked
    return stored if stored in ("float16", "bfloat16") else "bfloat16"


def dtype_on(gpu: Gpu | None, asked: str, stored: str) -> str:
    """The type of weights, activations and cache.

    Args:
        gpu: None for `cpu`, which computes in float32.
        asked: "auto", or a type.
        stored: what config.json names; of no account unless it is a type of 16 bits.

    Raises:
        ConfigError: an unknown type, or one that this GPU does not compute in.
    """
    check_dtype(asked)
    if gpu is None:
        return "float32" if asked == "auto" else asked
    if asked == "auto":
        return half_dtype(asked, stored) if gpu.has_bfloat16 else "float16"
    if asked == "bfloat16" and not gpu.has_bfloat16:
        raise ConfigError("dtype", asked, "float16 or float32 on this GPU, which has no bfloat16")
    return asked
