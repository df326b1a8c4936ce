"""Connections of a backend that speaks gRPC, and what a failed call is counted as."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import grpc
import grpc.aio

from cupaged.benchmarks.backend import BackendOptions, RequestFailed
from cupaged.client.connection import Connection
from cupaged.client.errors import ClientError, error_from_status

__all__ = ["GrpcChannels", "messages", "whole"]

_CONNECT_S = 10.0


class GrpcChannels:
    """As many channels as the options say, each with a connection of its own.

    Attributes:
        connection: how the server is reached.
        channels: once opened.
        metadata: of every call, once opened.
    """

    def __init__(self, options: BackendOptions) -> None:
        self.connection = Connection(options.address, **options.connection)
        self.channels: list[grpc.aio.Channel] = []
        self.metadata: tuple[tuple[str, str], ...] = ()
        self._number = options.connections

    async def open(self) -> None:
        """Make the channels, and wait until each is connected.

        Raises:
            RequestFailed: one is not connected in time.
        """
        self.metadata = self.connection.metadata()
        credentials = self.connection.credentials()
        target = self.connection.target
        # Equal channels of a process share a connection, unless told not to.
        options = [*self.connection.options, ("grpc.use_local_subchannel_pool", 1)]
        for _ in range(self._number):
            if credentials is None:
                channel = grpc.aio.insecure_channel(target, options)
            else:
                channel = grpc.aio.secure_channel(target, credentials, options)
            self.channels.append(channel)
        try:
            async with asyncio.timeout(_CONNECT_S):
                await asyncio.gather(*(channel.channel_ready() for channel in self.channels))
        except TimeoutError:
            raise RequestFailed("UNAVAILABLE", f"{target}: no connection") from None

    async def close(self) -> None:
        """Cancel what runs and disconnect."""
        for channel in self.channels:
            await channel.close()
        self.channels.clear()


async def messages(call: Any) -> AsyncGenerator[bytes, None]:
    """The messages of a streaming call as bytes; closing the iterator cancels the call.

    Raises:
        RequestFailed: the call ends with another status than OK.
    """
    try:
        while (data := await call.read()) is not grpc.aio.EOF:
            yield data
        code = await call.code()
        if code is not grpc.StatusCode.OK:
            raise _failure(code, await call.details(), await call.trailing_metadata())
    except grpc.aio.AioRpcError as error:
        raise _failure(error.code(), error.details(), error.trailing_metadata()) from None
    finally:
        call.cancel()  # of no effect on a call that has ended


async def whole(call: Any) -> AsyncGenerator[bytes, None]:
    """The same of a call that has one message."""
    try:
        yield await call
    except grpc.aio.AioRpcError as error:
        raise _failure(error.code(), error.details(), error.trailing_metadata()) from None
    finally:
        call.cancel()


def _failure(code: grpc.StatusCode, details: str | None, trailer: Any) -> RequestFailed:
    """Counted by the status code and the server's reason: `RESOURCE_EXHAUSTED QUEUE_FULL`."""
    error: ClientError = error_from_status(code, details, trailer or ())
    return RequestFailed(f"{code.name} {error.reason}".strip(), error.message)
