"""Counts that several processes add up through files."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cupaged.server.shared_counts import SharedCounts

OTHER = """
import sys
from pathlib import Path
from cupaged.server.shared_counts import SharedCounts
counts = SharedCounts(Path(sys.argv[1]), 3)
counts.add(0, 40)
counts.put(2, 9)
counts.put(2, 8)
print(counts.everywhere())
"""


def other_process(file: Path) -> str:
    """What a process says that counts there and ends."""
    command = [sys.executable, "-c", OTHER, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_each_sees_all_and_a_successor_goes_on(tmp_path: Path) -> None:
    mine = SharedCounts(tmp_path / "a", 3)
    assert mine.everywhere() == [(0, 0, 0)]
    mine.add(0, 2)
    mine.add(1, 2**40)
    mine.add(0, 1)
    assert other_process(tmp_path / "b") == f"[(3, {2**40}, 0), (40, 0, 8)]"
    assert mine.everywhere() == [(3, 2**40, 0), (40, 0, 8)]
    assert other_process(tmp_path / "b") == f"[(3, {2**40}, 0), (80, 0, 8)]"
    assert SharedCounts(tmp_path / "a", 3).everywhere() == [(3, 2**40, 0), (80, 0, 8)]


def test_one_that_is_alone_needs_no_file() -> None:
    first, second = SharedCounts(None, 2), SharedCounts(None, 2)
    first.add(1, 5)
    assert (first.everywhere(), second.everywhere()) == ([(0, 5)], [(0, 0)])


def test_a_file_that_is_being_made_is_left_out(tmp_path: Path) -> None:
    mine = SharedCounts(tmp_path / "a", 2)
    (tmp_path / "b").write_bytes(b"")
    assert mine.everywhere() == [(0, 0)]


def test_a_full_disk_is_an_error_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", no_room)
    with pytest.raises(OSError, match=f"No space left .*{tmp_path}/a"):
        SharedCounts(tmp_path / "a", 2)
