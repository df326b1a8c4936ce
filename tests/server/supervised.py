"""`cupaged serve` as a process of its own, with its children."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Self

import grpc

from cupaged.v1 import generation_pb2_grpc, model_pb2_grpc
from tests.server.local_server import SECONDS, wait_until


class Supervised:
    """A context in which the command runs; killed at the end if it has not ended.

    Args:
        arguments: behind `cupaged serve`.
        environment: beside the test's own.
    """

    def __init__(self, *arguments: str, environment: dict[str, str] | None = None) -> None:
        serve = ("cupaged", "serve", "--device", "cpu", "--log-level", "debug")
        self._command = [sys.executable, "-m", *serve, *arguments]
        self._environment = {**os.environ, **(environment or {})}
        self.log = ""

    def __enter__(self) -> Self:
        self.process = subprocess.Popen(
            self._command,
            env=self._environment,
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline()
        if match := re.search(r" on (?:grpcs?://)?(\S+)", self.line):
            self.address = match[1]
            self.channel = self.open_channel()
            self.generation = generation_pb2_grpc.GenerationServiceStub(self.channel)
            self.models = model_pb2_grpc.ModelServiceStub(self.channel)
        return self

    def __exit__(self, *error: Any) -> None:
        if hasattr(self, "channel"):
            self.channel.close()
        self.process.kill()
        self.end()
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()

    def open_channel(self) -> grpc.Channel:
        """Made once, for the stubs."""
        return grpc.insecure_channel(self.address)

    def end(self) -> int:
        """Wait for the end; the exit code."""
        code = self.process.wait(SECONDS)
        self._reader.join(SECONDS)
        return code

    def terminate(self) -> None:
        """As an orchestrator ends it."""
        self.process.send_signal(signal.SIGTERM)

    def until(self, pattern: str) -> re.Match[str]:
        """Wait for a line of the log."""
        wait_until(lambda: re.search(pattern, self.log) is not None)
        match = re.search(pattern, self.log)
        assert match is not None
        return match

    def kill(self, name: str) -> None:
        """SIGKILL to the child that was started last under this name."""
        pid = re.findall(rf"{name} is process (\d+)", self.log)[-1]
        os.kill(int(pid), signal.SIGKILL)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log += line
