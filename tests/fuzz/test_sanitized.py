"""The KV sanitizer on random traces: defects are found by their name, and nothing without one."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from tests.fuzz.plants import PLANTS
from tests.fuzz.sanitized import first_complaint
from tests.fuzz.swapping_plants import SWAPPING_PLANTS
from tests.fuzz.test_plants import run_planted
from tests.fuzz.traces import make_trace

TRACES = 60
NEVER_WRITTEN = "nothing was written there since the block was handed out"
OTHERS = "other tokens than the sequence's own lie there"
EITHER = f"{OTHERS}|{NEVER_WRITTEN}"  # whichever the first trace comes upon
NAMED = {
    "fork takes no references": "sequences share it",
    "the partial block is not looked at for sharing": "sequences share it",
    "a block shared by two is not copied": "2 sequences share it",
    "copies are not asked for": EITHER,
    "only the last sequence's copies are made": EITHER,
    "admission when only the first chunk fits": "it holds no block for position",
    "slots from the neighbour's blocks": "belongs into slot",
    "tokens begin one place late": OTHERS,
    "no quarantine": "holds poison",
    "a block's name leaves out the blocks before it": EITHER,
    "the salt is ignored": OTHERS,
    "an evicted block can still be found": EITHER,
    "the last, partial block stays behind": EITHER,
    "blocks come back in another order": EITHER,
}
_PROGRAM = """
from tests.fuzz.sanitized import first_complaint
from tests.fuzz.swapping_plants import SWAPPING_PLANTS
print(first_complaint(range({traces})))
"""


SOME = [pytest.param(n, marks=[pytest.mark.slow] * (i % 3 > 0)) for i, n in enumerate(NAMED)]


@pytest.mark.parametrize("name", SOME)
def test_a_plant_is_named(name: str, tmp_path: Path) -> None:
    plant = next(p for p in (*PLANTS, *SWAPPING_PLANTS) if p.name == name)
    said = run_planted(tmp_path, plant, _PROGRAM.format(traces=TRACES))
    assert said.startswith("KV sanitizer: step"), said
    expected = NAMED[name]
    assert any(one in said.partition("\n")[0] for one in expected.split("|")), said


def test_nothing_is_said_without_a_plant() -> None:
    assert first_complaint(range(TRACES // 2)) is None


def test_the_fuzzer_runs_one_trace_in_four_with_it() -> None:
    have_it = sum(make_trace(Random(seed)).config.kv_sanitizer for seed in range(400))
    assert 70 < have_it < 130
