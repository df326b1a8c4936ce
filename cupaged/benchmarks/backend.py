"""What the load generator needs of a server: the one place where another protocol is added.

A protocol is a class that keeps the contract of `Backend`, and a line in `BACKENDS`. Arrivals,
limits, clocks and statistics are not its business: it sends one prepared request and says when
messages came and how many tokens they held.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple, Protocol

from cupaged.benchmarks.datasets import ModelFacts, Sample
from cupaged.errors import ConfigError, CupagedError

__all__ = [
    "BACKENDS",
    "Backend",
    "BackendOptions",
    "Received",
    "RequestFailed",
    "ServerFacts",
    "Usage",
    "make_backend",
]

# Imported only when asked for: a backend may need a package that others do not.
BACKENDS = {"cupaged": "cupaged.benchmarks.cupaged_backend:CupagedBackend"}


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """How the server is reached, and what every request asks for.

    Args:
        address: where the server is, in the backend's own notation.
        model: a name that the server knows; "" for its only one.
        connections: over which the requests are spread in turn. A server with several front ends
            gives each connection to one of them.
        timeout_s: deadline of a request; None for none.
        sampling: parameters by the names of `SamplingParams`; what is absent the server chooses.
        connection: TLS and token, as keyword arguments of `cupaged.client.connection.Connection`.
    """

    address: str
    model: str = ""
    connections: int = 1
    timeout_s: float | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    connection: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 1 <= self.connections <= 256:
            raise ConfigError("--connections", self.connections, "in [1, 256]")
        if self.timeout_s is not None and not 0 < self.timeout_s <= 86400 * 365:
            raise ConfigError("--timeout", self.timeout_s, "> 0 seconds")


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """The model under test, and what the server says of itself; `about` goes into the results."""

    model: ModelFacts
    about: Mapping[str, Any]


class Usage(NamedTuple):
    """The server's own counts of a finished request."""

    prompt_tokens: int
    completion_tokens: int


class Received(NamedTuple):
    """A message of an answer.

    Attributes:
        time_s: when it was there, by `time.perf_counter`.
        num_tokens: new tokens in it, by the server's count; 0 for a message without any.
        usage: on the last message of an answer that is complete, else None.
    """

    time_s: float
    num_tokens: int
    usage: Usage | None = None


class RequestFailed(CupagedError):
    """A request that got no complete answer. `code` is what failures are counted by."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


class Backend(Protocol):
    """One server, by one protocol."""

    def facts(self, wait_s: float) -> ServerFacts:
        """Ask for model and server; wait up to that long for a server that is not ready.

        Raises:
            CupagedError: it cannot be reached, is not ready in time, or has no such model.
        """

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text, by the tokenizer of the model."""

    def prepare(self, sample: Sample, request_id: str) -> bytes:
        """All of a request that can be made before the clock runs."""

    async def open(self) -> None:
        """Connect, so that no request has to wait for it."""

    def request(self, prepared: bytes) -> AsyncIterator[Received]:
        """Send a request now and give what comes, as it comes.

        Closing the iterator cancels the request.

        Raises:
            RequestFailed: the answer does not come, or not to its end.
        """

    async def close(self) -> None:
        """Cancel what runs and disconnect."""


def make_backend(name: str, options: BackendOptions) -> Backend:
    """The backend of a name.

    Raises:
        ConfigError: there is none, or an option is out of range.
    """
    if name not in BACKENDS:
        raise ConfigError("--backend", name, f"one of {', '.join(BACKENDS)}")
    module, _, kind = BACKENDS[name].partition(":")
    make: Callable[[BackendOptions], Backend] = getattr(import_module(module), kind)
    return make(options)
