"""Fixtures of the fault campaign's tests."""

from __future__ import annotations

import pytest

from tests.faults.expected import Answer
from tests.tiny_models import TINIER, write_hf_folder

TOKENS = (7, 8, 9) * 100


@pytest.fixture
def answers() -> list[Answer]:
    """Two prompts whose answers are known without a model."""
    return [
        Answer(f"prompt {i}", (5, 6), tuple(t + i for t in TOKENS), f"text {i} " * 100)
        for i in range(2)
    ]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a model of 0.4 M parameters."""
    return str(write_hf_folder(tmp_path_factory.mktemp("faults") / "tiny", TINIER))
