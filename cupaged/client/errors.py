"""What a call can fail with: one class for each reason that a server gives, under `ClientError`.

ClientError
├── InvalidRequestError            INVALID_ARGUMENT: `field_violations` names the fields
│   ├── ContextLengthError           prompt and answer are longer than the context
│   └── KVCapacityError              the request can never fit into the KV cache
├── NotFoundError                  NOT_FOUND: no such model or method
├── DuplicateRequestError          ALREADY_EXISTS: a live request has this id
├── OverloadedError                RESOURCE_EXHAUSTED
│   ├── QueueFullError               too much waits already
│   ├── QueueTimeoutError            the request waited longer than its own limit
│   └── MessageTooLargeError         a request or an answer is over a limit of gRPC
├── UnavailableError               UNAVAILABLE
│   ├── LoadingError                 the model is being loaded
│   ├── DrainingError                the server is about to end
│   ├── UnreachableError             no server there, or the connection was lost
│   └── HandshakeError               TLS: certificates or keys do not fit
├── EngineDeadError                the engine process died; UNAVAILABLE if it is being restarted
├── SlowConsumerError              ABORTED: the answer was not read fast enough
├── DeadlineError                  DEADLINE_EXCEEDED; a TimeoutError too
├── RequestCancelledError          CANCELLED: by this client, or when it was closed
├── UnauthenticatedError           UNAUTHENTICATED: no token, or a wrong one
├── ForbiddenError                 PERMISSION_DENIED
├── UnimplementedError             UNIMPLEMENTED: this server does not build it
├── PreconditionError              FAILED_PRECONDITION: the model or the server lacks what it needs
└── ServerError                    INTERNAL and every other code
    ├── NumericalError               the model computed NaN
    └── ProtocolError                an answer that breaks the protocol

Wrong values that show before anything is sent are `cupaged.errors.InvalidParameterError` (of a
request) and `ConfigError` (of the client). A `grpc.RpcError` never leaves the client.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from cupaged.errors import CupagedError

DOMAIN = "cupaged"
_DETAILS_KEY = "grpc-status-details-bin"
_PUSHBACK_KEY = "grpc-retry-pushback-ms"
# What the core of gRPC writes into the message when a TLS handshake fails; it has no code for it.
_HANDSHAKE_WORDS = ("handshake", "Verification Check failed", "CERTIFICATE_VERIFY_FAILED")


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """A field of the request, by its path in the proto, and what is wrong with it."""

    field: str
    description: str


class ClientError(CupagedError):
    """A call failed.

    Attributes:
        code: the gRPC status code.
        reason: of the server's ErrorInfo, such as `QUEUE_FULL`; "" where it gave none.
        field_violations: of INVALID_ARGUMENT, else empty.
        retry_after_s: when the server would like to be asked again, None if it did not say.
        request_id: of the call, "" if it had none. The server's log has it too.
        retry_forbidden: True if the server asked not to be asked again.
    """

    advice: ClassVar[str] = ""  # what a person can do about it

    def __init__(
        self,
        message: str,
        *,
        code: grpc.StatusCode = grpc.StatusCode.UNKNOWN,
        reason: str = "",
        field_violations: Sequence[FieldViolation] = (),
        retry_after_s: float | None = None,
        request_id: str = "",
        retry_forbidden: bool = False,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.reason = reason
        self.field_violations = tuple(field_violations)
        self.retry_after_s = retry_after_s
        self.request_id = request_id
        self.retry_forbidden = retry_forbidden

    def __str__(self) -> str:
        return f"{self.message} ({self.reason or self.code.name})"


class InvalidRequestError(ClientError):
    """A field of the request is out of range; see `field_violations`."""


class ContextLengthError(InvalidRequestError):
    """Prompt and answer are longer than the model's context."""

    advice = "shorten the prompt, or ask for fewer tokens"


class KVCapacityError(InvalidRequestError):
    """The request can never fit into the server's KV cache."""

    advice = "shorten the prompt, or ask for fewer tokens or samples"


class NotFoundError(ClientError):
    """The server has no such model."""

    advice = "leave the model out, or take a name that the server lists"


class DuplicateRequestError(ClientError):
    """A request with this id has not ended yet."""


class OverloadedError(ClientError):
    """The server has too little of something right now."""


class QueueFullError(OverloadedError):
    """Too many requests or tokens wait already."""

    advice = "try again later, or allow more retries"


class QueueTimeoutError(OverloadedError):
    """The request waited in the queue for longer than its `queue_timeout_s`."""

    advice = "try again later, or allow a longer wait"


class MessageTooLargeError(OverloadedError):
    """A message is over a limit of gRPC: the server's for requests, the client's for answers."""

    advice = "send less at once, or raise the limit (--max-message-bytes of `cupaged serve`)"


class UnavailableError(ClientError):
    """The server does not take requests now."""

    advice = "try again later"


class LoadingError(UnavailableError):
    """The model is being loaded."""


class DrainingError(UnavailableError):
    """The server finishes what runs and then ends."""


class UnreachableError(UnavailableError):
    """No server answers at the address, or the connection to it was lost."""

    advice = "is `cupaged serve` running there, and does it use TLS?"


