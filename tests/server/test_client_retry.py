"""When a call is made again, after how long, and when not: with a clock that a test sets."""

from __future__ import annotations

from collections.abc import Callable

import grpc
import pytest

from cupaged.client import errors
from cupaged.client.errors import ClientError
from cupaged.client.retry import Attempts, RetryBudget, RetryPolicy

Code = grpc.StatusCode


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def attempts(
    retries: int = 5,
    timeout_s: float | None = None,
    draw: Callable[[], float] = lambda: 0.0,
    clock: Clock | None = None,
    budget: RetryBudget | None = None,
) -> Attempts:
    policy = RetryPolicy(retries, budget or RetryBudget(), clock or Clock(), draw)
    return Attempts(policy, timeout_s, "id")


def error(kind: type[ClientError], code: Code, after: float | None = None) -> ClientError:
    return kind("m", code=code, retry_after_s=after)


FULL = error(errors.QueueFullError, Code.RESOURCE_EXHAUSTED, 2.0)
GONE = error(errors.UnreachableError, Code.UNAVAILABLE)
RETRIED = [
    FULL,
    GONE,
    error(errors.LoadingError, Code.UNAVAILABLE, 1.0),
    error(errors.DrainingError, Code.UNAVAILABLE, 1.0),
    error(errors.EngineDeadError, Code.UNAVAILABLE, 1.0),
    error(errors.UnavailableError, Code.UNAVAILABLE, 1.0),
]
NOT_RETRIED = [
    error(errors.QueueTimeoutError, Code.RESOURCE_EXHAUSTED, 1.0),
    error(errors.MessageTooLargeError, Code.RESOURCE_EXHAUSTED),
    error(errors.OverloadedError, Code.RESOURCE_EXHAUSTED),
    error(errors.EngineDeadError, Code.INTERNAL),
    error(errors.UnavailableError, Code.UNAVAILABLE),
    error(errors.HandshakeError, Code.UNAVAILABLE),
    error(errors.SlowConsumerError, Code.ABORTED),
    error(errors.InvalidRequestError, Code.INVALID_ARGUMENT),
    error(errors.DuplicateRequestError, Code.ALREADY_EXISTS),
    error(errors.DeadlineError, Code.DEADLINE_EXCEEDED),
    error(errors.RequestCancelledError, Code.CANCELLED),
    error(errors.UnauthenticatedError, Code.UNAUTHENTICATED),
    error(errors.ServerError, Code.INTERNAL),
]


def name_of(failure: ClientError) -> str:
    return f"{type(failure).__name__}-{failure.code.name}"


@pytest.mark.parametrize("failure", RETRIED, ids=name_of)
def test_what_is_retried(failure: ClientError) -> None:
    assert attempts().wait_s(failure) >= (failure.retry_after_s or 0.05)
    with pytest.raises(type(failure)) as raised:
        attempts(retries=0).wait_s(failure)
    assert raised.value is failure


@pytest.mark.parametrize("failure", NOT_RETRIED, ids=name_of)
def test_what_is_not_retried(failure: ClientError) -> None:
    with pytest.raises(type(failure)) as raised:
        attempts().wait_s(failure)
    assert raised.value is failure


def test_every_class_is_in_one_of_the_lists() -> None:
    decided = {type(failure) for failure in RETRIED + NOT_RETRIED}
    leaves = {
        kind for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, ClientError)
    }  # fmt: skip
    # These are ServerErrors and InvalidRequestErrors, or permanent by their nature.
    others = {
        errors.ClientError, errors.ContextLengthError, errors.KVCapacityError,
        errors.NotFoundError, errors.ForbiddenError, errors.UnimplementedError,
        errors.PreconditionError, errors.NumericalError, errors.ProtocolError,
    }  # fmt: skip
    assert leaves - decided == others


def test_a_duplicate_id_is_ours_after_a_connection_was_lost() -> None:
    duplicate = error(errors.DuplicateRequestError, Code.ALREADY_EXISTS)
    again = attempts()
    again.wait_s(GONE)
    assert again.wait_s(duplicate) > 0
    after_full = attempts()
    after_full.wait_s(FULL)
    with pytest.raises(errors.DuplicateRequestError):
        after_full.wait_s(duplicate)


def test_waits_double_up_to_a_limit_and_a_part_is_drawn() -> None:
    budget = RetryBudget(capacity=100)
    shortest = attempts(12, draw=lambda: 0.0, budget=budget)
    waits = [shortest.wait_s(GONE) for _ in range(12)]
    assert waits[:4] == pytest.approx([0.05, 0.1, 0.2, 0.4])
    assert waits[-1] == pytest.approx(5.0) == max(waits)
    longest = attempts(12, draw=lambda: 1.0, budget=budget)
    assert longest.wait_s(GONE) == pytest.approx(0.1)


def test_a_server_is_never_asked_before_it_wants_to_be() -> None:
    assert attempts(draw=lambda: 0.0).wait_s(FULL) == 2.0
    assert attempts(draw=lambda: 1.0).wait_s(FULL) == pytest.approx(2.5)
    too_long = error(errors.LoadingError, Code.UNAVAILABLE, 61.0)
    with pytest.raises(errors.LoadingError):
        attempts().wait_s(too_long)


def test_a_server_may_forbid_it() -> None:
    forbidden = errors.QueueFullError("m", retry_forbidden=True, code=Code.RESOURCE_EXHAUSTED)
    with pytest.raises(errors.QueueFullError):
        attempts().wait_s(forbidden)


def test_the_number_of_retries() -> None:
    three = attempts(3)
    for _ in range(3):
        three.wait_s(FULL)
    with pytest.raises(errors.QueueFullError):
        three.wait_s(FULL)


def test_all_attempts_have_one_deadline() -> None:
    clock = Clock()
    call = attempts(timeout_s=10, clock=clock)
    assert call.remaining_s() == 10
    clock.now += 4
    assert call.remaining_s() == 6
    assert call.wait_s(FULL) == 2.0
    clock.now += 4
    with pytest.raises(errors.QueueFullError):  # the wait would last as long as the rest
        call.wait_s(FULL)
    clock.now += 3
    with pytest.raises(errors.DeadlineError) as raised:
        call.remaining_s()
    assert (raised.value.code, raised.value.request_id) == (Code.DEADLINE_EXCEEDED, "id")
    assert attempts().remaining_s() is None


def test_the_budget_limits_what_no_server_asked_for() -> None:
    budget = RetryBudget(capacity=2, refill=0.5)
    for _ in range(2):
        attempts(budget=budget).wait_s(GONE)
    with pytest.raises(errors.UnreachableError):
        attempts(budget=budget).wait_s(GONE)
    attempts(budget=budget).wait_s(FULL)  # asked for
    attempts(budget=budget).succeeded()
    with pytest.raises(errors.UnreachableError):
        attempts(budget=budget).wait_s(GONE)
    attempts(budget=budget).succeeded()
    attempts(budget=budget).wait_s(GONE)
    for _ in range(10):
        budget.succeeded()
    assert [budget.take() for _ in range(3)] == [True, True, False]
