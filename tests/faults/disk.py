"""The disk that a server logs to, which can be filled up and emptied while it runs."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from io import BufferedReader
from pathlib import Path

_LOG = "log"
_FILLER = "filler"
_SIZE_MB = 64
_MOUNT = f'mount -t tmpfs -o size={_SIZE_MB}m tmpfs "$0"'


class LogDisk:
    """A file system of its own, mounted where only the server sees it, which ends with the server.

    Where this user may not mount, the limit of a file's size stands in for it: writing fails by
    another number then (EFBIG instead of ENOSPC).

    Args:
        folder: empty.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._is_mounted = can_mount(folder)
        # What stands before the server's command: its standard error is a file of this disk.
        log = f'exec "$@" 2> "$0/{_LOG}"'
        if self._is_mounted:
            self.prefix = [*_own_mounts(), "sh", "-c", f"{_MOUNT} && {log}", str(folder)]
        else:
            self.prefix = ["sh", "-c", log, str(folder)]

    def open_log(self, pid: int) -> BufferedReader:
        """The log of the server of this process; it can be read after the server has ended."""
        return (self._seen_by(pid) / _LOG).open("rb")

    def fill(self, pid: int) -> None:
        """Nothing can be written but what the last page of the log still holds."""
        if self._is_mounted:
            filler = os.open(self._seen_by(pid) / _FILLER, os.O_CREAT | os.O_WRONLY)
            try:
                while os.write(filler, bytes(2**20)):
                    pass
            except OSError:
                pass  # full
            finally:
                os.close(filler)
        else:
            size = (self._folder / _LOG).stat().st_size
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    def empty(self, pid: int) -> None:
        """There is room again."""
        if self._is_mounted:
            (self._seen_by(pid) / _FILLER).unlink()
        else:
            forever = resource.RLIM_INFINITY
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (forever, forever))

    def _seen_by(self, pid: int) -> Path:
        return Path(f"/proc/{pid}/root{self._folder}")


def can_mount(folder: Path) -> bool:
    """Whether this user may mount a file system there, for itself alone."""
    if shutil.which("unshare") is None:
        return False
    attempt = [*_own_mounts(), "sh", "-c", _MOUNT, str(folder)]
    return subprocess.run(attempt, capture_output=True).returncode == 0


def _own_mounts() -> list[str]:
    """Runs a command to which mounts are its own."""
    user = () if os.geteuid() == 0 else ("--user", "--map-root-user")
    return ["unshare", "--mount", *user]
