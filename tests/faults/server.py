"""The server of a campaign: TLS, tokens, two front ends, a log on a disk that can be full."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import grpc

from tests.faults.clock import ShiftedClock
from tests.faults.disk import LogDisk
from tests.faults.task import CERTS
from tests.server.watched_server import WatchedServer

TOKEN = "a-token-of-the-campaign"
FRONT_ENDS = 2
MAX_MESSAGE_BYTES = 2**18
STREAM_BUFFER_TOKENS = 1024  # more wait only where nobody reads
_FLAGS = (
    "--frontends", str(FRONT_ENDS), "--restart-engine", "--log-level", "info",
    "--ssl-certfile", str(CERTS / "server.pem"), "--ssl-keyfile", str(CERTS / "server.key"),
    "--ssl-ca-certs", str(CERTS / "root.pem"),
    "--max-message-bytes", str(MAX_MESSAGE_BYTES),
    "--stream-buffer-tokens", str(STREAM_BUFFER_TOKENS),
    # Few sequences at once and few blocks: requests wait, and are preempted.
    "--max-num-seqs", "16", "--num-gpu-blocks-override", "160", "--max-num-queued-reqs", "1000",
    "--kv-sanitizer", "--drain-delay", "0.3",
)  # fmt: skip
_MODULES = {
    "engine": "cupaged.server.engine_process",
    "frontend": "cupaged.server.frontend_process",
}


def credentials(certificate: str = "client") -> grpc.ChannelCredentials:
    """Of a client that shows this certificate of the tests; "" for none."""
    root = (CERTS / "root.pem").read_bytes()
    if not certificate:
        return grpc.ssl_channel_credentials(root)
    key, chain = ((CERTS / f"{certificate}.{end}").read_bytes() for end in ("key", "pem"))
    return grpc.ssl_channel_credentials(root, key, chain)


class FaultyServer(WatchedServer):
    """A context in which the command runs.

    Args:
        folder: empty; for all its files.
        model: a model folder.
        clock: of all its processes.
    """

    def __init__(self, folder: Path, model: str, clock: ShiftedClock) -> None:
        private, disk, tokens = folder / "private", folder / "disk", folder / "tokens"
        private.mkdir()
        disk.mkdir()
        tokens.write_text(f"{TOKEN}\n")
        super().__init__(private, model, *_FLAGS, "--api-key-file", str(tokens))
        self.disk = LogDisk(disk)
        self.clock = clock
        self._command = [*self.disk.prefix, *self._command]
        self._environment |= clock.environment

    def __enter__(self) -> FaultyServer:
        super().__enter__()
        self._log_file = self.disk.open_log(self.process.pid)
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._log_file.close()

    def open_channel(self) -> grpc.Channel:
        """As a client that may call."""
        return grpc.secure_channel(self.address, credentials())

    def read_log(self) -> str:
        """All that stands in it."""
        self._log_file.seek(0)
        return self._log_file.read().decode("utf-8", "replace")

    def pids(self) -> dict[str, list[int]]:
        """Of "supervisor", "engine" and "frontend": those that run now."""
        pid = self.process.pid
        found: dict[str, list[int]] = {"supervisor": [pid], **{role: [] for role in _MODULES}}
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            try:
                command = Path(f"/proc/{child}/cmdline").read_text().split("\0")
            except OSError:  # it has just ended
                continue
            for role, module in _MODULES.items():
                if module in command:
                    found[role].append(int(child))
        return found

    def resident_mb(self, name: str) -> float:
        """Memory of the largest process of a role."""
        return max(resident_mb(pid) for pid in self.pids()[name])


def resident_mb(pid: int) -> float:
    """Memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def peak_mb(pid: int) -> float:
    """The most memory that a process has had."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def num_descriptors(pid: int) -> int:
    """Open files of a process."""
    return len(os.listdir(f"/proc/{pid}/fd"))
