"""`grpc.health.v1.Health`: whether each service takes requests, asked once or watched.

A watcher that reads slowly delays nobody: all wait for the same event, and each writes for itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from cupaged.errors import DrainingError, shown
from cupaged.server.rpc import Call

SERVICE = health_pb2.DESCRIPTOR.services_by_name["Health"]
_Status = health_pb2.HealthCheckResponse


class HealthService:
    """The same status for all services, and for "", which stands for the server.

    Args:
        services: their full names.
    """

    def __init__(self, services: Iterable[str]) -> None:
        self._services = {"", *services}
        self._is_serving = False
        self._is_closed = False
        self._changed = asyncio.Event()

    def set_serving(self, is_serving: bool) -> None:
        """Tell everyone who watches, if that is news."""
        if is_serving != self._is_serving:
            self._is_serving = is_serving
            self._wake()

    def close(self) -> None:
        """End the watches, which would keep the server from ending. Nothing changes afterwards."""
        self._is_closed = True
        self._wake()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, call: Call
    ) -> health_pb2.HealthCheckResponse:
        """The status now; NOT_FOUND for a service that is not served."""
        if request.service not in self._services:
            await call.context.abort(
                grpc.StatusCode.NOT_FOUND, f"service {shown(request.service)} is not served here"
            )
        return _Status(status=self._status(request.service))

    async def Watch(self, request: health_pb2.HealthCheckRequest, call: Call) -> None:
        """The status now and whenever it changes; changes that are undone at once may be left out.

        An unknown service is SERVICE_UNKNOWN, and the watch goes on, as the protocol demands.
        """
        told: int | None = None
        while True:
            changed, status = self._changed, self._status(request.service)
            if status != told:
                await call.write(_Status(status=status))
                told = status
            elif self._is_closed:
                raise DrainingError("the server is ending")
            else:
                await changed.wait()

    def _status(self, service: str) -> Any:
        if service not in self._services:
            return _Status.SERVICE_UNKNOWN
        return _Status.SERVING if self._is_serving else _Status.NOT_SERVING

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
