"""The traces find every planted defect, and nothing in a copy without one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import cupaged
from tests.fuzz.plants import PLANTS, Plant

PACKAGE = Path(cupaged.__file__).resolve().parent
ROOT = Path(__file__).resolve().parents[2]
MOST_TRACES = 200
_PROGRAM = """
import pathlib, sys
import cupaged
from tests.fuzz.harness import first_failure
assert pathlib.Path(cupaged.__file__).resolve().is_relative_to(pathlib.Path(sys.argv[1]).resolve())
print(first_failure(range(int(sys.argv[2]))))
"""


def first_failing_trace(folder: Path, plant: Plant | None) -> int | None:
    """Run the traces on a copy of the package in another process."""
    copy = folder / "cupaged"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    if plant is not None:
        plant.apply(copy)
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(folder), str(MOST_TRACES)],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OPENBLAS_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer = done.stdout.strip()
    return None if answer == "None" else int(answer)


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name.replace(" ", "-"))
def test_a_plant_is_found(plant: Plant, tmp_path: Path) -> None:
    """A plant that no trace finds says that the harness is too weak there."""
    assert first_failing_trace(tmp_path, plant) is not None


def test_nothing_is_found_without_a_plant(tmp_path: Path) -> None:
    """The control: the same traces on an unchanged copy."""
    assert first_failing_trace(tmp_path, None) is None
