"""When requests are sent: bursts, Poisson and gamma processes, times of a trace.

Times are seconds after the start of the run, ascending, one a request, worked out before it starts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cupaged.errors import ConfigError

__all__ = ["Arrivals"]


@dataclass(frozen=True, slots=True)
class Arrivals:
    """How arrivals are drawn.

    Args:
        request_rate: requests a second; inf sends all at once; None takes the times of the trace
            where it has some, else inf.
        burstiness: shape of the gamma distribution of the intervals: 1 is a Poisson process, less
            comes in bunches (their squared coefficient of variation is 1 / burstiness), inf is
            a regular beat. Has no effect at an infinite rate.
        trace_speed: how much faster than they were recorded the times of a trace pass.
        seed: equal seeds give equal times.
    """

    request_rate: float | None = None
    burstiness: float = 1.0
    trace_speed: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.request_rate is not None and not self.request_rate > 0:
            raise ConfigError("--request-rate", self.request_rate, "> 0, or inf")
        if not self.burstiness > 0:
            raise ConfigError("--burstiness", self.burstiness, "> 0, or inf")
        if self.trace_speed is not None and not 0 < self.trace_speed < math.inf:
            raise ConfigError("--trace-speed", self.trace_speed, "finite and > 0")
        if not 0 <= self.seed < 2**32:
            raise ConfigError("--seed", self.seed, "in [0, 2^32)")

    def times(self, num_requests: int, recorded: Sequence[float] | None = None) -> list[float]:
        """When each request is due.

        recorded: times of a trace in seconds, from 0, ascending; None where it has none.

        A process at a finite rate is stretched so that the last request comes exactly at
        num_requests / request_rate, as vLLM does: runs with other seeds have the same mean rate.
        """
        if recorded is not None and self.replays(True):
            return [time / (self.trace_speed or 1.0) for time in recorded]
        if self.trace_speed is not None:
            raise ConfigError(
                "--trace-speed",
                self.trace_speed,
                "given with a trace that has times, and without --request-rate",
            )
        rate = math.inf if self.request_rate is None else self.request_rate
        if rate == math.inf or not num_requests:
            return [0.0] * num_requests
        if self.burstiness == math.inf:
            intervals = np.full(num_requests, 1 / rate)
        else:
            scale = 1 / (rate * self.burstiness)
            intervals = np.random.RandomState(self.seed).gamma(self.burstiness, scale, num_requests)
        times = np.cumsum(intervals)
        if times[-1] > 0:  # a gamma of a tiny shape may draw nothing but zeros
            times *= num_requests / rate / times[-1]
        return [float(time) for time in times]

    def replays(self, has_times: bool) -> bool:
        """Whether the times of a trace are used, if it has some."""
        return self.request_rate is None and has_times

    def described(self, has_times: bool) -> str:
        """In words, for a person."""
        if self.replays(has_times):
            return f"times of the trace, {self.trace_speed or 1.0:g} times as fast"
        if self.request_rate in (None, math.inf):
            return "all at once"
        kind = {1.0: "Poisson process", math.inf: "regular beat"}.get(
            self.burstiness, f"gamma distribution, burstiness {self.burstiness:g}"
        )
        return f"{self.request_rate:g} requests/s ({kind})"
