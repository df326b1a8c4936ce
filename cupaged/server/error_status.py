"""What a failure is on the wire: one table from error classes to gRPC codes, reasons and details.

Every status that this server makes carries a google.rpc.Status with an ErrorInfo of the domain
"cupaged". By what the error knows, a BadRequest (which field), a ResourceInfo (which model or
request) or a RetryInfo (when to come back; also as the metadata that gRPC's own retries read) is
added. Statuses of gRPC itself, for an unknown method or a message that is too large, carry none.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from cupaged import errors
from cupaged.server import service_errors

DOMAIN = "cupaged"
DETAILS_KEY = "grpc-status-details-bin"
PUSHBACK_KEY = "grpc-retry-pushback-ms"
# Headers of more than 8 KiB in all do not pass every client and proxy; a text stands there up to
# three times, once with each byte that is not ASCII as three characters.
_MAX_TEXT_BYTES = 1000
_MAX_NAME_BYTES = 256
_MAX_STACK_CHARS = 3000
_SHORTEST_RETRY_S = 0.1
_DEFAULT_RETRY_S = 1.0

Code = grpc.StatusCode
Metadata = tuple[tuple[str, str | bytes], ...]


@dataclass(frozen=True, slots=True)
class Row:
    """Code and reason of a class of errors.

    retries: a later attempt may succeed, and RetryInfo says when. resource: the type of the thing
    that the error's value names. limits: ErrorInfo carries what is known of sizes and limits.
    """

    code: grpc.StatusCode
    reason: str
    retries: bool = False
    resource: str = ""
    limits: bool = False


# The nearest base class of an error that stands here decides.
TABLE: Mapping[type[BaseException], Row] = {
    errors.BadValueError: Row(Code.INVALID_ARGUMENT, "INVALID_PARAMETER"),
    errors.PromptError: Row(Code.INVALID_ARGUMENT, "INVALID_PROMPT"),
    errors.ContextLengthError: Row(Code.INVALID_ARGUMENT, "CONTEXT_LENGTH_EXCEEDED", limits=True),
    errors.CapacityError: Row(Code.INVALID_ARGUMENT, "KV_CAPACITY", limits=True),
    errors.ChatTemplateError: Row(Code.INVALID_ARGUMENT, "CHAT_TEMPLATE"),
    service_errors.MalformedRequestError: Row(Code.INVALID_ARGUMENT, "MALFORMED_REQUEST"),
    service_errors.UnknownModelError: Row(
        Code.NOT_FOUND, "MODEL_NOT_FOUND", resource="cupaged.v1.ModelInfo"
    ),
    errors.DuplicateRequestError: Row(
        Code.ALREADY_EXISTS, "REQUEST_ID_IN_USE", resource="cupaged.v1.GenerateRequest"
    ),
    errors.QueueFullError: Row(Code.RESOURCE_EXHAUSTED, "QUEUE_FULL", retries=True),
    errors.QueueTimeoutError: Row(Code.RESOURCE_EXHAUSTED, "QUEUE_TIMEOUT", retries=True),
    service_errors.DeadlinePassedError: Row(Code.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"),
    errors.SlowConsumerError: Row(Code.ABORTED, "SLOW_CONSUMER"),
    errors.UnavailableError: Row(Code.UNAVAILABLE, "UNAVAILABLE", retries=True),
    errors.LoadingError: Row(Code.UNAVAILABLE, "LOADING", retries=True),
    errors.DrainingError: Row(Code.UNAVAILABLE, "DRAINING", retries=True),
    errors.EngineDeadError: Row(Code.INTERNAL, "ENGINE_DEAD"),
    errors.EngineError: Row(Code.INTERNAL, "ENGINE_FAILED"),
    service_errors.NumericalError: Row(Code.INTERNAL, "NUMERICAL"),
    errors.NotSupportedError: Row(Code.UNIMPLEMENTED, "NOT_SUPPORTED"),
    service_errors.PreconditionError: Row(Code.FAILED_PRECONDITION, "FAILED_PRECONDITION"),
    service_errors.UnauthenticatedError: Row(Code.UNAUTHENTICATED, "UNAUTHENTICATED"),
    service_errors.TokenMissingError: Row(Code.UNAUTHENTICATED, "TOKEN_MISSING"),
    service_errors.TokenInvalidError: Row(Code.UNAUTHENTICATED, "TOKEN_INVALID"),
    service_errors.NotAllowedError: Row(Code.PERMISSION_DENIED, "NOT_ALLOWED"),
    BaseException: Row(Code.INTERNAL, "INTERNAL"),
}
_RESTARTING = Row(Code.UNAVAILABLE, "ENGINE_DEAD", retries=True)


@dataclass(frozen=True, slots=True)
class RpcStatus(grpc.Status):
    """How a call ends, for `context.abort_with_status`. `details` is the message."""

    code: grpc.StatusCode
    details: str
    trailing_metadata: Metadata
    reason: str

    def with_metadata(self, *pairs: tuple[str, str]) -> RpcStatus:
        """The same with more trailing metadata."""
        metadata = (*self.trailing_metadata, *pairs)
        return RpcStatus(self.code, self.details, metadata, self.reason)


def row_of(error: BaseException) -> Row:
    """The row of the table that an error falls under."""
    if isinstance(error, errors.EngineDeadError) and error.restarting:
        return _RESTARTING
    return next(TABLE[kind] for kind in type(error).__mro__ if kind in TABLE)


def status_of(
    error: BaseException,
    *,
    field_path: Callable[[str], str] = lambda name: name,
    facts: Mapping[str, object] | None = None,
    debug: bool = False,
) -> RpcStatus:
    """The status that an error becomes.

    Args:
        field_path: from the name of a `BadValueError` to the path of the field in the request.
        facts: sizes and limits, for the metadata of ErrorInfo where the error is about these.
        debug: add a DebugInfo with the stack to INTERNAL errors. Stacks tell of the server's
            insides, so this is for its operator.
    """
    row = row_of(error)
    message = _message(error, field_path)
    info = error_details_pb2.ErrorInfo(reason=row.reason, domain=DOMAIN)
    for key, value in ((facts or {}) if row.limits else {}).items():
        info.metadata[key] = str(value)
    details: list[Message] = [info]
    metadata: Metadata = ()
    if row.code is Code.INVALID_ARGUMENT:
        field, description = _violation(error, field_path)
        bad = error_details_pb2.BadRequest()
        bad.field_violations.add(field=_cut(field), description=_cut(description))
        details.append(bad)
    if row.resource and isinstance(error, errors.BadValueError):
        details.append(
            error_details_pb2.ResourceInfo(
                resource_type=row.resource,
                resource_name=_cut(str(error.value), _MAX_NAME_BYTES),
                description=message,
            )
        )
    if row.retries:
        seconds = _retry_after_s(error)
        delay = Duration()
        delay.FromMilliseconds(math.ceil(seconds * 1000))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
        metadata = ((PUSHBACK_KEY, str(math.ceil(seconds * 1000))),)
    if debug and row.code is Code.INTERNAL:
        stack = "".join(traceback.format_exception(error))
        details.append(error_details_pb2.DebugInfo(detail=stack[-_MAX_STACK_CHARS:]))
    status = status_pb2.Status(code=row.code.value[0], message=message)
    for detail in details:
        status.details.add().Pack(detail)
    metadata = ((DETAILS_KEY, status.SerializeToString()), *metadata)
    return RpcStatus(row.code, message, metadata, row.reason)


def _message(error: BaseException, field_path: Callable[[str], str]) -> str:
    """What a caller reads. Of an error that nobody expected it says nothing but that."""
    if isinstance(error, errors.BadValueError):
        field, description = _violation(error, field_path)
        text = f"{field or error.name} {description}"
    elif isinstance(error, errors.CupagedError):
        text = str(error)
    else:
        text = "internal error: see the server's log"
    return _cut(" ".join(text.split()) or type(error).__name__)


def _cut(text: str, most: int = _MAX_TEXT_BYTES) -> str:
    """A text of at most that many bytes."""
    data = text[:most].encode("utf-8", "replace")
    if len(text) <= most and len(data) <= most:
        return text
    return data[: most - 3].decode("utf-8", "ignore") + "..."


def _violation(error: BaseException, field_path: Callable[[str], str]) -> tuple[str, str]:
    """Path of the field, and what is wrong with it."""
    if not isinstance(error, errors.BadValueError):
        return field_path("chat"), str(error)  # the template refused it
    description = f"must be {error.allowed}, got {errors.shown(error.value)}"
    path = field_path(error.name)
    if path != error.name and error.name.startswith("prompt length"):
        description = f"{error.name} {description}"  # the field alone does not say what of it
    return path, description


def _retry_after_s(error: BaseException) -> float:
    asked = getattr(error, "retry_after_s", None)
    return _DEFAULT_RETRY_S if asked is None else max(_SHORTEST_RETRY_S, float(asked))
