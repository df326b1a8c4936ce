"""Which class a status becomes, and what of its details is kept."""

from __future__ import annotations

import pickle

import grpc
import pytest
from google.rpc import error_details_pb2

from cupaged.client import errors
from cupaged.client.errors import ClientError, FieldViolation, error_from_status
from cupaged.errors import CapacityError, CupagedError, EngineDeadError
from cupaged.server.error_status import TABLE, status_of

Code = grpc.StatusCode

# What the server's table gives, and what it must be here: the class by the reason.
EXPECTED: dict[str, type[ClientError]] = {
    "INVALID_PARAMETER": errors.InvalidRequestError,
    "INVALID_PROMPT": errors.InvalidRequestError,
    "CONTEXT_LENGTH_EXCEEDED": errors.ContextLengthError,
    "KV_CAPACITY": errors.KVCapacityError,
    "CHAT_TEMPLATE": errors.InvalidRequestError,
    "MALFORMED_REQUEST": errors.InvalidRequestError,
    "MODEL_NOT_FOUND": errors.NotFoundError,
    "REQUEST_ID_IN_USE": errors.DuplicateRequestError,
    "QUEUE_FULL": errors.QueueFullError,
    "QUEUE_TIMEOUT": errors.QueueTimeoutError,
    "DEADLINE_EXCEEDED": errors.DeadlineError,
    "SLOW_CONSUMER": errors.SlowConsumerError,
    "UNAVAILABLE": errors.UnavailableError,
    "LOADING": errors.LoadingError,
    "DRAINING": errors.DrainingError,
    "ENGINE_DEAD": errors.EngineDeadError,
    "ENGINE_FAILED": errors.ServerError,
    "NUMERICAL": errors.NumericalError,
    "NOT_SUPPORTED": errors.UnimplementedError,
    "FAILED_PRECONDITION": errors.PreconditionError,
    "UNAUTHENTICATED": errors.UnauthenticatedError,
    "TOKEN_MISSING": errors.UnauthenticatedError,
    "TOKEN_INVALID": errors.UnauthenticatedError,
    "NOT_ALLOWED": errors.ForbiddenError,
    "INTERNAL": errors.ServerError,
}


def details(code: Code, reason: str, domain: str = "cupaged") -> tuple[tuple[str, bytes], ...]:
    """Trailing metadata with an ErrorInfo."""
    from google.rpc import status_pb2

    status = status_pb2.Status(code=code.value[0], message="m")
    status.details.add().Pack(error_details_pb2.ErrorInfo(domain=domain, reason=reason))
    return (("grpc-status-details-bin", status.SerializeToString()),)


def test_every_reason_of_the_server_is_known_here() -> None:
    assert set(EXPECTED) == {row.reason for row in TABLE.values()}


@pytest.mark.parametrize("row", TABLE.values(), ids=lambda row: row.reason)
def test_each_row_of_the_server_has_its_class(row: object) -> None:
    code, reason = row.code, row.reason  # type: ignore[attr-defined]
    error = error_from_status(code, "m", details(code, reason), "id")
    assert type(error) is EXPECTED[reason]
    assert (error.code, error.reason, error.request_id) == (code, reason, "id")
    assert str(error) == f"m ({reason})" and isinstance(error, CupagedError)


def test_a_dead_engine_is_the_same_class_whether_it_comes_back_or_not() -> None:
    for restarting, code in ((True, Code.UNAVAILABLE), (False, Code.INTERNAL)):
        status = status_of(EngineDeadError("killed", restarting=restarting))
        error = error_from_status(status.code, status.details, status.trailing_metadata)
        assert type(error) is errors.EngineDeadError and error.code is code
        assert (error.retry_after_s is not None) is restarting


def test_the_details_of_a_refused_field() -> None:
    status = status_of(CapacityError("max_tokens", 9, "at most 8"), field_path=lambda name: "a.b")
    error = error_from_status(status.code, status.details, status.trailing_metadata)
    assert type(error) is errors.KVCapacityError
    assert error.field_violations == (FieldViolation("a.b", "must be at most 8, got 9"),)


