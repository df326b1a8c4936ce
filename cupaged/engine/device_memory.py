"""What an engine takes of a device: the limits that its buffers follow from, and the KV pool.

Owns the words for memory that is not there: what was to be taken, how much, and which options ask
for less.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from cupaged.config import EngineConfig
from cupaged.ops import KVCache, KVCacheSpec, Ops, StepLimits
from cupaged.runtime.protocol import DeviceMemoryError

__all__ = [
    "BUFFER_OPTIONS",
    "POOL_OPTIONS",
    "WEIGHT_OPTIONS",
    "empty_host_pool",
    "empty_pool",
    "naming",
    "step_limits",
]

BUFFER_OPTIONS = "lower max_num_batched_tokens, max_num_seqs or max_logprobs"
POOL_OPTIONS = "lower num_gpu_blocks_override, kv_cache_memory_bytes or gpu_memory_utilization"
WEIGHT_OPTIONS = "use a type of fewer bits (dtype), or a device with more memory"


@contextmanager
def naming(what: str, advice: str) -> Iterator[None]:
    """Say what memory was for, where there is too little of it.

    Raises:
        DeviceMemoryError: with what, the bytes, what is free (where the device tells), and advice.
    """
    try:
        yield
    except (DeviceMemoryError, MemoryError) as error:
        raise DeviceMemoryError(f"no memory for {what}: {error}; {advice}") from error


def step_limits(config: EngineConfig, num_q_heads: int, specs: Sequence[KVCacheSpec]) -> StepLimits:
    """The largest step of an engine."""
    return StepLimits(
        max_tokens=config.max_num_batched_tokens,
        max_seqs=config.max_num_seqs,
        max_logits=config.max_logits,
        max_context=config.max_model_len,
        max_blocks_per_seq=config.max_blocks_per_seq,
        vocab_size=config.vocab_size,
        max_logprobs=config.max_logprobs,
        max_steps_in_flight=config.max_steps_in_flight,
        num_q_heads=num_q_heads,
        kv_specs=tuple(dict.fromkeys(specs)),
        num_host_blocks=config.num_host_blocks,
    )


def empty_pool(ops: Ops, specs: Sequence[KVCacheSpec], num_blocks: int) -> list[KVCache]:
    """The blocks of every layer.

    Raises:
        DeviceMemoryError: they do not fit.
    """
    total = num_blocks * sum(spec.bytes_per_block for spec in specs)
    caches: list[KVCache] = []
    for spec in specs:
        what = (
            f"layer {len(caches)} of {len(specs)} of the KV pool ({num_blocks} blocks, "
            f"{total} bytes in all)"
        )
        with naming(what, POOL_OPTIONS):
            caches.append(ops.empty_kv_cache(spec, num_blocks))
    return caches


def empty_host_pool(ops: Ops, specs: Sequence[KVCacheSpec], num_blocks: int) -> list[KVCache]:
    """The blocks of every layer in the host's memory; none if there are to be no blocks.

    Raises:
        DeviceMemoryError: they do not fit.
    """
    if not num_blocks:
        return []
    total = num_blocks * sum(spec.bytes_per_block for spec in specs)
    with naming(f"{num_blocks} KV blocks of the host, {total} bytes", "lower swap_space"):
        return [ops.empty_host_cache(spec, num_blocks) for spec in specs]
