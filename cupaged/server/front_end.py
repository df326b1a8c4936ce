"""One front end: its services, what the engine's state means for them, and how it ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cupaged.server import compat
from cupaged.server.admin_service import AdminService
from cupaged.server.auth import Tokens
from cupaged.server.engine_client import EngineClient, EngineState
from cupaged.server.generation_service import GenerationService
from cupaged.server.grpc_server import GrpcOptions, GrpcServer
from cupaged.server.health_service import SERVICE as HEALTH
from cupaged.server.health_service import HealthService
from cupaged.server.load_tracker import LoadTracker
from cupaged.server.model_service import ModelService
from cupaged.server.model_text import ModelText
from cupaged.server.observation import Observers
from cupaged.server.request_intake import RequestIntake
from cupaged.server.served_model import ServedModel
from cupaged.server.settings import SERVICES
from cupaged.server.tls import TlsFiles
from cupaged.v1 import admin_pb2, generation_pb2, model_pb2

GENERATION = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"]
MODEL = model_pb2.DESCRIPTOR.services_by_name["ModelService"]
ADMIN = admin_pb2.DESCRIPTOR.services_by_name["AdminService"]
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontEndOptions:
    """Where and how a front end listens.

    Args:
        host, port: of TCP; port 0 for any free one.
        uds: path of a unix socket, used instead of TCP.
        admin_port: of AdminService; None to leave it out.
        grpc: how it speaks.
        tokens: who may call; None for everybody.
        tls: certificates; None for no TLS.
        drain_timeout_s: how long calls may go on after the end was asked for.
        log_level: at the start.
        features: what GetServerInfo lists.
        services: names of those that are served.
        statistics_file: see `compat.ServiceParts`.
    """

    host: str = "127.0.0.1"
    port: int = 0
    uds: str | None = None
    admin_port: int | None = None
    grpc: GrpcOptions = field(default_factory=GrpcOptions)
    tokens: Tokens | None = None
    tls: TlsFiles | None = None
    drain_timeout_s: float = 30.0
    log_level: str = "info"
    features: tuple[str, ...] = ()
    services: tuple[str, ...] = SERVICES
    statistics_file: Path | None = None


class FrontEnd:
    """Answers gRPC with a model whose engine is elsewhere. Made and used in one event loop.

    Args:
        options: where and how.
        model: that is served.
        client: of the engine; this object connects it and takes its callbacks.
        observers: of the requests.
        tell: a message to the supervisor: `engine_silent [whether]`, and see `AdminService`.

    Raises:
        ConfigError: certificates or tokens cannot be used.
    """

    def __init__(
        self,
        options: FrontEndOptions,
        model: ServedModel,
        client: EngineClient,
        observers: Observers,
        tell: Callable[..., None] = lambda *message: None,
    ) -> None:
        self._options = options
        self._model = model
        tokens = options.tokens
        self._client = client
        self._tell = tell
        self._loads = LoadTracker()
        intake = RequestIntake(model, client, observers)
        parts = compat.ServiceParts(intake, self._loads, options.statistics_file)
        self._compatible = [
            compat.load(name, parts) for name in options.services if name in compat.MODULES
        ]
        self._models = ModelService(
            model, client, self._loads, features=options.features,
            compatible_packages=[s.descriptor.file.package for s in self._compatible],
        )  # fmt: skip
        services: list[tuple[Any, object]] = []
        if "v1" in options.services:
            services += [(GENERATION, GenerationService(intake)), (MODEL, self._models)]
        services += [(service.descriptor, service) for service in self._compatible]
        self._health = HealthService([descriptor.full_name for descriptor, _ in services])
        services.append((HEALTH, self._health))
        self._server = GrpcServer(options.grpc, services, tokens=tokens, tls=options.tls)
        self._admin_server: GrpcServer | None = None
        if options.admin_port is not None:
            admin = AdminService(
                client, tell, drain_timeout_s=options.drain_timeout_s, log_level=options.log_level
            )
            self._admin_server = GrpcServer(
                options.grpc, [(ADMIN, admin)], tokens=tokens, tls=options.tls
            )
        self._engine_pid: int | None = None
        self.port = 0
        self.admin_port = 0
        client.on_state = self._engine_changed
        client.on_stats = self._loads.observe
        client.on_silence = self._silence_changed

    async def start(self) -> str:
        """Listen, before the engine is ready, too; returns the address as a client writes it.

        Raises:
            ConfigError: an address cannot be listened at.
        """
        options = self._options
        if options.uds is not None:
            self._server.listen_unix(options.uds)
            address = f"unix:{options.uds}"
        else:
            self.port = self._server.listen(options.host, options.port)
            shown = f"[{options.host}]" if ":" in options.host else options.host
            address = f"{shown}:{self.port}"
        if self._admin_server is not None:
            self.admin_port = self._admin_server.listen(options.host, options.admin_port or 0)
            await self._admin_server.start()
        await self._server.start()
        await self._client.connect(wait=False)
        self._engine_changed(self._client.state)
        return address

    def set_text(self, text: ModelText) -> None:
        """Tokenizer and chat template have been read."""
        self._model.set_text(text)
        self._engine_changed(self._client.state)

    async def drain(
        self,
        delay_s: float = 0.0,
        timeout_s: float | None = None,
        *,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        """Refuse new requests, let those that run end, stop.

        Args:
            delay_s: how long calls are answered with DRAINING before the port is closed, so that
                load balancers can see the health and turn elsewhere.
            timeout_s: then calls get that long to end; by default the server's.
            sleep: waits that many seconds.
        """
        self._health.set_serving(False)
        self._client.set_state("draining")
        if delay_s > 0:
            await sleep(delay_s)
        await self.stop(self._options.drain_timeout_s if timeout_s is None else timeout_s)

    async def stop(self, grace_s: float = 0.0) -> None:
        """Close the ports, and after that time all calls, and the engine's connection."""
        self._health.set_serving(False)
        self._health.close()
        self._models.close()
        for service in self._compatible:
            service.close()
        await self._server.stop(grace_s)
        if self._admin_server is not None:
            await self._admin_server.stop(0)
        await self._client.close()

    def _engine_changed(self, state: EngineState) -> None:
        """Health follows the engine; what is known of it is renewed."""
        is_ready = state.phase == "ready"
        info = self._client.info
        if is_ready and info is not None:
            self._model.set_info(info)
            if info.pid != self._engine_pid:
                self._engine_pid = info.pid
                self._loads.engine_started()
                self._models.engine_ready()
        self._health.set_serving(is_ready and self._model.is_ready and not self._client.is_silent)
        _logger.debug("the engine is %s %s", state.phase, state.reason)

    def _silence_changed(self, is_silent: bool) -> None:
        """An engine that hangs takes no requests, whatever else it does."""
        self._tell("engine_silent", is_silent)
        self._engine_changed(self._client.state)
