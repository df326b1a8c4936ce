"""Both clients behind one face, so that a test of behaviour runs with each of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Self

from cupaged.client import AsyncClient, Client


class Blocking:
    """An `AsyncClient` that is used as if it were a `Client`; it has a loop of its own."""

    def __init__(self, address: str, **settings: Any) -> None:
        self.runner = asyncio.Runner()
        self._client = AsyncClient(address, **settings)

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **settings: Any) -> Any:
            return self.runner.run(self._made(name, arguments, settings))

        return call

    async def _made(self, name: str, arguments: Any, settings: Any) -> Any:
        made = getattr(self._client, name)(*arguments, **settings)
        return _BlockingStream(self, made) if hasattr(made, "__aiter__") else await made

    def close(self) -> None:
        self.runner.run(self._client.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
        self.runner.close()


class _BlockingStream:
    """A stream of such a client."""

    def __init__(self, client: Blocking, stream: Any) -> None:
        self._client = client
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        try:
            return self._client.runner.run(_next(self._stream))
        except StopAsyncIteration:
            raise StopIteration from None

    def texts(self) -> Iterator[str]:
        async def collect() -> list[str]:
            return [piece async for piece in self._stream.texts()]

        return iter(self._client.runner.run(collect()))

    def cancel(self) -> None:
        async def cancel() -> None:
            self._stream.cancel()

        self._client.runner.run(cancel())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._client.runner.run(self._stream.__aexit__(*error))


async def _next(stream: Any) -> Any:
    return await stream.__anext__()


CLIENTS: dict[str, Any] = {"sync": Client, "async": Blocking}
