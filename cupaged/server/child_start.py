"""How a child begins: it is told the settings, and its own part in the server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from cupaged.server import log_setup
from cupaged.server.child_signals import leave_to_supervisor
from cupaged.server.control import ControlChannel, ControlClosed
from cupaged.server.settings import ServeSettings

ORPHANED = 3  # exit code of a child whose supervisor is gone


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildStart:
    """The first message of the control channel.

    Args:
        settings: of the whole server.
        name: of this process, in logs and metrics: "engine", "frontend-1".
        index: of a front end, from 0; the first one has AdminService.
        engine_socket: where the engine listens.
        metrics_folder: for `metrics.store_in`; None when nobody will look at the metrics.
        statistics_file: of a front end, for `SharedCounts`.
        port, admin_port: where this front end listens, never 0; None for a unix socket and for no
            AdminService.
        others_serve: other front ends do, when this one is started.
    """

    settings: ServeSettings
    name: str
    index: int = 0
    engine_socket: str
    metrics_folder: str | None = None
    statistics_file: str | None = None
    port: int | None = None
    admin_port: int | None = None
    others_serve: bool = False

    def to_message(self) -> list[Any]:
        """`settings [settings, part]`."""
        part = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "settings"}
        return ["settings", self.settings.to_wire(), part]

    @classmethod
    def read(cls, control: ControlChannel) -> ChildStart:
        """Wait for the message.

        Raises:
            ControlClosed: the supervisor is gone.
        """
        kind, settings, part = control.read_first()
        if kind != "settings":
            raise ControlClosed(f"the first message is {kind!r}")
        return cls(settings=ServeSettings.from_wire(settings), **part)


def run_child(fd: int, run: Callable[[ChildStart, ControlChannel], int]) -> int:
    """Begin, log as the settings say, and `run`; the exit code.

    fd: the control channel.
    """
    leave_to_supervisor()
    control = ControlChannel.inherited(fd)
    try:
        start = ChildStart.read(control)
        settings = start.settings
        log_setup.configure(start.name, log_format=settings.log_format, level=settings.log_level)
        return run(start, control)
    except ControlClosed:
        return ORPHANED
