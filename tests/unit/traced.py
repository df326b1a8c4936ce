"""Small cores whose events are kept in a list or written into a file."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from cupaged.config import EngineConfig
from cupaged.engine.runner import Runner
from cupaged.engine.scheduling_policy import make_policy
from cupaged.engine.step_events import Event, EventSink
from cupaged.engine.trace_file import TraceHeader, TraceReader, TraceWriter
from cupaged.engine.traced_core import TracedCore
from tests.unit.small_core import RecordingRunner, small_config


class Kept:
    """A sink that keeps everything."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def write(self, event: Event) -> None:
        """Keep it."""
        self.events.append(event)


def ticking() -> Callable[[], float]:
    """A clock that goes on by a millisecond whenever it is looked at."""
    ticks = count()
    return lambda: next(ticks) / 1000


def traced_core(
    sink: EventSink,
    runner: Callable[[EngineConfig], Runner] = RecordingRunner,
    policy: str = "fcfs",
    **limits: Any,
) -> TracedCore:
    """A core with `small_config(**limits)`."""
    config = small_config(**limits)
    return TracedCore(config, runner(config), sink, clock=ticking(), policy=make_policy(policy))


def writer_of(path: Path, policy: str = "fcfs", **limits: Any) -> TraceWriter:
    """A file for such a core."""
    return TraceWriter(path, TraceHeader(small_config(**limits), policy))


def read_all(path: Path) -> list[Event]:
    """All events of a file that is whole."""
    with TraceReader(path) as trace:
        events = list(trace)
        assert trace.num_cut_bytes == 0
    return events
