"""The log's way out: whoever writes does not wait, and what is lost is told."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from cupaged.server.log_output import LogOutput
from cupaged.v1 import generation_pb2_grpc
from tests.server.asking import request
from tests.server.local_server import SECONDS, wait_until

LOST = re.compile(r"(\d+) lines of the log are lost: they could not be written")
LINE = b"x" * 99 + b"\n"
PIPE_BYTES = 2**16  # of Linux


class Pipe:
    """One that is read when the test says so.

    Attributes:
        came: what was read.
    """

    def __init__(self) -> None:
        self._read_end, self.write_end = os.pipe()
        self._thread = threading.Thread(target=self._read)
        self.came = b""

    def read(self) -> None:
        """From now on."""
        self._thread.start()

    def close(self) -> None:
        os.close(self.write_end)
        if self._thread.ident is not None:
            self._thread.join()
        os.close(self._read_end)

    def _read(self) -> None:
        while data := os.read(self._read_end, PIPE_BYTES):
            self.came += data


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    made.close()


def num_told(caplog: pytest.LogCaptureFixture) -> int:
    """Lines of which it was said that they are lost."""
    return sum(int(found[1]) for r in caplog.records if (found := LOST.fullmatch(r.getMessage())))


def test_lines_come_in_their_order(pipe: Pipe) -> None:
    with LogOutput(pipe.write_end) as output:
        output.write(b"one\ntwo\n")
        output.write("three \N{SNOWMAN} \ud800\n")
        output.flush()
    pipe.read()
    wait_until(lambda: pipe.came == "one\ntwo\nthree \N{SNOWMAN} \\ud800\n".encode())


def test_a_reader_that_stands_still(pipe: Pipe, caplog: pytest.LogCaptureFixture) -> None:
    number = 10 * PIPE_BYTES // len(LINE)
    with LogOutput(pipe.write_end, max_waiting_bytes=10 * len(LINE)) as output:
        for _ in range(number):
            output.write(LINE)  # as nothing is read, waiting would be for ever
        pipe.read()
        # Every line has come or is told of, in one word or in several.
        wait_until(lambda: len(pipe.came) // len(LINE) + num_told(caplog) == number)
    assert num_told(caplog) > 0
    assert pipe.came == LINE * (number - num_told(caplog))


def test_the_end_waits_for_no_reader(pipe: Pipe) -> None:
    with LogOutput(pipe.write_end) as output:
        output.write(LINE * (2 * PIPE_BYTES // len(LINE)))
    assert output._thread.is_alive()
    pipe.read()
    output._thread.join(SECONDS)
    assert not output._thread.is_alive()


def test_a_disk_that_is_full_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    room = [5]  # bytes that can still be written
    write = os.write

    def limited(fd: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(28, os.strerror(28))
        size = min(room[0], len(data))
        room[0] -= size
        return write(fd, data[:size])

    with (tmp_path / "log").open("wb") as file:
        monkeypatch.setattr(os, "write", limited)
        with LogOutput(file.fileno()) as output:
            for line in (b"one\n", b"two\n", b"three\n"):
                output.write(line)
            wait_until(lambda: output._num_lost == 2 and not output._num_waiting_bytes)
            room[0] = 1000
            output.write(b"four\n")
            wait_until(lambda: num_told(caplog) == 2)
    assert (tmp_path / "log").read_bytes() == b"one\nt\nfour\n"  # what was cut is a line of its own


def test_a_server_whose_log_nobody_reads(tiny_model: str) -> None:
    """It serves, and ends when it is told to."""
    command = [sys.executable, "-m", "cupaged", "serve", tiny_model, "--device", "cpu"]
    command += ["--runner", "null", "--port", "0", "--metrics-port", "-1"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            address = server.stdout.readline().split("grpc://")[1].strip()
            with grpc.insecure_channel(address) as channel:
                stub = generation_pb2_grpc.GenerationServiceStub(channel)
                lines = 4 * PIPE_BYTES // 300
                for i in range(lines):
                    stub.Generate(request(request_id=f"{i}-{'x' * 200}"), timeout=SECONDS)
            server.send_signal(signal.SIGTERM)
            assert server.wait(SECONDS) == 0
        finally:
            server.kill()
