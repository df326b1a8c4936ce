"""When requests are sent: moments of the processes, times of a trace, what is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from cupaged.benchmarks.arrivals import Arrivals
from cupaged.errors import ConfigError

MANY = 40_000


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_intervals_have_the_moments_of_the_gamma_distribution(burstiness: float) -> None:
    times = Arrivals(request_rate=8.0, burstiness=burstiness, seed=3).times(MANY)
    assert len(times) == MANY and times == sorted(times)
    assert times[-1] == pytest.approx(MANY / 8.0)  # the rate is exact
    intervals = np.diff([0.0, *times]) * 8.0
    # Gamma of shape k and mean 1: variance 1 / k, third central moment 2 / k**2.
    assert intervals.var() == pytest.approx(1 / burstiness, rel=0.06)
    assert ((intervals - 1) ** 3).mean() == pytest.approx(2 / burstiness**2, rel=0.25)


def test_a_poisson_process_has_exponential_intervals() -> None:
    intervals = np.diff([0.0, *Arrivals(request_rate=2.0).times(MANY)])
    for multiple in (0.5, 1.0, 2.0):
        assert (intervals > multiple / 2.0).mean() == pytest.approx(math.exp(-multiple), abs=0.01)


def test_an_infinite_burstiness_is_a_beat() -> None:
    times = Arrivals(request_rate=4.0, burstiness=math.inf).times(4)
    assert times == pytest.approx([0.25, 0.5, 0.75, 1.0])


def test_equal_seeds_give_equal_times() -> None:
    first, again, other = (Arrivals(request_rate=1.0, seed=s).times(50) for s in (5, 5, 6))
    assert first == again != other


@pytest.mark.parametrize("rate", [None, math.inf])
def test_a_burst_is_all_at_once(rate: float | None) -> None:
    arrivals = Arrivals(request_rate=rate)
    assert arrivals.times(3) == [0.0, 0.0, 0.0]
    assert arrivals.described(False) == "all at once"


def test_times_of_a_trace_pass_as_fast_as_asked_for() -> None:
    recorded = [0.0, 3.0, 4.5]
    assert Arrivals().times(3, recorded) == recorded
    assert Arrivals(trace_speed=3.0).times(3, recorded) == [0.0, 1.0, 1.5]
    assert Arrivals(trace_speed=3.0).described(True) == "times of the trace, 3 times as fast"


def test_a_rate_goes_before_the_times_of_a_trace() -> None:
    assert Arrivals(request_rate=math.inf).times(2, [0.0, 9.0]) == [0.0, 0.0]
    assert not Arrivals(request_rate=1.0).replays(has_times=True)


def test_a_tiny_burstiness_draws_no_nan() -> None:
    times = Arrivals(request_rate=1.0, burstiness=1e-300).times(5)
    assert times == [0.0] * 5


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"request_rate": 0.0}, "--request-rate"),
        ({"request_rate": -1.0}, "--request-rate"),
        ({"request_rate": math.nan}, "--request-rate"),
        ({"burstiness": 0.0}, "--burstiness"),
        ({"burstiness": math.nan}, "--burstiness"),
        ({"trace_speed": 0.0}, "--trace-speed"),
        ({"trace_speed": math.inf}, "--trace-speed"),
        ({"seed": -1}, "--seed"),
        ({"seed": 2**32}, "--seed"),
    ],
)
def test_what_is_out_of_range_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=f"^{named} must be "):
        Arrivals(**changes)


@pytest.mark.parametrize(
    ("arrivals", "recorded"),
    [(Arrivals(trace_speed=2.0), None), (Arrivals(trace_speed=2.0, request_rate=1.0), [0.0, 1.0])],
)
def test_a_speed_needs_times_that_are_used(
    arrivals: Arrivals, recorded: list[float] | None
) -> None:
    with pytest.raises(ConfigError, match="--trace-speed must be given with a trace"):
        arrivals.times(2, recorded)
