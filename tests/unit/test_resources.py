"""Limits of made-up machines and containers, and the size of the KV pool."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cupaged.errors import CapacityError
from cupaged.resources import kv_blocks_for, read_resources

GIB = 2**30


def make_root(folder: Path, files: dict[str, str]) -> Path:
    """A file system root with a machine of 32 GiB, 30 of them available, and these files."""
    meminfo = f"MemTotal: {32 * 2**20} kB\nMemFree: 1 kB\nMemAvailable: {30 * 2**20} kB\n"
    for name, text in {"proc/meminfo": meminfo, **files}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)


def test_no_control_group(tmp_path: Path) -> None:
    found = read_resources(make_root(tmp_path, {}))
    assert (found.cores, found.memory_bytes, found.available_bytes) == (8, 32 * GIB, 30 * GIB)
    assert (found.cores_limited_by, found.memory_limited_by) == ("machine", "machine")


def test_affinity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 5, 6}, raising=False)
    found = read_resources(make_root(tmp_path, {}))
    assert (found.cores, found.cores_limited_by) == (3, "affinity")


def test_version_2_in_a_container(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/cpu.max": "250000 100000\n",
        "sys/fs/cgroup/memory.max": f"{4 * GIB}\n",
        "sys/fs/cgroup/memory.current": f"{3 * GIB}\n",
        "sys/fs/cgroup/memory.stat": f"anon 5\ninactive_file {2 * GIB}\n",
    }
    found = read_resources(make_root(tmp_path, files))
    assert (found.cores, found.cores_limited_by) == (2, "cgroup")
    assert (found.memory_bytes, found.memory_limited_by) == (4 * GIB, "cgroup")
    assert found.available_bytes == 3 * GIB  # 4 less the one that is not page cache


def test_version_2_takes_the_tightest_of_the_parents(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/slice/service\n",
        "sys/fs/cgroup/slice/service/cpu.max": "max 100000\n",
        "sys/fs/cgroup/slice/service/memory.max": "max\n",
        "sys/fs/cgroup/slice/cpu.max": "50000 100000\n",
        "sys/fs/cgroup/slice/memory.max": f"{2 * GIB}\n",
        "sys/fs/cgroup/slice/memory.current": "0\n",
    }
    found = read_resources(make_root(tmp_path, files))
    assert found.cores == 1  # half a core is one thread
    assert found.memory_bytes == found.available_bytes == 2 * GIB


@pytest.mark.parametrize("mounted", ["docker/abc/", ""])
def test_version_1(tmp_path: Path, mounted: str) -> None:
    files = {
        "proc/self/cgroup": "5:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n1:name=x:/\n",
        f"sys/fs/cgroup/memory/{mounted}memory.limit_in_bytes": f"{GIB}\n",
        f"sys/fs/cgroup/memory/{mounted}memory.usage_in_bytes": f"{GIB // 2}\n",
        f"sys/fs/cgroup/cpu,cpuacct/{mounted}cpu.cfs_quota_us": "300000\n",
        f"sys/fs/cgroup/cpu,cpuacct/{mounted}cpu.cfs_period_us": "100000\n",
    }
    found = read_resources(make_root(tmp_path, files))
    assert (found.cores, found.memory_bytes, found.available_bytes) == (3, GIB, GIB // 2)


def test_version_1_without_limits(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "5:memory:/\n3:cpu:/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2**63 - 4096}\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    }
    found = read_resources(make_root(tmp_path, files))
    assert (found.cores, found.memory_bytes, found.available_bytes) == (8, 32 * GIB, 30 * GIB)


def test_garbage_in_the_files_is_no_limit(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/\nnonsense\n",
        "sys/fs/cgroup/cpu.max": "many some\n",
        "sys/fs/cgroup/memory.max": "\n",
    }
    assert read_resources(make_root(tmp_path, files)).cores == 8


def blocks(**changes: int | None) -> int:
    """A pool of blocks of 1 MiB and 16 tokens, for 4 sequences of 1,000 tokens."""
    given: dict[str, int | None] = {
        "bytes_per_block": 2**20,
        "block_size": 16,
        "max_model_len": 1000,
        "max_num_seqs": 4,
        "available_bytes": 10 * GIB,
        "pool_bytes": None,
    }
    return kv_blocks_for(**{**given, **changes})  # type: ignore[arg-type]


def test_pool_is_what_all_sequences_need() -> None:
    assert blocks() == 4 * 63


def test_pool_takes_at_most_two_fifths_of_the_memory() -> None:
    assert blocks(available_bytes=200 * 2**20) == 80


def test_pool_of_a_given_size() -> None:
    assert blocks(pool_bytes=100 * 2**20 + 5) == 100


@pytest.mark.parametrize("available", [150 * 2**20, 0, -GIB])
def test_pool_too_small_for_one_sequence_names_the_longest_that_fits(available: int) -> None:
    with pytest.raises(CapacityError) as caught:
        blocks(available_bytes=available)
    longest = max(0, int(available * 0.4) // 2**20 * 16)
    assert str(caught.value).startswith(f"max_model_len must be at most {longest}:")
