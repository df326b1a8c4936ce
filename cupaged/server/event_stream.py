"""The messages of one stream of answers: what the engine brings, as events, when they are due.

The first tokens are sent at once. After that everything that has come is sent together whenever the
call takes another message, or as the request's intervals say. A reader that stops reading blocks
nobody but this call: the output stream behind it is bounded, and when that bound is passed the
blocked write is given up.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable
from typing import Protocol

from google.protobuf.message import Message

from cupaged.engine.completion import Completion
from cupaged.engine.text_shell import TextRequest
from cupaged.errors import CupagedError, EngineError, SlowConsumerError
from cupaged.outputs import CoreOutput
from cupaged.server.conversions import OutputForm
from cupaged.server.metrics import RequestMeter
from cupaged.server.output_stream import OutputStream, Row
from cupaged.server.rpc import Context
from cupaged.server.service_errors import NumericalError


class StreamAnswers(Protocol):
    """Makes the messages of one stream: one implementation for each service that streams."""

    def started(self, num_cached_tokens: int | None) -> Message | None:
        """Before all others; None if the service has no such message."""

    def prompt_logprobs(self) -> Iterable[Message]:
        """Behind it, if the request asked for them."""

    def deltas(self, completion: Completion) -> Iterable[Message]:
        """What a sample has more than in the last delta."""

    def plain_delta(self, index: int, text: str, token_ids: list[int]) -> bytes:
        """The same of a sample that is plain; b"" for no message."""

    def finished(self, completion: Completion, ended: float | None) -> Message:
        """The end of a sample; `ended` is the time if that is the end of the request."""


def check_numbers(request: TextRequest) -> None:
    """Raises NumericalError if no sample of a finished request could be computed."""
    if all(c.finish_reason == "error" for c in request.completions):
        raise NumericalError("the model computed values that are no numbers for this request")


class _Pace:
    """When tokens have waited long enough."""

    def __init__(self, form: OutputForm) -> None:
        self._num_tokens = form.interval_tokens
        self._seconds = form.interval_s
        self._clock = asyncio.get_running_loop().time
        self.deadline: float | None = None

    def sent(self) -> None:
        """Nothing waits now."""
        self.deadline = self._clock() + self._seconds if self._seconds else None

    def is_due(self, waiting: Iterable[Completion]) -> bool:
        """Whether these samples are to be sent; never when there are none."""
        enough = self._num_tokens or math.inf
        is_late = self.deadline is not None and self._clock() >= self.deadline
        return any(
            is_late or c.finish_reason is not None or c.num_new_tokens >= enough for c in waiting
        )


class EventStream:
    """Writes the events of a request to its call.

    Made and used in the task of the call's handler.
    """

    __slots__ = (
        "_encode", "_given_up", "_is_writing", "_meter", "_num_ended", "_pass_on", "_request",
        "_responses", "_stream", "_task", "_write", "_wrote",
    )  # fmt: skip

    def __init__(
        self,
        context: Context,
        stream: OutputStream,
        request: TextRequest,
        responses: StreamAnswers,
        meter: RequestMeter,
    ) -> None:
        self._write = context.write
        self._stream = stream
        self._request = request
        self._responses = responses
        self._meter = meter
        self._task = asyncio.current_task()
        self._is_writing = False
        self._num_ended = 0
        # What nearly every message takes, at hand: each look at a further object costs.
        is_plain = len(request.completions) == 1 and request.completions[0].is_plain
        self._pass_on = request.completions[0].pass_on if is_plain else None
        self._encode = responses.plain_delta
        self._wrote = meter.wrote
        self._given_up: CupagedError | None = None
        stream.on_failure = self._stream_failed

    async def run(self, first: list[CoreOutput], form: OutputForm) -> None:
        """Write everything, from `started` to the last `finished`.

        Args:
            first: what the stream gave first.

        Raises:
            CupagedError: the request failed, or its events were not read.
        """
        stream, make, write = self._stream, self._make, self._write
        try:
            num_cached = first[0].num_cached_tokens if first else None
            started = self._responses.started(num_cached)
            if started is not None:
                await self._send([started.SerializeToString()])
            messages = self._make_all(first)
            if self._request.prompt_logprobs is not None:
                told = [m.SerializeToString() for m in self._responses.prompt_logprobs()]
                await self._send(told)
            if form.is_paced:
                await self._run_paced(messages, _Pace(form))
                return
            while True:  # once for each message: few calls, no further coroutines
                self._is_writing = True
                for message in messages:
                    await write(message)
                self._is_writing = False
                if self._request.finished:
                    return
                made = stream.made_now(make)
                while made is None:
                    made = await stream.made_next(make)
                    if made is None:
                        made = stream.made_now(make)
                messages = made
        except asyncio.CancelledError:
            if self._given_up is None or self._task is None:
                raise
            self._task.uncancel()
            raise self._given_up from None

    async def _run_paced(self, messages: list[bytes], pace: _Pace) -> None:
        """The same, but let tokens wait for more as long as `pace` says."""
        request, stream = self._request, self._stream
        while True:
            await self._send(messages)
            if request.finished:
                return
            pace.sent()
            waiting: dict[Completion, None] = {}
            while not pace.is_due(waiting):
                try:
                    async with asyncio.timeout_at(pace.deadline if waiting else None):
                        outputs = await stream.next()
                except TimeoutError:
                    break
                waiting |= dict.fromkeys(self._take(outputs, time.perf_counter()))
            messages = self._events_of(waiting, time.perf_counter())

    def _make(self, rows: list[Row]) -> list[bytes]:
        """The messages that rows become."""
        if len(rows) == 1 and self._pass_on is not None and rows[0][2] is None:  # nearly always
            tokens = rows[0][1]
            data = self._encode(0, self._pass_on(tokens), tokens)
            self._wrote(len(data))
            return [data] if data else []
        return self._make_all(self._stream.outputs_of(rows))

    def _make_all(self, outputs: list[CoreOutput]) -> list[bytes]:
        now = time.perf_counter()
        return self._events_of(self._take(outputs, now), now)

    def _take(self, outputs: list[CoreOutput], now: float) -> list[Completion]:
        """The samples that have moved on by these outputs."""
        if not outputs:
            raise EngineError("the request ended before its output did")
        return self._request.append_all(outputs, now, self._stream.end_sample)

    def _events_of(self, moved: Iterable[Completion], now: float) -> list[bytes]:
        """New tokens of samples, and their ends."""
        messages = []
        for completion in moved:
            for delta in self._responses.deltas(completion):
                data = delta.SerializeToString()
                self._meter.wrote(len(data))
                messages.append(data)
            if completion.finish_reason is not None:
                messages.append(self._end_of(completion, now).SerializeToString())
        return messages

    def _end_of(self, completion: Completion, now: float) -> Message:
        self._num_ended += 1
        is_last = self._num_ended == len(self._request.completions)
        if is_last:
            check_numbers(self._request)
        return self._responses.finished(completion, now if is_last else None)

    async def _send(self, messages: list[bytes]) -> None:
        self._is_writing = True
        for message in messages:
            await self._write(message)
        self._is_writing = False

    def _stream_failed(self, error: CupagedError) -> None:
        """A write that nobody reads does not end by itself; other failures can wait for it."""
        if self._is_writing and isinstance(error, SlowConsumerError) and self._task is not None:
            self._given_up = error
            self._task.cancel()
