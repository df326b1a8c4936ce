"""One request as its reader sees it: outputs as they come, a bound on what waits, one error.

A token costs an append and perhaps the waking of one future. There is no queue and no event, and
what came since the last look is given in one piece.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from cupaged.errors import CupagedError, SlowConsumerError
from cupaged.outputs import CoreOutput, FinishReason
from cupaged.server.wire_forms import logprobs_from_wire

Row = tuple[int, list[int], dict[str, Any] | None]  # sample, new tokens, what else there is
T = TypeVar("T")
_LOGPROBS_OF_A_TOKEN = 32  # more of them count as further tokens of the bound


class OutputStream:
    """The outputs of one request. Made by `EngineClient.submit`, used in the client's event loop.

    Args:
        send_abort: tells the engine to end the request.
        send_end: tells it to end a sample, with the index and a reason.
        forget: tells the client that nothing more will come.
        due: takes the streams whose `deliver` is to be called at the end of a step's message.
    """

    __slots__ = (
        "_closed", "_due", "_error", "_finished", "_first_scheduled_time", "_forget", "_loop",
        "_make", "_max_pending_tokens", "_num_cached_tokens", "_num_pending", "_num_preemptions",
        "_rows", "_send_abort", "_send_end", "_waiter", "n", "on_failure", "request_id",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str,
        n: int,
        *,
        max_pending_tokens: int,
        send_abort: Callable[[], None],
        send_end: Callable[[int, FinishReason], None],
        forget: Callable[[], None],
        due: list[OutputStream],
    ) -> None:
        self.request_id = request_id
        self.n = n
        self.on_failure: Callable[[CupagedError], None] | None = None
        self._max_pending_tokens = max_pending_tokens
        self._send_abort = send_abort
        self._send_end = send_end
        self._forget = forget
        self._loop = asyncio.get_running_loop()
        self._rows: list[Row] = []
        self._num_pending = 0
        self._waiter: asyncio.Future[Any] | None = None
        self._make: Callable[[list[Row]], Any] | None = None
        self._due = due
        self._error: CupagedError | None = None
        self._finished: set[int] = set()
        self._closed = False
        self._num_preemptions = 0
        self._num_cached_tokens = 0
        self._first_scheduled_time: float | None = None

    @property
    def finished(self) -> bool:
        """True when every sample has ended; outputs may still wait to be read."""
        return len(self._finished) == self.n

    @property
    def num_pending_tokens(self) -> int:
        """Tokens that came and were not read."""
        return self._num_pending

    async def next(self) -> list[CoreOutput]:
        """Everything that came since the last call; waits if that is nothing.

        An empty list means that nothing more will come.

        Raises:
            CupagedError: the request was refused, failed, or lost; what came before it is given
                first. `SlowConsumerError`: too much was not read, and the request was aborted.
        """
        while not self._rows:
            if self._error is not None:
                raise self._error
            if self._closed or self.finished:
                return []
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self.outputs_of(self._take())

    def made_now(self, make: Callable[[list[Row]], T]) -> T | None:
        """What `make` makes of the rows that are there; None if there are none yet.

        Args:
            make: gets rows, which `outputs_of` makes outputs of, or [] when nothing more will come.

        Raises:
            CupagedError: as `next`, and what `make` raises.
        """
        if self._rows:
            return make(self._take())
        if self._error is not None:
            raise self._error
        return make([]) if self._closed or len(self._finished) == self.n else None

    def made_next(self, make: Callable[[list[Row]], T]) -> asyncio.Future[T | None]:
        """A future of what `make` makes of the next rows; only when `made_now` gave None.

        `make` is called as soon as a step's message has been read, for all that wait one after the
        other, and before any of their readers goes on: much short work is cheaper in one go. It
        must not wait; what it raises is the future's. None means: ask `made_now` again. Rows are
        lost if the future is cancelled after that.
        """
        self._make = make
        self._waiter = waiter = self._loop.create_future()
        return waiter

    def end_sample(self, index: int, reason: FinishReason) -> None:
        """End a sample here and in the engine: its text has come to a stop string."""
        if index in self._finished or self._closed:
            return
        self._finished.add(index)
        self._send_end(index, reason)
        if self.finished:
            self._forget()

    def close(self) -> None:
        """Abort what is unfinished. May be called at any time and again; never raises."""
        if self._closed:
            return
        self._closed = True
        if not self.finished and self._error is None:
            self._send_abort()
        self._forget()
        self._rows.clear()
        self._wake()

    def outputs_of(self, rows: list[Row]) -> list[CoreOutput]:
        """Rows as outputs, in the order in which they came; each row once."""
        return [self._output(index, tokens, more) for index, tokens, more in rows]

    # ---- for the client ------------------------------------------------------------------------

    def push(self, index: int, tokens: list[int], more: dict[str, Any] | None) -> None:
        """Take a row of a step."""
        if more is None and self._make is not None and self.n == 1 and not self._rows:
            # Nearly always: the reader waits, and no row of another sample can follow.
            self._make_of([(index, tokens, None)])
            return
        if index in self._finished:  # it was ended here before the engine knew
            return
        self._rows.append((index, tokens, more))
        self._num_pending += len(tokens)
        if more is not None and "logprobs" in more:
            self._num_pending += sum(len(p[0]) for p in more["logprobs"]) // _LOGPROBS_OF_A_TOKEN
        if more is not None and "finish_reason" in more:
            self._finished.add(index)
            if self.finished:
                self._forget()
        elif self._num_pending > self._max_pending_tokens:
            self._rows.clear()
            self._send_abort()
            self.fail(
                SlowConsumerError(
                    f"request {self.request_id}: {self._num_pending} tokens of output were not "
                    f"read, at most {self._max_pending_tokens} may wait; the request was aborted"
                )
            )
            return
        if self._make is not None:
            if len(self._rows) == 1:
                self._due.append(self)
        else:
            self._wake()

    def deliver(self) -> None:
        """Make what `made_next` has promised."""
        if self._rows and self._make is not None:
            self._make_of(self._take())

    def fail(self, error: CupagedError) -> None:
        """End the stream with an error, unless it has ended."""
        if self._error is not None or self._closed or self.finished:
            return
        self._error = error
        self._forget()
        self._wake()
        if self.on_failure is not None:
            self._loop.call_soon(self.on_failure, error)

    def _make_of(self, rows: list[Row]) -> None:
        waiter, make = self._waiter, self._make
        self._waiter = self._make = None
        if waiter is None or make is None or waiter.done():
            return  # its reader was cancelled
        try:
            waiter.set_result(make(rows))
        except Exception as error:
            waiter.set_exception(error)

    def _wake(self) -> None:
        waiter, self._waiter, self._make = self._waiter, None, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _take(self) -> list[Row]:
        rows, self._rows = self._rows, []
        self._num_pending = 0
        return rows

    def _output(self, index: int, tokens: list[int], more: dict[str, Any] | None) -> CoreOutput:
        if more is None:
            return CoreOutput(
                self.request_id,
                index,
                tokens,
                num_preemptions=self._num_preemptions,
                num_cached_tokens=self._num_cached_tokens,
                first_scheduled_time=self._first_scheduled_time,
            )
        self._num_preemptions = more.get("num_preemptions", self._num_preemptions)
        self._num_cached_tokens = more.get("num_cached_tokens", self._num_cached_tokens)
        self._first_scheduled_time = more.get("first_scheduled_time", self._first_scheduled_time)
        logprobs, prompt = more.get("logprobs"), more.get("prompt_logprobs")
        return CoreOutput(
            request_id=self.request_id,
            index=index,
            new_token_ids=tokens,
            logprobs=None if logprobs is None else logprobs_from_wire(logprobs),
            prompt_logprobs=() if prompt is None else logprobs_from_wire(prompt),
            num_preemptions=self._num_preemptions,
            num_cached_tokens=self._num_cached_tokens,
            first_scheduled_time=self._first_scheduled_time,
            finish_reason=more.get("finish_reason"),
            stop_reason=more.get("stop_reason"),
        )
