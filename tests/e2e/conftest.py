"""Fixtures of the tests of the command line."""

from __future__ import annotations

import pytest

from tests.e2e.cli import Inline
from tests.tiny_models import TINY, write_hf_folder


@pytest.fixture(scope="session")
def cli_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model with a chat template and a context of 1,024 tokens."""
    return str(write_hf_folder(tmp_path_factory.mktemp("cli") / "tiny", TINY))


@pytest.fixture
def cupaged(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> Inline:
    """The command, in this process."""
    return Inline(monkeypatch, capfdbinary)
