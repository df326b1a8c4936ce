"""When a call that failed is made again: the rules, the waits and the budget. It makes no calls.

A call is made again only while nobody has seen a token of its answer, and only after failures that
say nothing against the request itself:

- QUEUE_FULL, LOADING, DRAINING, and ENGINE_DEAD while the engine is being restarted;
- another UNAVAILABLE whose RetryInfo asks for it;
- a server that cannot be reached, or a connection that was lost;
- a duplicate request id, if the attempt before it lost its connection: that attempt, which the
  server has yet to notice as gone, holds the id.

Never after QUEUE_TIMEOUT: the request has waited for as long as it was allowed to, and another
attempt would make its caller wait longer than he said. Never after a failed TLS handshake, a
message that is too large, or whatever else would fail again.

A server's RetryInfo is the shortest wait; without it waits double from one to the next. A part of
each is drawn, so that clients do not come back together.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from cupaged.client.errors import (
    ClientError,
    DeadlineError,
    DrainingError,
    DuplicateRequestError,
    EngineDeadError,
    LoadingError,
    QueueFullError,
    UnavailableError,
    UnreachableError,
)

FIRST_WAIT_S = 0.1
LONGEST_WAIT_S = 10.0  # of the doubling
LONGEST_ASKED_WAIT_S = 60.0  # a server that asks for more gets no retry
_RETRIED = (QueueFullError, LoadingError, DrainingError, EngineDeadError, UnreachableError)


class RetryBudget:
    """Keeps the retries of one client in proportion to its calls, as gRFC A6 does.

    Holds at most `capacity` tokens. A retry that the server did not ask for takes one and is not
    made without; a call that succeeds gives back a tenth. A retry that the server asked for, by
    RetryInfo, is free: the server limits those. Safe from any thread.
    """

    def __init__(self, capacity: float = 10.0, refill: float = 0.1) -> None:
        self._capacity = capacity
        self._refill = refill
        self._tokens = capacity
        self._lock = threading.Lock()

    def take(self) -> bool:
        """Pay for a retry; False if there is too little left."""
        with self._lock:
            if self._tokens < 1:
                return False
            self._tokens -= 1
            return True

    def succeeded(self) -> None:
        """A call came to a good end."""
        with self._lock:
            self._tokens = min(self._capacity, self._tokens + self._refill)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """What all calls of a client share.

    retries: most attempts after the first one of a call; 0 turns them off.
    clock: seconds, monotonic. draw: uniform in [0, 1).
    """

    retries: int
    budget: RetryBudget
    clock: Callable[[], float] = time.monotonic
    draw: Callable[[], float] = random.random


class Attempts:
    """The attempts of one call, and the time they have together.

    Args:
        policy: of the client.
        timeout_s: for the whole call with all waits, None for no limit.
        request_id: for the errors.
    """

    def __init__(self, policy: RetryPolicy, timeout_s: float | None, request_id: str = "") -> None:
        self._policy = policy
        self._request_id = request_id
        self._deadline = math.inf if timeout_s is None else policy.clock() + timeout_s
        self._num_retries = 0
        self._lost_connection = False

    def remaining_s(self) -> float | None:
        """Time for the next attempt, which is its deadline; None for no limit.

        Raises:
            DeadlineError: there is none left.
        """
        if math.isinf(self._deadline):
            return None
        left = self._deadline - self._policy.clock()
        if left <= 0:
            raise DeadlineError(
                "the time of the call is over",
                code=grpc.StatusCode.DEADLINE_EXCEEDED,
                request_id=self._request_id,
            )
        return left

    def wait_s(self, error: ClientError) -> float:
        """Seconds to wait before the next attempt after a failure.

        Raises:
            ClientError: that failure, if there is to be no other attempt: it is not one of those
                above, retries or budget are used up, or the wait would outlast the deadline.
        """
        wait = self._wait_s(error)
        if wait is None:
            raise error
        self._num_retries += 1
        self._lost_connection = isinstance(error, UnreachableError)
        return wait

    def succeeded(self) -> None:
        """The call came to a good end."""
        self._policy.budget.succeeded()

    def _wait_s(self, error: ClientError) -> float | None:
        asked = error.retry_after_s
        if not self._may_retry(error) or self._num_retries >= self._policy.retries:
            return None
        if asked is not None and asked > LONGEST_ASKED_WAIT_S:
            return None
        shortest = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** min(self._num_retries, 16)) / 2
        if asked is None:
            wait = shortest * (1 + self._policy.draw())
        else:
            wait = max(asked, shortest) + max(asked / 4, shortest) * self._policy.draw()
        if self._policy.clock() + wait >= self._deadline:
            return None
        if asked is None and not self._policy.budget.take():
            return None
        return wait

    def _may_retry(self, error: ClientError) -> bool:
        if error.retry_forbidden:
            return False
        if isinstance(error, DuplicateRequestError):
            return self._lost_connection
        if isinstance(error, EngineDeadError):
            return error.code is grpc.StatusCode.UNAVAILABLE
        if type(error) is UnavailableError:  # for a reason that is newer than this client
            return error.retry_after_s is not None
        return isinstance(error, _RETRIED)
