"""The folder of one running server: its engine's socket and its metrics, for this user only.

It is removed at the end. One that a killed server has left behind does no harm and is removed when
the next one starts: its lock is free.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

_PREFIX = "cupaged-serve-"
_LOCK = "lock"
_SOCKET = "engine.sock"
_METRICS = "metrics"
_STATISTICS = "statistics"
_MAX_FOLDER_BYTES = 107 - len(f"/{_SOCKET}")
_MIN_STALE_SECONDS = 60.0  # a younger one may not have taken its lock yet


class PrivateFolder:
    """Made when constructed, mode 0700. A context: removed at its end."""

    def __init__(self) -> None:
        parent = tempfile.gettempdir()
        if len(os.fsencode(parent)) + len(_PREFIX) + 10 > _MAX_FOLDER_BYTES:
            parent = "/tmp"  # the address of a socket is short
        _remove_stale(Path(parent))
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        self._lock = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.metrics.mkdir()
        self.statistics.mkdir()

    @property
    def socket(self) -> Path:
        """Where the engine listens."""
        return self.path / _SOCKET

    @property
    def metrics(self) -> Path:
        """Files of all processes' metrics."""
        return self.path / _METRICS

    @property
    def statistics(self) -> Path:
        """Files of the counts that front ends share."""
        return self.path / _STATISTICS

    def __enter__(self) -> PrivateFolder:
        return self

    def __exit__(self, *error: object) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _remove_stale(parent: Path) -> None:
    for path in parent.glob(f"{_PREFIX}*"):
        try:
            young = time.time() - path.stat().st_mtime < _MIN_STALE_SECONDS
            if young or path.is_symlink() or path.stat().st_uid != os.getuid():
                continue
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # somebody else's, or being made or removed
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except OSError:  # its server runs
            pass
        finally:
            os.close(lock)
