"""How much memory there is, and how many KV blocks to take of it."""

from __future__ import annotations

import os
from pathlib import Path

from cupaged.errors import CapacityError

_POOL_SHARE = 0.4  # of the memory that is free once the weights are loaded
_MEMINFO = Path("/proc/meminfo")


def available_memory_bytes() -> int:
    """Memory that can be taken without swapping, in bytes."""
    try:
        for line in _MEMINFO.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux: the total is the best that can be said
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def kv_blocks_for(
    *,
    bytes_per_block: int,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    available_bytes: int,
    pool_bytes: int | None = None,
) -> int:
    """Blocks of the KV pool: what all sequences at full length need, within the memory.

    Args:
        bytes_per_block: of one block in all layers.
        available_bytes: free memory with the weights loaded; at most 40 % of it is used.
        pool_bytes: what the user gave for the pool; replaces that limit.

    Raises:
        CapacityError: not even one sequence of max_model_len tokens fits.
    """
    wanted = max_num_seqs * -(-max_model_len // block_size)
    limit = int(available_bytes * _POOL_SHARE) if pool_bytes is None else pool_bytes
    num_blocks = min(wanted, limit // bytes_per_block)
    if num_blocks * block_size < max_model_len:
        raise CapacityError(
            "max_model_len",
            max_model_len,
            f"at most {num_blocks * block_size}: the KV pool has room for {num_blocks} blocks of "
            f"{block_size} tokens in {limit / 2**20:.0f} MiB",
        )
    return num_blocks
