"""The wall clock of a server's processes, set forward and back while they run."""

from __future__ import annotations

import mmap
import shutil
import struct
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("shifted_clock.c")


class ShiftedClock:
    """A clock that starts as the machine's.

    Args:
        folder: for the library and the file through which it is set.

    Attributes:
        environment: of the processes that are to have this clock.
    """

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("g++")
        assert compiler is not None, "a C compiler is needed, as for the emulator"
        library, shift = folder / "shifted_clock.so", folder / "clock_shift"
        command = [compiler, "-xc", "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE)]
        subprocess.run([*command, "-ldl", "-lpthread"], check=True)
        shift.write_bytes(bytes(8))
        with shift.open("r+b") as file:
            self._shift = mmap.mmap(file.fileno(), 8)
        self.environment = {"LD_PRELOAD": str(library), "SHIFTED_CLOCK": str(shift)}

    def set(self, seconds: int) -> None:
        """By so much it differs from the machine's from now on."""
        self._shift[:] = struct.pack("=q", seconds)

    def close(self) -> None:
        """Let go of the file."""
        self._shift.close()
