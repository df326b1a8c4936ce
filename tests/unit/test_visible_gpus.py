"""What a run of the tests sees of GPUs: none, unless it asks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cupaged.runtime.cupy_runtime import CuPyRuntime
from cupaged.runtime.protocol import DeviceUnavailableError

ROOT = Path(__file__).resolve().parents[2]


def test_no_gpu_is_seen(pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--gpu"):
        assert os.environ.get("CUDA_VISIBLE_DEVICES") == os.environ.get("VISIBLE_OUTSIDE")
        return
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    with pytest.raises(DeviceUnavailableError):
        CuPyRuntime()


@pytest.mark.parametrize("visible", ["", "1"])
def test_a_run_that_asks_sees_what_its_caller_sees(visible: str) -> None:
    this = f"{Path(__file__).relative_to(ROOT)}::test_no_gpu_is_seen"
    seen = {"CUDA_VISIBLE_DEVICES": visible, "VISIBLE_OUTSIDE": visible}
    command = [sys.executable, "-m", "pytest", this, "--gpu", "-p", "no:cacheprovider"]
    run = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **seen}, capture_output=True, text=True
    )
    assert run.returncode == 0 and "1 passed" in run.stdout, run.stdout
