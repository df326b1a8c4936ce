"""The asking side of the protocol of `runner.py`: a runner as a child process that answers.

While it is not asked it sleeps in a read. What it writes to standard error is kept for the message
of a failure.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from typing import Any, Self

from bench.peers.runner import Options, Requests

# They slow a current OpenBLAS, or take threads away. PYTHONPATH would mix two environments.
NOT_INHERITED = (
    "OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS",
    "MKL_NUM_THREADS", "PYTHONPATH",
)  # fmt: skip
_END_SECONDS = 60
_SHOWN_LINES = 12


class RunnerError(Exception):
    """A runner has failed; the message has the end of what it said."""


class RunnerProcess:
    """One engine in a fresh process. Use it in a `with` statement, which ends the process."""

    def __init__(self, command: Sequence[str]) -> None:
        environment = {k: v for k, v in os.environ.items() if k not in NOT_INHERITED}
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the process)
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said,
            env=environment, text=True,
        )  # fmt: skip

    def load(self, options: Options) -> dict[str, Any]:
        """Load the model: import_s, load_s, versions."""
        asked = {name: getattr(options, name) for name in Options.__slots__}
        return self._ask({"ask": "load", **asked})

    def generate(self, requests: Requests) -> dict[str, Any]:
        """All requests at once: wall_s, token_ids."""
        return self._ask({"ask": "generate", "requests": requests})

    def stream(self, prompt: list[int], num_tokens: int) -> dict[str, Any]:
        """One request alone: token_s, token_ids."""
        return self._ask({"ask": "stream", "requests": [(prompt, num_tokens)]})

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended, as the missing answer says too
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            raise RunnerError(f"the runner ended with status {status}: {self._last_lines()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RunnerError(f"{answer['error']}\n{self._last_lines()}")
        return answer

    def _last_lines(self) -> str:
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-_SHOWN_LINES:])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *exc_info: object) -> None:
        if kind is not None:
            self._process.kill()
        try:
            self._process.communicate(timeout=_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
        finally:
            self._said.close()