class HandshakeError(UnavailableError):
    """The TLS handshake failed: a certificate is not trusted, or one side speaks no TLS."""

    advice = "look at the CA and the certificates, and whether the server uses TLS"


class EngineDeadError(ClientError):
    """The process of the engine died."""

    advice = "see the server's log"


class SlowConsumerError(ClientError):
    """The answer was read so slowly that the server gave it up."""

    advice = "read the stream faster"


class DeadlineError(ClientError, TimeoutError):
    """The call took longer than its `timeout`."""

    advice = "allow more time, or ask for fewer tokens"


class RequestCancelledError(ClientError):
    """The call was cancelled on this side, or its client was closed."""


class UnauthenticatedError(ClientError):
    """The server wants a token and got none, or another one."""

    advice = "give the token by a file or in CUPAGED_API_KEY"


class ForbiddenError(ClientError):
    """The token does not allow this call."""


class UnimplementedError(ClientError):
    """The server does not build what was asked for."""


class PreconditionError(ClientError):
    """The model or the server lacks what the call needs, such as a chat template."""


class ServerError(ClientError):
    """The server failed, or answered what nobody expects."""

    advice = "see the server's log"


class NumericalError(ServerError):
    """The model computed values that are no numbers."""


class ProtocolError(ServerError):
    """The answer breaks the protocol; perhaps something else than cupaged listens there."""

    advice = "is it a cupaged server of this version?"


_BY_REASON: dict[str, type[ClientError]] = {
    "CONTEXT_LENGTH_EXCEEDED": ContextLengthError,
    "KV_CAPACITY": KVCapacityError,
    "QUEUE_FULL": QueueFullError,
    "QUEUE_TIMEOUT": QueueTimeoutError,
    "LOADING": LoadingError,
    "DRAINING": DrainingError,
    "ENGINE_DEAD": EngineDeadError,
    "SLOW_CONSUMER": SlowConsumerError,
    "NUMERICAL": NumericalError,
}
_BY_CODE: dict[grpc.StatusCode, type[ClientError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.ALREADY_EXISTS: DuplicateRequestError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: OverloadedError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineError,
    grpc.StatusCode.CANCELLED: RequestCancelledError,
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
    grpc.StatusCode.PERMISSION_DENIED: ForbiddenError,
    grpc.StatusCode.FAILED_PRECONDITION: PreconditionError,
    grpc.StatusCode.UNIMPLEMENTED: UnimplementedError,
}


def error_from_status(
    code: grpc.StatusCode,
    message: str | None,
    trailing_metadata: Iterable[tuple[str, str | bytes]] = (),
    request_id: str = "",
) -> ClientError:
    """The error that a status stands for.

    Args:
        code, message: of the status.
        trailing_metadata: may hold a google.rpc.Status with ErrorInfo, BadRequest and RetryInfo;
            details of another kind, or damaged ones, are left out.
        request_id: that the call was made with.
    """
    metadata = dict(trailing_metadata or ())
    details = _Details()
    details.read(metadata.get(_DETAILS_KEY))
    pushback_ms = _integer(metadata.get(_PUSHBACK_KEY))
    if details.retry_after_s is None and pushback_ms is not None and pushback_ms >= 0:
        details.retry_after_s = pushback_ms / 1000
    kind = _BY_REASON.get(details.reason) or _kind_by_code(code, details.reason, message or "")
    return kind(
        " ".join((message or code.name).split()),
        code=code,
        reason=details.reason,
        field_violations=details.violations,
        retry_after_s=details.retry_after_s,
        request_id=request_id,
        retry_forbidden=pushback_ms is not None and pushback_ms < 0,
    )


class _Details:
    """What a google.rpc.Status adds to code and message."""

    def __init__(self) -> None:
        self.reason = ""
        self.violations: list[FieldViolation] = []
        self.retry_after_s: float | None = None

    def read(self, data: str | bytes | None) -> None:
        """Take what is known from the serialised Status; what is damaged ends the reading."""
        info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
        retry = error_details_pb2.RetryInfo()
        if not isinstance(data, bytes):
            return
        try:
            for detail in status_pb2.Status.FromString(data).details:
                if detail.Unpack(info) and info.domain == DOMAIN:
                    self.reason = info.reason
                elif detail.Unpack(bad):
                    self.violations += [
                        FieldViolation(v.field, v.description) for v in bad.field_violations
                    ]
                elif detail.Unpack(retry):
                    self.retry_after_s = retry.retry_delay.ToTimedelta().total_seconds()
        except DecodeError:
            return


def _kind_by_code(code: grpc.StatusCode, reason: str, message: str) -> type[ClientError]:
    """Without a reason the status is of the core of gRPC, not of cupaged's server."""
    if not reason and code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return MessageTooLargeError if "larger than max" in message else OverloadedError
    if not reason and code is grpc.StatusCode.UNAVAILABLE:
        is_tls = any(word in message for word in _HANDSHAKE_WORDS)
        return HandshakeError if is_tls else UnreachableError
    return _BY_CODE.get(code, ServerError)


def _integer(text: str | bytes | None) -> int | None:
    try:
        return None if text is None else int(text)
    except ValueError:
        return -1  # gRFC A6: what cannot be read means that nobody shall retry
