"""How requests are sent and ended: well, or in one of many wrong ways; and what may come of it.

An outcome is a status, with the reason of its ErrorInfo behind it. `allowed` holds patterns.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.faults.expected import Answer
from tests.faults.protocols import PROTOCOLS, Wish
from tests.faults.server import MAX_MESSAGE_BYTES, TOKEN
from tests.faults.task import CLOSED, GONE, End, Task
from tests.server.random_messages import RandomMessages

HTTP = "HTTP"
IN_STREAM = "OK, with an error in the stream"
KILLED = "KILLED"  # its client was, before it ended
_STREAMS = ("v1 GenerateStream", "KServe ModelStreamInfer", "vLLM Generate")
_WITH_MODEL = ("v1 Generate", "v1 GenerateStream", "KServe ModelInfer", "KServe ModelStreamInfer")
AUTHORISED = (("authorization", f"Bearer {TOKEN}"),)
_LENGTHS = (2, 8, 20, 40, 80, 160, 240)
MAX_TOKENS = max(_LENGTHS)
_MAX_MESSAGES, _MAX_WAIT_S = 10, 0.1
_SHORT_DEADLINES_S = (0.01, 0.5)
_DAMAGED_DEADLINE_S = 5.0  # some ask for more than anybody would wait for
_STALL_S = (2.0, 4.0)


@dataclass(frozen=True, slots=True)
class Manner:
    """One of them.

    Args:
        weight: how often it is drawn.
        allowed: outcomes, as patterns of `fnmatch`.
        protocols: for which it is.
        change: what it makes of the task of a good request.
    """

    name: str
    weight: int
    allowed: tuple[str, ...]
    protocols: Sequence[str]
    change: Callable[[Errand], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Errand:
    """A task with what has to come of it."""

    id: int
    protocol: str
    manner: Manner
    wish: Wish
    draw: random.Random

    def task(self, start_s: float) -> Task:
        """For a client."""
        fields: dict[str, Any] = {"metadata": AUTHORISED}
        if self.protocol != HTTP:
            protocol = PROTOCOLS[self.protocol]
            fields |= {"method": protocol.method, "message": protocol.write(self.wish)}
        return Task(id=self.id, start_s=start_s, **{**fields, **self.manner.change(self)})

    def written(self, **changes: Any) -> bytes:
        """The request with some changes of what it asks for."""
        wish = self.wish
        changed = {name: getattr(wish, name) for name in wish.__slots__} | changes
        return PROTOCOLS[self.protocol].write(Wish(**changed))


def errand(number: int, manner: Manner, answers: Sequence[Answer], draw: random.Random) -> Errand:
    """A request in this manner; everything else of it is drawn."""
    wish = Wish(draw.choice(answers), draw.choice(_LENGTHS), f"request-{number}")
    return Errand(number, draw.choice(manner.protocols), manner, wish, random.Random(draw.random()))


# ---- what they change --------------------------------------------------------------------------


def _good(errand: Errand) -> dict[str, Any]:
    return {}


def _ended(end: End) -> Callable[[Errand], dict[str, Any]]:
    def change(errand: Errand) -> dict[str, Any]:
        draw = errand.draw
        is_long = errand.protocol in _STREAMS
        messages = draw.randrange(_MAX_MESSAGES) if is_long else 0
        return {"end": end, "num_messages": messages, "wait_s": draw.uniform(0, _MAX_WAIT_S)}

    return change


def _aborted(errand: Errand) -> dict[str, Any]:
    abort = PROTOCOLS[errand.protocol].abort
    assert abort is not None
    method, write = abort
    return _ended("abort")(errand) | {"abort": (method, write(errand.wish.request_id))}


def _hurried(errand: Errand) -> dict[str, Any]:
    return {"timeout_s": errand.draw.uniform(*_SHORT_DEADLINES_S)}


def _stalled(errand: Errand) -> dict[str, Any]:
    message = errand.written(fills_buffers=True, num_tokens=600)
    wait_s = errand.draw.uniform(*_STALL_S)
    return {
        "end": "stall", "num_messages": 1, "wait_s": wait_s, "until_idle": True, "message": message,
    }  # fmt: skip


def _damaged(errand: Errand) -> dict[str, Any]:
    descriptor = PROTOCOLS[errand.protocol].descriptor
    good = descriptor._concrete_class.FromString(errand.written())
    messages = RandomMessages(errand.draw.randrange(2**32))
    data = messages.request(descriptor, [good])
    return {"message": data, "timeout_s": _DAMAGED_DEADLINE_S}


def _too_large(errand: Errand) -> dict[str, Any]:
    return {"message": errand.written(padding=MAX_MESSAGE_BYTES)}


def _unknown_model(errand: Errand) -> dict[str, Any]:
    return {"message": errand.written(model="no-such-model")}


def _token(*metadata: tuple[str, str]) -> Callable[[Errand], dict[str, Any]]:
    return lambda errand: {"metadata": metadata}


def _certificate(name: str | None) -> Callable[[Errand], dict[str, Any]]:
    return lambda errand: {"certificate": name}


def _garbage(errand: Errand) -> dict[str, Any]:
    """Without TLS or inside it; the first byte must not be the one of a TLS record, which waits."""
    data = b"\xff" + errand.draw.randbytes(errand.draw.randrange(100, 5000))
    return {"raw": data, "in_tls": errand.draw.random() < 0.5}


def _http(*lines: bytes, end: End = "read") -> Callable[[Errand], dict[str, Any]]:
    def change(errand: Errand) -> dict[str, Any]:
        return {"raw": errand.draw.choice(lines) + b"\r\n\r\n", "to_http": True, "end": end}

    return change


# ---- all of them -------------------------------------------------------------------------------

_CALLS = tuple(PROTOCOLS)
_PATHS = tuple(f"GET /{path} HTTP/1.1".encode() for path in ("livez", "readyz", "metrics"))
_LONG_HEAD = _PATHS[0] + b"\r\nX: " + b"x" * 20_000
# What random or damaged bytes may be: wrong, refused, or by chance a request.
_OF_A_CLIENT = (
    "OK*", "INVALID_ARGUMENT *", "NOT_FOUND *", "UNIMPLEMENTED *", "ALREADY_EXISTS *",
    "FAILED_PRECONDITION *", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED*",
)  # fmt: skip
COMPLETE = Manner("complete", 40, ("OK",), _CALLS, _good)
KILLED_CLIENT = Manner("client killed", 0, (KILLED, "OK"), _STREAMS, _good)
MANNERS = (
    COMPLETE,
    Manner("cancelled", 7, ("CANCELLED", "OK"), _CALLS, _ended("cancel")),
    # The client's own, or the server's, to which some come when theirs is over.
    Manner("past its deadline", 7, ("DEADLINE_EXCEEDED*", "OK"), _CALLS, _hurried),
    Manner("aborted", 4, ("OK",), ("v1 GenerateStream", "vLLM Generate"), _aborted),
    Manner("stream reset", 5, (GONE,), _CALLS, _ended("stream reset")),
    Manner("connection reset", 5, (GONE,), _CALLS, _ended("connection reset")),
    Manner("half-closed", 5, (GONE,), _CALLS, _ended("half-close")),
    Manner(
        "stalled reader", 2, ("ABORTED SLOW_CONSUMER", "OK"),
        ("v1 GenerateStream", "vLLM Generate"), _stalled,
    ),
    Manner("wrong message", 6, _OF_A_CLIENT, _CALLS, _damaged),
    Manner("message too large", 3, ("RESOURCE_EXHAUSTED",), _CALLS, _too_large),
    Manner(
        "unknown model", 3, ("NOT_FOUND MODEL_NOT_FOUND", IN_STREAM), _WITH_MODEL, _unknown_model
    ),
    Manner(
        "wrong token", 3, ("UNAUTHENTICATED TOKEN_INVALID",), _CALLS,
        _token(("authorization", "Bearer no-such-token")),
    ),
    Manner("no token", 2, ("UNAUTHENTICATED TOKEN_MISSING",), _CALLS, _token()),
    Manner("expired certificate", 3, ("UNAVAILABLE",), _CALLS, _certificate("expired")),
    Manner("unknown certificate", 1, ("UNAVAILABLE",), _CALLS, _certificate("intruder")),
    Manner("no certificate", 1, ("UNAVAILABLE",), _CALLS, _certificate("")),
    Manner("no TLS", 1, ("UNAVAILABLE",), _CALLS, _certificate(None)),
    Manner("garbage bytes", 3, (GONE, CLOSED), _CALLS, _garbage),
    Manner("HTTP GET", 6, ("200",), (HTTP,), _http(*_PATHS)),
    Manner("HTTP reset", 1, (GONE,), (HTTP,), _http(*_PATHS, end="connection reset")),
    Manner("HTTP of another kind", 1, ("405",), (HTTP,), _http(b"POST /readyz HTTP/1.1")),
    Manner("HTTP to another path", 1, ("404",), (HTTP,), _http(b"GET /no HTTP/1.1")),
    Manner("HTTP too long", 1, ("431",), (HTTP,), _http(_LONG_HEAD)),
    Manner("HTTP garbage", 1, ("400", GONE, CLOSED), (HTTP,), _http(b"\xff\x00 \x16\x03", b"GET")),
)  # fmt: skip
