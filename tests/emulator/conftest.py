"""What several tests of the emulator look at."""

from __future__ import annotations

from typing import Any

import pytest

from cupaged.emulator import build, toolchain


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was compiled: a name a call of the compiler."""
    calls: list[str] = []
    original = toolchain.run_compiler

    def record(compiler: Any, arguments: Any, what: str) -> str:
        calls.append(what)
        return original(compiler, arguments, what)

    monkeypatch.setattr(build, "run_compiler", record)
    return calls
