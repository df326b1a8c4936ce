"""Fixtures of the tests of the command line; and every engine here has the KV sanitizer on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cupaged.engine_args import EngineArgs
from tests.e2e.cli import Inline
from tests.tiny_models import TINY, write_hf_folder


@pytest.fixture(scope="package", autouse=True)
def kv_sanitizer() -> Iterator[None]:
    """On unless a test says otherwise."""
    defaults = EngineArgs.__init__.__kwdefaults__
    assert defaults is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(defaults, "kv_sanitizer", True)
        yield


@pytest.fixture(scope="session")
def cli_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model with a chat template and a context of 1,024 tokens."""
    return str(write_hf_folder(tmp_path_factory.mktemp("cli") / "tiny", TINY))


@pytest.fixture
def cupaged(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> Inline:
    """The command, in this process."""
    return Inline(monkeypatch, capfdbinary)