@pytest.mark.parametrize(
    ("code", "message", "expected"),
    [
        (Code.RESOURCE_EXHAUSTED, "SERVER: Received message larger than max (9 vs. 4)",
         errors.MessageTooLargeError),
        (Code.RESOURCE_EXHAUSTED, "Concurrent RPC limit exceeded!", errors.OverloadedError),
        (Code.UNAVAILABLE, "last error: x: Connection refused", errors.UnreachableError),
        (Code.UNAVAILABLE, "last error: x: Tls handshake failed (T)", errors.HandshakeError),
        (Code.UNAVAILABLE, "x: Hostname Verification Check failed.", errors.HandshakeError),
        (Code.DEADLINE_EXCEEDED, "Deadline Exceeded", errors.DeadlineError),
        (Code.CANCELLED, "Locally cancelled", errors.RequestCancelledError),
        (Code.UNIMPLEMENTED, "Method not found!", errors.UnimplementedError),
        (Code.UNKNOWN, "Unexpected", errors.ServerError),
        (Code.DATA_LOSS, "", errors.ServerError),
    ],
)  # fmt: skip
def test_a_status_of_grpc_itself_has_no_reason(
    code: Code, message: str, expected: type[ClientError]
) -> None:
    error = error_from_status(code, message)
    assert type(error) is expected and (error.reason, error.retry_after_s) == ("", None)
    assert str(error) == f"{message or code.name} ({code.name})"


def test_a_reason_of_another_domain_is_not_ours() -> None:
    error = error_from_status(
        Code.RESOURCE_EXHAUSTED, "m", details(Code.RESOURCE_EXHAUSTED, "QUEUE_FULL", "proxy")
    )
    assert type(error) is errors.OverloadedError and error.reason == ""


def test_details_that_are_damaged_are_left_out() -> None:
    for data in (b"\xff\xff\xff", b"", "text"):
        error = error_from_status(Code.INTERNAL, "m", [("grpc-status-details-bin", data)])
        assert type(error) is errors.ServerError
    whole = details(Code.UNAVAILABLE, "LOADING")[0][1]
    broken = whole.replace(b"LOADING", b"LOADIN\xff")  # an ErrorInfo that is no UTF-8
    error = error_from_status(Code.UNAVAILABLE, "m", [("grpc-status-details-bin", broken)])
    assert isinstance(error, errors.UnavailableError) and error.reason == ""


@pytest.mark.parametrize(
    ("text", "seconds", "forbidden"),
    [("1500", 1.5, False), ("0", 0.0, False), ("-1", None, True), ("soon", None, True)],
)
def test_the_pushback_of_grpc(text: str, seconds: float | None, forbidden: bool) -> None:
    error = error_from_status(Code.UNAVAILABLE, "m", [("grpc-retry-pushback-ms", text)])
    assert (error.retry_after_s, error.retry_forbidden) == (seconds, forbidden)


def test_a_message_becomes_one_line() -> None:
    assert error_from_status(Code.INTERNAL, "one\n  two\t").message == "one two"


def test_a_deadline_is_a_timeout_too() -> None:
    assert isinstance(error_from_status(Code.DEADLINE_EXCEEDED, ""), TimeoutError)


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    """Every class is there, under its base."""
    depths: list[type[ClientError]] = []
    seen = set()
    for line in str(errors.__doc__).splitlines():
        name = line.lstrip("│├└─ ").split(" ")[0]
        kind = getattr(errors, name, None) if name.endswith("Error") else None
        if kind is None or not line.startswith(("ClientError", "│", "├", "└", " ")):
            continue
        depth = (len(line) - len(line.lstrip("│├└─ "))) // 4
        if depth:
            assert depths[depth - 1] in kind.__bases__, name
        depths[depth:] = [kind]
        seen.add(kind)
    every = {
        kind for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, ClientError)
    }  # fmt: skip
    assert seen == every


def test_errors_cross_processes() -> None:
    error = error_from_status(Code.UNAVAILABLE, "m", details(Code.UNAVAILABLE, "LOADING"), "id")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is errors.LoadingError
    assert (again.code, again.reason, again.request_id) == (error.code, "LOADING", "id")
