"""What the load generator needs of a server: the one place where another protocol is added.

A protocol is a class that keeps the contract of `Backend`, and a line in `BACKENDS`. Arrivals,
limits, clocks and statistics are not its business: it sends one prepared request and says when
messages came and how many tokens, or what text, they held.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple, Protocol

from cupaged.benchmarks.datasets import CountTokens, ModelFacts, Sample
from cupaged.errors import ConfigError, CupagedError

__all__ = [
    "BACKENDS",
    "NO_LIMIT",
    "Backend",
    "BackendKind",
    "BackendOptions",
    "Received",
    "RequestFailed",
    "ServerFacts",
    "ServerNotReady",
    "ServerUnusable",
    "Usage",
    "chosen_name",
    "make_backend",
]

NO_LIMIT = 2**31 - 1  # tokens of a context, where a server says nothing of it


class BackendKind(NamedTuple):
    """What is known of a backend before it is made.

    Attributes:
        path: module and class; imported only when asked for, as it may need a package of its own.
        port: of its servers, where none is given.
        takes_ids: prompts may be token ids, and the server counts tokens; otherwise they are texts,
            and only a tokenizer on this side can make prompts of a wanted length.
        shares_connections: many requests may be under way on one connection.
        is_chat: the prompts are messages of a user; None where either can be sent.
    """

    path: str
    port: int
    takes_ids: bool = False
    shares_connections: bool = True
    is_chat: bool | None = False


BACKENDS = {
    "cupaged": BackendKind(
        "cupaged.benchmarks.cupaged_backend:CupagedBackend", 50051, takes_ids=True, is_chat=None
    ),
    "openai": BackendKind(
        "cupaged.benchmarks.openai_backend:CompletionsBackend", 8000, shares_connections=False
    ),
    "openai-chat": BackendKind(
        "cupaged.benchmarks.openai_backend:ChatBackend", 8000,
        shares_connections=False, is_chat=True,
    ),
    "triton": BackendKind("cupaged.benchmarks.triton_backend:TritonBackend", 8001),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """How the server is reached, and what every request asks for.

    Args:
        address: where the server is, in the backend's own notation.
        model: a name that the server knows; "" for its only one.
        connections: over which the requests are spread in turn. A server with several front ends
            gives each connection to one of them. Of HTTP every request under way has its own.
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
    """The model under test, and what the server says of itself.

    Attributes:
        model: what requests have to know of it.
        about: goes into the results.
        count_tokens: asks the server how many tokens each text has; None where it does not tell.
    """

    model: ModelFacts
    about: Mapping[str, Any]
    count_tokens: CountTokens | None = None


class Usage(NamedTuple):
    """The server's own counts of a finished request."""

    prompt_tokens: int
    completion_tokens: int


class Received(NamedTuple):
    """A message of an answer.

    Attributes:
        time_s: when it was there, by `time.perf_counter`.
        num_tokens: new tokens in it, by the server's count; 0 for a message without any.
        usage: on the last message of an answer that is complete, if the server counts; else None.
        text: new text, of a server that does not count the tokens of a message; `num_tokens` is 0.
    """

    time_s: float
    num_tokens: int
    usage: Usage | None = None
    text: str = ""


class ServerUnusable(CupagedError):
    """A server that cannot be measured at all, and why."""


class ServerNotReady(ServerUnusable):
    """The same, but for a while only, perhaps."""


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
            ClientError, ServerUnusable: it cannot be reached, is not ready in time, or has no such
                model.
        """

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


def chosen_name(wanted: str, served: Sequence[str]) -> str:
    """The model to ask for: the wanted one, or the only one.

    Raises:
        ServerNotReady: none is served.
        ServerUnusable: it is not served, or there is a choice to make.
    """
    if not served:
        raise ServerNotReady("the server has no model that is ready")
    if wanted in served or (not wanted and len(served) == 1):
        return wanted or served[0]
    names = ", ".join(map(repr, served[:10]))
    raise ServerUnusable(str(ConfigError("--model", wanted, f"one of {names}")))


def make_backend(name: str, options: BackendOptions) -> Backend:
    """The backend of a name.

    Raises:
        ConfigError: there is none, its package is missing, or an option is out of range.
    """
    if name not in BACKENDS:
        raise ConfigError("--backend", name, f"one of {', '.join(BACKENDS)}")
    if options.connections > 1 and not BACKENDS[name].shares_connections:
        allowed = f"left out with --backend {name}, which has one for each request under way"
        raise ConfigError("--connections", options.connections, allowed)
    module, _, kind = BACKENDS[name].path.partition(":")
    try:
        make: Callable[[BackendOptions], Backend] = getattr(import_module(module), kind)
    except ModuleNotFoundError as error:
        allowed = f"used with the package {error.name}: pip install 'cupaged[bench]'"
        raise ConfigError("--backend", name, allowed) from None
    return make(options)
