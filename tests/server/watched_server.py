"""`cupaged serve` with all that a test can look at: processes, metrics, the engine's numbers."""

from __future__ import annotations

import asyncio
import os
import re
import urllib.request
from pathlib import Path
from typing import Any

from cupaged.server.engine_client import EngineClient
from tests.server.local_server import SECONDS, is_idle, wait_until
from tests.server.supervised import Supervised


class WatchedServer(Supervised):
    """A context in which the command runs.

    Args:
        folder: empty; the server's private folder is made in it.
        arguments: behind `cupaged serve`.
    """

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._folder = folder
        flags = ("--port", "0", "--metrics-port", "0", *arguments)
        super().__init__(*flags, environment={"TMPDIR": str(folder)})

    def pid(self, name: str) -> int:
        """Of the child that was started last under this name."""
        return int(re.findall(rf"{name} is process (\d+)", self.log)[-1])

    @property
    def metrics_url(self) -> str:
        """Of the metrics page."""
        match = re.search(r"metrics (http://\S+)\)", self.line)
        assert match is not None
        return match[1]

    def metrics(self) -> dict[str, float]:
        """Every sample of the page, by name with labels."""
        with urllib.request.urlopen(self.metrics_url, timeout=SECONDS) as answer:
            page = answer.read().decode()
        samples = (line.rpartition(" ") for line in page.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, _, value in samples}

    def total(self, name: str) -> float:
        """Sum of the samples of `cupaged_<name>`."""
        return total(self.metrics(), name)

    def engine_socket(self) -> Path:
        """Where the engine listens to front ends."""
        (path,) = self._folder.glob("cupaged-serve-*/engine.sock")
        return path

    def ask_engine(self, *names: str) -> list[Any]:
        """Answers of the engine to calls of the wire, as a further front end would get them."""

        async def ask() -> list[Any]:
            client = EngineClient(str(self.engine_socket()), name="the test")
            try:
                async with asyncio.timeout(SECONDS):
                    await client.connect()
                    return [await client.call(name) for name in names]
            finally:
                await client.close()

        return asyncio.run(ask())

    def is_idle(self) -> bool:
        """Whether the engine has no request, and no block in use."""
        (stats,) = self.ask_engine("stats")
        return is_idle(stats) and stats["num_used_blocks"] == 0

    def wait_idle(self) -> None:
        """Return when the engine has given everything back and the gauges say so, too."""
        wait_until(self.is_idle)
        self.ask_engine("audit")
        gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        wait_until(lambda: not any(map(self.total, (*gauges, "streams_active"))))

    def resident_mb(self, name: str) -> float:
        """Memory of a child."""
        status = Path(f"/proc/{self.pid(name)}/status").read_text()
        match = re.search(r"VmRSS:\s+(\d+) kB", status)
        assert match is not None
        return int(match[1]) / 1024

    def check_gone(self) -> None:
        """After the end: no process, socket or folder is left."""
        pids = map(int, re.findall(r"is process (\d+)", self.log))
        assert [pid for pid in pids if is_alive(pid)] == []
        assert list(self._folder.iterdir()) == []


def total(samples: dict[str, float], name: str, label: str = "") -> float:
    """Sum of the samples of `cupaged_<name>`; of those with `label`, such as 'code="OK"'."""
    return sum(
        value
        for key, value in samples.items()
        if re.match(rf"cupaged_{name}(\{{|$)", key) and label in key
    )


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and was not waited for does not."""
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (ProcessLookupError, FileNotFoundError):
        return False
    return state != "Z"
