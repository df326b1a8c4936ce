"""What a child is told first: the settings, and its own part in the server."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from cupaged.server.control import ControlChannel, ControlClosed
from cupaged.server.settings import ServeSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildStart:
    """The first message of the control channel.

    Args:
        settings: of the whole server.
        name: of this process, in logs and metrics: "engine", "frontend-1".
        index: of a front end, from 0; the first one has AdminService.
        engine_socket: where the engine listens.
        metrics_folder: for `metrics.store_in`; None when nobody will look at the metrics.
        port, admin_port: where this front end listens, never 0; None for a unix socket and for no
            AdminService.
    """

    settings: ServeSettings
    name: str
    index: int = 0
    engine_socket: str
    metrics_folder: str | None = None
    port: int | None = None
    admin_port: int | None = None

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
