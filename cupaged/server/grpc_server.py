"""A grpc.aio server of some services: options, handlers, reflection, ports."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.descriptor_pool import Default, DescriptorPool
from grpc_reflection.v1alpha import reflection

from cupaged.errors import ConfigError
from cupaged.server.auth import AuthInterceptor, Tokens
from cupaged.server.rpc import service_handler
from cupaged.server.tls import TlsFiles, server_credentials


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcOptions:
    """How the server speaks gRPC.

    Args:
        max_message_bytes: the largest request that is read, and answer that is sent.
        keepalive_time_s: after that time without a word a client is pinged.
        keepalive_timeout_s: a client that does not answer the ping by then is gone.
        min_ping_interval_s: clients that ping more often are sent away.
        max_connection_age_s: connections older than that are asked to end once their calls have
            ended, so that clients spread over new servers; None for no limit.
        debug_errors: INTERNAL errors carry a stack.
    """

    max_message_bytes: int = 64 * 2**20
    keepalive_time_s: float = 60.0
    keepalive_timeout_s: float = 20.0
    min_ping_interval_s: float = 10.0
    max_connection_age_s: float | None = None
    debug_errors: bool = False

    def channel_options(self) -> list[tuple[str, int]]:
        """For gRPC. Long silent calls are normal here, so clients may ping while nothing comes."""
        options = [
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.max_send_message_length", self.max_message_bytes),
            ("grpc.so_reuseport", 1),
            ("grpc.keepalive_time_ms", round(self.keepalive_time_s * 1000)),
            ("grpc.keepalive_timeout_ms", round(self.keepalive_timeout_s * 1000)),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            (
                "grpc.http2.min_recv_ping_interval_without_data_ms",
                round(self.min_ping_interval_s * 1000),
            ),
        ]
        if self.max_connection_age_s is not None:
            options.append(("grpc.max_connection_age_ms", round(self.max_connection_age_s * 1000)))
        return options


class _Pools:
    """Several descriptor pools as the one that reflection asks: the first that knows answers."""

    def __init__(self, pools: Iterable[DescriptorPool]) -> None:
        self._pools = {id(pool): pool for pool in (Default(), *pools)}.values()

    def __getattr__(self, find: str) -> Callable[..., Any]:
        def ask(*what: Any) -> Any:
            for pool in self._pools:
                with suppress(KeyError):
                    return getattr(pool, find)(*what)
            raise KeyError(what)

        return ask


class GrpcServer:
    """One server and its services.

    Args:
        options: how it speaks.
        services: pairs of a service's descriptor and the object that answers.
        tokens: who may call; None for everybody.
        tls: its certificates; None for no TLS.
    """

    def __init__(
        self,
        options: GrpcOptions,
        services: Sequence[tuple[Any, object]],
        *,
        tokens: Tokens | None = None,
        tls: TlsFiles | None = None,
    ) -> None:
        self._credentials = None if tls is None else server_credentials(tls)
        self._server = grpc.aio.server(
            interceptors=[] if tokens is None else [AuthInterceptor(tokens)],
            options=options.channel_options(),
        )
        handlers = [
            service_handler(
                descriptor,
                servicer,
                max_message_bytes=options.max_message_bytes,
                debug_errors=options.debug_errors,
            )
            for descriptor, servicer in services
        ]
        self._server.add_generic_rpc_handlers(handlers)
        names = [descriptor.full_name for descriptor, _ in services]
        pool: Any = _Pools([descriptor.file.pool for descriptor, _ in services])
        reflection.enable_server_reflection([*names, reflection.SERVICE_NAME], self._server, pool)

    def listen(self, host: str, port: int) -> int:
        """Listen at a TCP port, 0 for any; returns its number.

        Raises:
            ConfigError: that cannot be done.
        """
        shown = f"[{host}]" if ":" in host else host
        return self._add(f"{shown}:{port}", "host and port")

    def listen_unix(self, path: str) -> None:
        """Listen at a unix socket.

        Raises:
            ConfigError: that cannot be done.
        """
        self._add(f"unix:{path}", "uds")

    async def start(self) -> None:
        """Take calls from now on."""
        await self._server.start()

    async def stop(self, grace_s: float) -> None:
        """Listen no more; return when the calls have ended, or were ended after that time."""
        await self._server.stop(grace_s)

    def _add(self, address: str, name: str) -> int:
        try:
            if self._credentials is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, self._credentials)
        except RuntimeError:
            port = 0
        if not port:
            raise ConfigError(name, address, "an address at which this machine can listen")
        return port
