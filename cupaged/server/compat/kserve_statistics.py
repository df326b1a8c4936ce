"""What ModelStatistics tells: how many requests came by this service to all front ends."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from cupaged.outputs import RequestMetrics
from cupaged.server.compat.interface import Interface
from cupaged.server.compat.kserve_model import VERSION
from cupaged.server.shared_counts import SharedCounts

# By the names of InferStatistics; each is a count and nanoseconds in all.
_DURATIONS = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output")
_LAST_MS = 2 * len(_DURATIONS)  # milliseconds since 1970, behind them


class Statistics:
    """Counts the requests of one front end.

    Args:
        file: see `SharedCounts`.
    """

    def __init__(self, file: Path | None) -> None:
        self._counts = SharedCounts(file, _LAST_MS + 1)

    def succeeded(self, seconds: float, times: RequestMetrics) -> None:
        """A request was answered; `times` are the engine's. Queue, prefill and decode time stand
        for queue, input and inference."""
        self._arrived()
        self._add("success", seconds)
        self._add("queue", times.queue_time)
        self._add("compute_input", times.prefill_time)
        self._add("compute_infer", times.decode_time)
        self._add("compute_output", 0.0)

    def failed(self, seconds: float) -> None:
        """A request ended with an error, or was cancelled."""
        self._arrived()
        self._add("fail", seconds)

    def message(self, interface: Interface, names: list[str]) -> Any:
        """As ModelStatisticsResponse, the totals of all front ends, the same for each name."""
        everywhere = self._counts.everywhere()
        totals = [sum(each) for each in zip(*everywhere, strict=True)]
        durations = {
            name: {"count": totals[2 * i], "ns": totals[2 * i + 1]}
            for i, name in enumerate(_DURATIONS)
        }
        kind = interface.message("ModelStatistics")
        stats = [
            kind(
                name=name,
                version=VERSION,
                last_inference=max(numbers[_LAST_MS] for numbers in everywhere),
                inference_count=durations["success"]["count"],
                execution_count=durations["success"]["count"],
                inference_stats=durations,
            )
            for name in names
        ]
        return interface.message("ModelStatisticsResponse")(model_stats=stats)

    def _arrived(self) -> None:
        self._counts.put(_LAST_MS, time.time_ns() // 10**6)

    def _add(self, name: str, seconds: float | None) -> None:
        place = 2 * _DURATIONS.index(name)
        self._counts.add(place, 1)
        self._counts.add(place + 1, max(0, round((seconds or 0.0) * 1e9)))
