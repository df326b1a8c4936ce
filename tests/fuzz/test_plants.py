"""The traces find every planted defect, and nothing in a copy without one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

import cupaged
from tests.fuzz.beam_plants import BEAM_PLANTS
from tests.fuzz.offloading_plants import OFFLOADING_PLANTS
from tests.fuzz.plant import Plant
from tests.fuzz.plant_seeds import FOUND_AT
from tests.fuzz.plants import PLANTS
from tests.fuzz.radix_plants import RADIX_PLANTS
from tests.fuzz.swapping_plants import SWAPPING_PLANTS

PACKAGE = Path(cupaged.__file__).resolve().parent
ROOT = Path(__file__).resolve().parents[2]
MOST_TRACES = 200
SAMPLE_PLANTS = (*PLANTS, *RADIX_PLANTS, *SWAPPING_PLANTS, *OFFLOADING_PLANTS)
ALL_PLANTS = (*SAMPLE_PLANTS, *BEAM_PLANTS)
_CHECK = """
import pathlib, sys
import cupaged
assert pathlib.Path(cupaged.__file__).resolve().is_relative_to(pathlib.Path(sys.argv[1]).resolve())
"""
_PROGRAM = """
from functools import partial
from tests.fuzz.harness import first_failure
from tests.fuzz.traces import make_trace
print(first_failure({seeds}, partial(make_trace, beam_shares=({share},))))
"""
SAMPLES, BEAMS = 0.0, 0.8  # the share of requests that are searched with beams


def run_planted(folder: Path, plant: Plant | None, program: str) -> str:
    """Run a program on a copy of the package in another process; what it prints."""
    copy = folder / "cupaged"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    if plant is not None:
        plant.apply(copy)
    done = subprocess.run(
        [sys.executable, "-c", _CHECK + program, str(folder)],
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
    return done.stdout.strip()


def first_failing_trace(
    folder: Path, plant: Plant | None, share: float, seeds: Iterable[int]
) -> int | None:
    """The first of some seeds whose trace fails on a copy of the package."""
    answer = run_planted(folder, plant, _PROGRAM.format(seeds=[*seeds], share=share))
    return None if answer == "None" else int(answer)


def check_found(folder: Path, plant: Plant, share: float) -> None:
    """One of the traces finds a plant: that which once did, or else another."""
    once = FOUND_AT[plant.name]
    others = [seed for seed in range(MOST_TRACES) if seed != once]
    found = first_failing_trace(folder / "planted", plant, share, [once, *others])
    assert found is not None
    if found != once:  # which the control below does not run
        assert first_failing_trace(folder / "unchanged", None, share, [found]) is None


def some(plants: Sequence[Plant]) -> list[Any]:
    """Plants as parameters; one in six in every run, the others in slow ones."""
    return [
        pytest.param(plant, id=plant.name.replace(" ", "-"), marks=[pytest.mark.slow] * (i % 6 > 0))
        for i, plant in enumerate(plants)
    ]


@pytest.mark.parametrize("plant", ALL_PLANTS, ids=lambda plant: plant.name.replace(" ", "-"))
def test_a_plant_applies(plant: Plant, tmp_path: Path) -> None:
    (tmp_path / plant.file).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(PACKAGE / plant.file, tmp_path / plant.file)
    plant.apply(tmp_path)
    assert (tmp_path / plant.file).read_text() != (PACKAGE / plant.file).read_text()


@pytest.mark.parametrize("plant", some(SAMPLE_PLANTS))
def test_a_plant_is_found(plant: Plant, tmp_path: Path) -> None:
    """A plant that no trace finds says that the harness is too weak there."""
    check_found(tmp_path, plant, SAMPLES)


@pytest.mark.parametrize("plant", some(BEAM_PLANTS))
def test_a_plant_in_the_search_is_found(plant: Plant, tmp_path: Path) -> None:
    """In traces in which most requests are searched with beams."""
    check_found(tmp_path, plant, BEAMS)


@pytest.mark.parametrize(
    ("plants", "share"), [(SAMPLE_PLANTS, SAMPLES), (BEAM_PLANTS, BEAMS)], ids=["samples", "beams"]
)
def test_nothing_is_found_without_a_plant(
    plants: Sequence[Plant], share: float, tmp_path: Path
) -> None:
    """The control: the traces that find plants, on an unchanged copy."""
    seeds = sorted({FOUND_AT[plant.name] for plant in plants})
    assert max(seeds) < MOST_TRACES
    assert first_failing_trace(tmp_path, None, share, seeds) is None
