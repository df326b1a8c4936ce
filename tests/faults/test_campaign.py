"""Fault campaigns, short and long, and the soak; what was wrong is printed, and how to repeat it.

`python -m tests.faults.campaign SEED --size SIZE --only ROUND` runs one round of a campaign again.
"""

from __future__ import annotations

from typing import Any

import pytest

from bench import report, soak
from tests.faults.campaign import run
from tests.faults.strikes import STRIKES
from tests.faults.verdict import faults_of

SEED = 1
SHOWN_LINES, SHOWN_CHARS = 20, 500
SOAK_MARGIN_MB, SOAK_MARGIN_DESCRIPTORS = 8.0, 2


def check(found: dict[str, Any], size: int) -> None:
    """Nothing was wrong, and everything that was to happen has happened."""
    wrong = faults_of(found)
    again = f"python -m tests.faults.campaign {SEED} --size {size} --only ROUND"
    shown = [line[:SHOWN_CHARS] for line in wrong[:SHOWN_LINES]]
    assert not wrong, "\n".join([*shown, f"{len(wrong)} in all; again: {again}"])


@pytest.mark.slow
def test_seven_hundred_requests() -> None:
    """Every strike once; about two minutes, ten seconds of it for each process that is stopped."""
    size = 48
    found = run(SEED, range(len(STRIKES)), size)
    assert found["requests"] == len(STRIKES) * size
    check(found, size)


@pytest.mark.long
def test_five_thousand_requests() -> None:
    size = 100
    found = run(SEED, range(50), size)
    assert found["requests"] == 5000
    report.write("faults", found)
    check(found, size)


@pytest.mark.long
def test_two_hundred_thousand_requests() -> None:
    found = soak.soak()
    report.write("soak", found)
    assert found["requests"] == 200_000
    for role, levels in found["processes"].items():
        resident, descriptors = levels["resident_mb"], levels["descriptors"]
        assert resident["last"] < resident["warm"] + SOAK_MARGIN_MB, f"{role} grows: {resident}"
        assert descriptors["last"] < descriptors["warm"] + SOAK_MARGIN_DESCRIPTORS, role
