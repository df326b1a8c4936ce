"""Random use of the engine core: every token equals the oracle's, and everything is given back."""

from __future__ import annotations

from random import Random

import pytest

from tests.fuzz.harness import failure_of, first_failure, report_of, run_alone
from tests.fuzz.oracle import answers, refusal
from tests.fuzz.traces import Add, Steps, Trace, make_plain_trace, make_trace, shrink

QUICK_TRACES, TRACES, CHUNK = 400, 1000, 100
SOME = [
    pytest.param(first, marks=[pytest.mark.slow] * (first >= QUICK_TRACES))
    for first in range(0, TRACES, CHUNK)
]


@pytest.mark.parametrize("first", SOME)
def test_traces(first: int) -> None:
    seed = first_failure(range(first, first + CHUNK))
    if seed is not None:
        pytest.fail(report_of(seed), pytrace=False)


@pytest.mark.long
@pytest.mark.parametrize("first", range(TRACES, 10 * TRACES, TRACES))
def test_more_traces(first: int) -> None:
    seed = first_failure(range(first, first + TRACES))
    if seed is not None:
        pytest.fail(report_of(seed), pytrace=False)


@pytest.mark.parametrize("seed", [2093, 3947])
def test_what_gave_way_to_a_group_is_lost_though_no_step_swaps_it(seed: int) -> None:
    assert failure_of(make_trace(Random(seed))) is None


@pytest.mark.parametrize("seed", range(30))
def test_the_oracle_agrees_with_an_engine_that_has_room_for_everything(seed: int) -> None:
    trace = make_trace(Random(seed))
    requests = [o.request for o in trace.operations if isinstance(o, Add)]
    accepted = [r for r in requests if refusal(r, trace.config, held=False) is None]
    for request in accepted[:3]:
        expected = [a.token_ids for a in answers(request, trace.config)]
        assert run_alone(request, trace.config) == expected


def test_a_trace_is_its_seed() -> None:
    assert make_trace(Random(5)) == make_trace(Random(5))
    assert make_trace(Random(5)) != make_trace(Random(6))
    assert failure_of(make_trace(Random(5))) is None


def test_a_failing_trace_is_made_small() -> None:
    trace = make_trace(Random(1))
    wanted = next(o for o in trace.operations if isinstance(o, Add))

    def fails(candidate: Trace) -> bool:
        steps = sum(o.count for o in candidate.operations if isinstance(o, Steps))
        return wanted in candidate.operations and steps >= 1

    assert fails(trace)
    small = shrink(trace, fails)
    assert len(small.operations) == 2


@pytest.mark.parametrize("seed", [6328, 7704, 9005])
def test_traces_that_once_failed(seed: int) -> None:
    """A reused id after a failure; a freed block that the same step still copies from."""
    assert failure_of(make_plain_trace(Random(seed))) is None
