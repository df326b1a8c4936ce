"""How a download is shown: one bar on a terminal, a line a file elsewhere, or nothing.

Owns what is written to standard error while bytes come. It never changes what is downloaded.
"""

from __future__ import annotations

import shutil
import sys
from typing import Any

from cupaged.loading.hub_files import HubFile, shown_size

__all__ = ["Progress", "new_progress"]


class Progress:
    """Shows nothing; the other kinds derive from it.

    `begin` is called with each file, `reached` with the bytes of it that are here, `close` at last.
    """

    def begin(self, file: HubFile) -> None:
        """The next file."""

    def reached(self, size_bytes: int) -> None:
        """So many bytes of the file are here; fewer than before where it begins anew."""

    def close(self) -> None:
        """No more is coming."""


class LineProgress(Progress):
    """One plain line a file, for a log."""

    def begin(self, file: HubFile) -> None:
        print(f"downloading {file.name} ({shown_size(file.size_bytes)})", file=sys.stderr)


class BarProgress(Progress):
    """One bar over the bytes of all files."""

    def __init__(self, total_bytes: int) -> None:
        from tqdm import tqdm

        # Unlike tqdm's own look at the terminal, this one has an answer where none is known.
        columns, lines = shutil.get_terminal_size()
        units = {"unit": "B", "unit_scale": True, "unit_divisor": 1024}
        self._bar: Any = tqdm(total=total_bytes, ncols=columns, nrows=lines, **units)
        self._before = 0  # bytes of the files that are done
        self._file_bytes = 0

    def begin(self, file: HubFile) -> None:
        self._before += self._file_bytes
        self._file_bytes = file.size_bytes
        self._bar.set_description_str(file.name.rpartition("/")[2])

    def reached(self, size_bytes: int) -> None:
        self._bar.update(self._before + size_bytes - self._bar.n)

    def close(self) -> None:
        self._bar.close()


def new_progress(total_bytes: int, *, wanted: bool) -> Progress:
    """The kind that suits standard error."""
    if not wanted or total_bytes == 0 or sys.stderr is None:
        return Progress()
    return BarProgress(total_bytes) if sys.stderr.isatty() else LineProgress()
