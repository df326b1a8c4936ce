"""Services of other servers, for clients that were written for those.

Each is a module of its own that is imported only where it is served, and its messages are known to
nobody else (`interface`): a process that also imports such a client's stubs is not disturbed.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from cupaged.server.load_tracker import LoadTracker
from cupaged.server.request_intake import RequestIntake

# Module of each service by its name in the settings; it has `service(parts)`.
MODULES = {
    "kserve": "cupaged.server.compat.kserve_service",
    "vllm": "cupaged.server.compat.vllm_service",
}


@dataclass(frozen=True, slots=True)
class ServiceParts:
    """What a front end gives its services.

    Args:
        intake: takes requests; knows model and engine.
        loads: how busy the engine is.
        statistics_file: for counts that all front ends tell; None for one that is alone.
    """

    intake: RequestIntake
    loads: LoadTracker
    statistics_file: Path | None = None


class CompatibleService(Protocol):
    """Answers the RPCs of a service by methods of their names, see `rpc.service_handler`."""

    @property
    def descriptor(self) -> Any:
        """Of the service."""

    def close(self) -> None:
        """The server is ending: end the streams that have no end of their own."""


def load(name: str, parts: ServiceParts) -> CompatibleService:
    """The service of that name, one of `MODULES`."""
    service: CompatibleService = import_module(MODULES[name]).service(parts)
    return service
