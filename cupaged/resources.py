"""Cores and memory as a container sees them, and how many KV blocks to take of the memory.

The limits are the smaller of what the machine has and what the control groups (v1 or v2) of this
process and its parents allow. All files are read below a root, so that tests can make their own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cupaged.errors import CapacityError

_POOL_SHARE = 0.4  # of the memory that is free once the weights are loaded
_CGROUPS = "sys/fs/cgroup"


@dataclass(frozen=True, slots=True)
class Resources:
    """What this process may use.

    cores: at least 1; a quota of 1.5 cores counts as 1.
    memory_bytes: the limit. available_bytes: what is free of it without swapping.
    cores_limited_by, memory_limited_by: "machine", "affinity" or "cgroup", for the log.
    """

    cores: int
    memory_bytes: int
    available_bytes: int
    cores_limited_by: str
    memory_limited_by: str


def read_resources(root: Path = Path("/")) -> Resources:
    """Look at the machine, the affinity of this process and its control groups."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    cores, by = os.cpu_count() or 1, "machine"
    if affinity is not None and affinity < cores:
        cores, by = affinity, "affinity"
    quota = min(_cpu_quotas(root), default=None)
    if quota is not None and quota < cores:
        cores, by = max(1, int(quota)), "cgroup"
    total, available = _machine_memory(root)
    memory_by = "machine"
    for limit, used in _memory_limits(root):
        if limit < total:
            total, memory_by = limit, "cgroup"
        available = min(available, max(0, limit - used))
    return Resources(cores, total, available, by, memory_by)


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
    num_blocks = max(0, min(wanted, limit // bytes_per_block))
    if num_blocks * block_size < max_model_len:
        raise CapacityError(
            "max_model_len",
            max_model_len,
            f"at most {num_blocks * block_size}: the KV pool has room for {num_blocks} blocks of "
            f"{block_size} tokens in {max(0, limit) / 2**20:.0f} MiB",
        )
    return num_blocks


def _machine_memory(root: Path) -> tuple[int, int]:
    """Total and available bytes of the machine."""
    fields = {}
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        fields[name] = value.split()
    if "MemTotal" not in fields:  # not Linux: the total is the best that can be said
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total, total
    total = int(fields["MemTotal"][0]) * 1024
    return total, int(fields.get("MemAvailable", fields["MemFree"])[0]) * 1024


def _cpu_quotas(root: Path) -> Iterator[float]:
    """Quotas in cores, of every group that sets one."""
    for folder in _groups(root, "cpu"):
        quota, _, period = _read(folder / "cpu.max").partition(" ")
        if not quota:
            quota = _read(folder / "cpu.cfs_quota_us")
            period = _read(folder / "cpu.cfs_period_us")
        if _is_number(quota) and _is_number(period) and int(quota) > 0 < int(period):
            yield int(quota) / int(period)


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, used) in bytes of every group that sets a limit. Page cache does not count as used,
    since the kernel drops it first."""
    for folder in _groups(root, "memory"):
        for limit_name, used_name, cache_name in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, used = _read(folder / limit_name), _read(folder / used_name)
            if _is_number(limit) and _is_number(used):
                stat = dict(
                    line.split(" ", 1)
                    for line in _read(folder / "memory.stat").splitlines()
                    if " " in line
                )
                cache = stat.get(cache_name, "0")
                yield int(limit), max(0, int(used) - (int(cache) if _is_number(cache) else 0))


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of this process's group for the controller and of its parents, v2 and v1.

    In a container the group's path is often not mounted; the mount's own top then stands for it.
    """
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if number == "0" and not names:
            top = root / _CGROUPS
        elif controller in names.split(","):
            top = root / _CGROUPS / names
            if not top.is_dir():
                top = root / _CGROUPS / controller
        else:
            continue
        folder = top / path.lstrip("/")
        while folder != top and top in folder.parents:
            if folder.is_dir():
                yield folder
            folder = folder.parent
        yield top


def _read(path: Path) -> str:
    """The text of a small file, or "" where it cannot be read: limits are optional."""
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()
