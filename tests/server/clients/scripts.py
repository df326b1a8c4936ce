"""Programs that use an unmodified client, as processes: they print one line of JSON, then wait.

So a test can look at the server while the client's process still lives.
"""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SECONDS = 120  # nothing that they do takes as long


@contextmanager
def told_by(*command: str | Path) -> Iterator[Any]:
    """What a program prints; it ends with the context, when its standard input does."""
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None and process.stderr is not None
        too_late = threading.Timer(SECONDS, process.kill)  # then there is no line
        too_late.start()
        line = process.stdout.readline()
        too_late.cancel()
        assert line, process.stderr.read()
        yield json.loads(line)
        _, log = process.communicate("", timeout=SECONDS)
        assert process.returncode == 0, log
    finally:
        process.kill()
        process.communicate()
