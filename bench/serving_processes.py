"""Processes of the service's benchmarks: a server from its start to its end, and what it uses.

Processor time and memory are read from /proc, so all of this needs Linux. Processor time is the
figure to trust on a machine that does other work, too.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any, Self

import grpc
from grpc_health.v1 import health_pb2

ROOT = Path(__file__).resolve().parent.parent
SERVING = health_pb2.HealthCheckResponse.SERVING
_SECONDS = 120.0  # until a server serves, or has ended
_TICKS = os.sysconf("SC_CLK_TCK")
_ROLES = {"engine_process": "engine", "frontend_process": "frontend"}


def environment(threads: int = 1) -> dict[str, str]:
    """Of a child: this checkout, so many threads of BLAS, and buffers, without which a long line
    may be cut."""
    own = {"PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": ""}
    return {**os.environ, **own}


def cpu_seconds(pid: int) -> float:
    """Processor time of a process, all threads, in user and system mode."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def memory_mb(pid: int) -> dict[str, float]:
    """Resident memory in MB, and the same with shared pages divided by their users."""
    found = re.findall(
        r"^(Rss|Pss): +(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.M
    )
    return {f"{name.lower()}_mb": round(int(kib) * 1.024e-3, 1) for name, kib in found}


class ServedProcess:
    """`cupaged serve` on free ports of the loopback; a context, in which it serves.

    Args:
        flags: of the command.
        threads: of BLAS.

    Attributes:
        pids: of "supervisor", "engine" and "frontend" (the first one).
        address: of gRPC, host:port.
    """

    def __init__(self, *flags: str, threads: int = 1) -> None:
        self.started = time.perf_counter()
        self._process = subprocess.Popen(
            [
                sys.executable, "-m", "cupaged", "serve", "--port", "0", "--metrics-port", "0",
                "--log-level", "warning", *flags,
            ],
            stdout=subprocess.PIPE,
            text=True,
            env=environment(threads),
        )  # fmt: skip
        self.pids = {"supervisor": self._process.pid}
        self.address = ""
        self._metrics = ""

    def __enter__(self) -> Self:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        found = re.search(r"grpc://(\S+) \(metrics (\S+)\)", line)
        if found is None:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()
            raise RuntimeError(f"the server does not serve; it says {line!r}")
        self.address, self._metrics = found.groups()
        self.pids |= self._children()
        return self

    def __exit__(self, *error: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise
        finally:
            assert self._process.stdout is not None
            self._process.stdout.close()

    def cpu_seconds(self) -> dict[str, float]:
        """Processor time of each process so far."""
        return {role: cpu_seconds(pid) for role, pid in self.pids.items()}

    def memory_mb(self) -> dict[str, dict[str, float]]:
        """Memory of each process."""
        return {role: memory_mb(pid) for role, pid in self.pids.items()}

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels, of the page; a second old at most."""
        with urllib.request.urlopen(self._metrics, timeout=_SECONDS) as answer:
            page = answer.read().decode()
        return sum(
            float(value)
            for value in re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", page, re.M)
        )

    def _children(self) -> dict[str, int]:
        pid = self._process.pid
        found: dict[str, int] = {}
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            command = Path(f"/proc/{child}/cmdline").read_text()
            role = next(r for name, r in _ROLES.items() if name in command)
            found.setdefault(role, int(child))
        return found


def watch_health(channel: grpc.Channel) -> Any:
    """Statuses of a server, as they change."""
    watch: Any = channel.unary_stream(
        "/grpc.health.v1.Health/Watch",
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )
    return watch(health_pb2.HealthCheckRequest(), timeout=_SECONDS, wait_for_ready=True)


def wait_serving(address: str) -> None:
    """Return when the health service says SERVING."""
    with grpc.insecure_channel(address) as channel:
        watch = watch_health(channel)
        while next(watch).status != SERVING:
            pass
        watch.cancel()


class HelperProcess:
    """A script of this folder that answers lines with lines of JSON; a context.

    Args:
        script: its file name.
        args: its arguments.
        threads: of BLAS.
    """

    def __init__(self, script: str, *args: str, threads: int = 1) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(ROOT / "bench" / script), *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(threads),
        )
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()  # it ends
        self._process.wait(_SECONDS)
        self._process.stdout.close()

    def read(self) -> str:
        """Its next line.

        Raises:
            RuntimeError: it has ended.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a helper has ended with {self._process.wait()}")
        return line

    def ask(self, line: str) -> str:
        """Send a line; its answer."""
        assert self._process.stdin is not None
        print(line, file=self._process.stdin, flush=True)
        return self.read()
