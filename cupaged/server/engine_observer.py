"""What the engine process tells of itself: metrics, and the line of numbers in the log."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

from cupaged.outputs import EngineStats
from cupaged.server.stats_line import StatsLine

if TYPE_CHECKING:
    from cupaged.server.metrics import EngineMetrics

_logger = logging.getLogger(__name__)


class Observer(Protocol):
    """Is told of every step, and once a second of the state."""

    def step(self, seconds: float, *, num_computed: int, num_generated: int) -> None:
        """A step is done; see `EngineMetrics.step`."""

    def update(self, stats: EngineStats, *, busy: bool) -> None:
        """A snapshot; `busy` while there is work."""


class NoObserver:
    """Tells nobody."""

    def step(self, seconds: float, *, num_computed: int, num_generated: int) -> None:
        """Nothing."""

    def update(self, stats: EngineStats, *, busy: bool) -> None:
        """Nothing."""


class EngineObserver:
    """Metrics in the files of the server, and the line every ten seconds.

    Args:
        stats_line: None when the line is not wanted.
    """

    def __init__(self, metrics: EngineMetrics, stats_line: StatsLine | None) -> None:
        self._metrics = metrics
        self._line = stats_line
        self.step = metrics.step

    def update(self, stats: EngineStats, *, busy: bool) -> None:
        """Set the gauges, and perhaps log the line."""
        self._metrics.update(stats)
        if self._line is not None and (busy or self._line.is_due):
            line = self._line.observe(stats)
            if line is not None:
                _logger.info("%s", line)
