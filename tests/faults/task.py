"""What a client process is told to do, and what it tells when that has ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

CERTS = Path(__file__).parents[1] / "server" / "certs"
PATIENCE_S = 60.0  # what has not come by then will never come
End = Literal[
    "read", "cancel", "abort", "stall", "stream reset", "connection reset", "half-close"
]  # fmt: skip
# Statuses that no server sends.
NEVER = "NEVER"  # it did not come
GONE = "GONE"  # the client ended the connection, or did not speak the protocol; it closed
CLOSED = "CLOSED"  # the connection could not be made, or was lost


@dataclass(frozen=True, kw_only=True)
class Task:
    """One request.

    Args:
        id: of the request, nowhere else used.
        start_s: seconds from the beginning of the round.
        method, message, metadata: of the call.
        timeout_s: its deadline.
        certificate: that the client shows, by its name in the folder; "" for none, None for no TLS.
        end: who ends the call and how: "read" leaves it to the server, "stall" does, too, but
            stops reading for a while.
        num_messages: answers to read before that.
        wait_s: how long to wait then; and until_idle, whether to wait further until the engine has
            nothing to do.
        abort: method and message of the call that aborts this one.
        raw: bytes to send instead of a call; and whether to the HTTP port, and inside TLS.
    """

    id: int
    start_s: float
    method: str = ""
    message: bytes = b""
    metadata: tuple[tuple[str, str], ...] = ()
    timeout_s: float = PATIENCE_S
    certificate: str | None = "client"
    end: End = "read"
    num_messages: int = 0
    wait_s: float = 0.0
    until_idle: bool = False
    abort: tuple[str, bytes] = ("", b"")
    raw: bytes | None = None
    to_http: bool = False
    in_tls: bool = False


@dataclass(kw_only=True)
class Ended:
    """What came of a task.

    statuses: names of gRPC's codes, numbers of HTTP, or one of the words above; one, if the server
        is right. details, rich: the status' message and bytes. started, ended: on the clock
        `time.monotonic`, which all processes share.
    """

    id: int
    started: float
    ended: float = 0.0
    statuses: list[str] = field(default_factory=list)
    details: str = ""
    rich: bytes = b""
    messages: list[bytes] = field(default_factory=list)


@dataclass(frozen=True)
class Order:
    """A round for one client. address: of gRPC; http: of the HTTP endpoints; both host:port."""

    address: str
    http: str
    tasks: list[Task]


@dataclass(frozen=True)
class Begun:
    """A task has its first answer."""

    id: int


@dataclass(frozen=True)
class Done:
    """All tasks of an order have ended."""
