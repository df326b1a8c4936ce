"""HTTP/1.1 for the load generator: an address, and connections that stream what they receive.

On asyncio's streams, with h11 for the protocol. A connection carries one request at a time and is
kept for the next one. No proxy, no redirect, no compression, no retry: what is measured is one
request to one server.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

import h11

from cupaged.benchmarks.backend import RequestFailed
from cupaged.client.connection import Connection
from cupaged.errors import ConfigError

__all__ = ["Address", "Answer", "HttpClient"]

_PORTS = {"http": 80, "https": 443}
_ALLOWED = "HOST:PORT, http://HOST:PORT or https://HOST:PORT, perhaps with a path"
_READ_BYTES = 2**16
_MAX_HEAD_BYTES = 2**16
_MAX_WHOLE_BYTES = 2**24  # of an answer that is not streamed
_CONNECT_S = 10.0


class Address(NamedTuple):
    """Where a server is. `path` has no slash at its end; `tls` is None for plain text."""

    host: str
    port: int
    path: str
    tls: ssl.SSLContext | None
    headers: tuple[tuple[str, str], ...]

    @classmethod
    def read(cls, address: str, options: Mapping[str, Any]) -> Address:
        """Of a URL and the keyword arguments of `cupaged.client.connection.Connection`.

        Raises:
            ConfigError: the address is none, or the options are wrong or do not fit it.
        """
        if "://" not in address:
            scheme = "https" if options.get("ca_file") or options.get("cert_file") else "http"
            address = f"{scheme}://{address}"
        try:
            url = urlsplit(address)
            port = _PORTS.get(url.scheme) if url.port is None else url.port
            (url.hostname or "").encode("idna")  # as it will be looked up
        except ValueError:
            raise ConfigError("--address", address, _ALLOWED) from None
        lacks_port = url.netloc.endswith(":")  # as in unix:/path
        is_plain = url.username is None and not (lacks_port or url.query or url.fragment)
        is_text = address.isascii() and address.isprintable() and " " not in address
        if not (port and url.hostname and is_plain and is_text and url.scheme in _PORTS):
            raise ConfigError("--address", address, _ALLOWED)
        host = f"[{url.hostname}]" if ":" in url.hostname else url.hostname
        is_tls = url.scheme == "https"
        checked = Connection(f"{'grpcs' if is_tls else 'grpc'}://{host}:{port}", **options)
        if checked.uses_tls and not is_tls:
            raise ConfigError("--address", address, "https:// where certificates are given")
        tls = None
        if is_tls:
            tls = ssl.create_default_context(cafile=options.get("ca_file"))
            if options.get("cert_file"):
                tls.load_cert_chain(options["cert_file"], options["key_file"])
        headers = (("host", f"{host}:{port}"), *checked.metadata())
        return cls(url.hostname, port, url.path.rstrip("/"), tls, headers)


class Answer:
    """The head of an answer, and its body as it comes. A context: its end is that of the request.

    Attributes:
        status: of HTTP.
        pieces: of the body.
    """

    def __init__(
        self, response: h11.Response, connection: _Connection, done: Callable[[_Connection], None]
    ) -> None:
        self.status: int = response.status_code
        self.pieces = connection.body()
        self._headers = dict(response.headers)
        self._connection, self._done = connection, done

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.pieces.aclose()
        self._done(self._connection)

    def header(self, name: str) -> str:
        """A value, "" if there is none."""
        value: bytes = self._headers.get(name.encode(), b"")
        return value.decode("latin-1")

    async def whole(self) -> bytes:
        """All of the body.

        Raises:
            RequestFailed: it does not come to its end, or has more than 16 MiB.
        """
        body = bytearray()
        async for piece in self.pieces:
            body += piece
            if len(body) > _MAX_WHOLE_BYTES:
                raise RequestFailed("protocol error", "an answer of more than 16 MiB")
        return bytes(body)


class HttpClient:
    """Connections to one server: as many as there are requests under way.

    Args:
        address: of the server.
        timeout_s: from the start of a request to the end of its answer; None for none.
    """

    def __init__(self, address: Address, timeout_s: float | None = None) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._idle: list[_Connection] = []
        self._all: set[_Connection] = set()

    async def request(
        self, method: str, path: str, headers: tuple[tuple[str, str], ...] = (), body: bytes = b""
    ) -> Answer:
        """Send a request and wait for the head of its answer.

        A connection whose answer was read to its end is kept, any other one is closed.

        Raises:
            RequestFailed: no connection, no answer in time, or none that is HTTP.
        """
        loop = asyncio.get_running_loop()
        deadline = None if self._timeout_s is None else loop.time() + self._timeout_s
        connection = await self._connection(deadline)
        head = h11.Request(
            method=method,
            target=self._address.path + path,
            headers=[
                *self._address.headers, *headers, ("accept-encoding", "identity"),
                *((("content-length", str(len(body))),) if body else ()),
            ],
        )  # fmt: skip
        try:
            response = await connection.begin(head, body)
        except BaseException:
            self._end(connection)
            raise
        return Answer(response, connection, self._done)

    async def connect(self) -> None:
        """Have a connection for the first request.

        Raises:
            RequestFailed: there is none.
        """
        self._idle.append(await self._connection(None))

    async def close(self) -> None:
        """Close all connections, those under way too."""
        for connection in [*self._all]:
            self._end(connection)
            await connection.closed()

    async def _connection(self, deadline: float | None) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_alive:
                connection.deadline = deadline
                return connection
            self._end(connection)
        connection = await _Connection.opened(self._address, deadline)
        self._all.add(connection)
        return connection

    def _done(self, connection: _Connection) -> None:
        if connection.recycle():
            self._idle.append(connection)
        else:
            self._end(connection)

    def _end(self, connection: _Connection) -> None:
        self._all.discard(connection)
        connection.close()


class _Connection:
    """One connection. `deadline` is of the request under way, on the loop's clock."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, deadline: float | None
    ) -> None:
        self._reader, self._writer = reader, writer
        self._protocol = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_HEAD_BYTES)
        self.deadline = deadline

    @classmethod
    async def opened(cls, address: Address, deadline: float | None) -> _Connection:
        """Connect, within 10 s.

        Raises:
            RequestFailed: says why not.
        """
        latest = asyncio.get_running_loop().time() + _CONNECT_S
        when = latest if deadline is None else min(deadline, latest)
        with _failures():
            async with asyncio.timeout_at(when):
                reader, writer = await asyncio.open_connection(
                    address.host, address.port, ssl=address.tls
                )
        return cls(reader, writer, deadline)

    @property
    def is_alive(self) -> bool:
        """Whether the server has not closed it, as far as is known."""
        return not (self._reader.at_eof() or self._writer.is_closing())

    async def begin(self, head: h11.Request, body: bytes) -> h11.Response:
        """Send a request; gives the head of the answer."""
        protocol = self._protocol
        with _failures():
            data = protocol.send(head) or b""
            if body:
                data += protocol.send(h11.Data(data=body)) or b""
            self._writer.write(data + (protocol.send(h11.EndOfMessage()) or b""))
            async with asyncio.timeout_at(self.deadline):
                await self._writer.drain()
            while True:
                event = await self._next_event()
                if isinstance(event, h11.Response):
                    return event
                if not isinstance(event, h11.InformationalResponse):
                    raise RequestFailed("connection closed", "the server closed the connection")

    async def body(self) -> AsyncGenerator[bytes, None]:
        """The pieces of the answer's body."""
        with _failures():
            while isinstance(event := await self._next_event(), h11.Data):
                yield bytes(event.data)

    def recycle(self) -> bool:
        """Be ready for the next request; False if that cannot be."""
        if self._protocol.our_state is self._protocol.their_state is h11.DONE and self.is_alive:
            self._protocol.start_next_cycle()
            return True
        return False

    def close(self) -> None:
        """At once."""
        self._writer.transport.abort()

    async def closed(self) -> None:
        """Wait until the loop knows it, too."""
        with suppress(OSError):
            await self._writer.wait_closed()

    async def _next_event(self) -> Any:
        while (event := self._protocol.next_event()) is h11.NEED_DATA:
            async with asyncio.timeout_at(self.deadline):
                data = await self._reader.read(_READ_BYTES)
            self._protocol.receive_data(data)
            if not data:
                try:
                    return self._protocol.next_event()
                except h11.RemoteProtocolError:
                    raise RequestFailed(
                        "connection closed", "the server closed the connection in an answer"
                    ) from None
        return event


@contextmanager
def _failures() -> Iterator[None]:
    """What goes wrong with a connection becomes a RequestFailed of a kind."""
    try:
        yield
    except TimeoutError:
        raise RequestFailed("timeout", "no answer in time") from None
    except h11.RemoteProtocolError as error:
        raise RequestFailed("protocol error", f"no HTTP answer: {error}") from None
    except ssl.SSLError as error:
        raise RequestFailed("TLS failed", str(error.reason or error)) from None
    except ConnectionRefusedError:
        raise RequestFailed("connection refused", "nothing listens there") from None
    except OSError as error:
        code = "connection lost" if isinstance(error, ConnectionError) else "connection failed"
        raise RequestFailed(code, error.strerror or str(error)) from None
