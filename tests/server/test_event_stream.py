"""Which messages a stream's events become, and when: every row and every write by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from cupaged.engine.text_shell import TextRequest
from cupaged.errors import EngineDeadError, SlowConsumerError
from cupaged.loading.token_bytes import TokenBytes
from cupaged.outputs import FinishReason
from cupaged.sampling_params import SamplingParams
from cupaged.server.conversions import OutputForm
from cupaged.server.event_stream import EventStream
from cupaged.server.metrics import FrontEndMetrics
from cupaged.server.output_stream import OutputStream
from cupaged.server.responses import Responses
from cupaged.server.service_errors import NumericalError
from cupaged.v1 import generation_pb2 as pb
from tests.sample_tokenizers import smollm2
from tests.sample_tokenizers import spm as spm_tokenizer

SECONDS = 30.0


class Hand:
    """A stream's engine, its reader, and the one between them."""

    def __init__(
        self, form: OutputForm, *, max_pending_tokens: int = 100, tokenizer: Any, **params: Any
    ) -> None:
        self.written: asyncio.Queue[pb.GenerateStreamResponse] = asyncio.Queue()
        self.may_write = asyncio.Event()
        self.may_write.set()
        self.aborted = False
        self.ended: list[tuple[int, FinishReason]] = []
        self.due: list[OutputStream] = []
        given = SamplingParams(**params)
        self.stream = OutputStream(
            "r",
            given.n,
            max_pending_tokens=max_pending_tokens,
            send_abort=self._abort,
            send_end=lambda index, reason: self.ended.append((index, reason)),
            forget=lambda: None,
            due=self.due,
        )
        request = TextRequest(tokenizer, "r", None, [1], given, 0.0)
        answers = Responses(request, "m", form, TokenBytes(tokenizer))
        meter = FrontEndMetrics("m").received(stream=True)
        self._form = form
        self._parts = (request, answers, meter)

    async def run(self) -> None:
        first = await self.stream.next()
        events = EventStream(self, self.stream, *self._parts)
        await events.run(first, self._form)

    async def write(self, data: bytes) -> None:
        """As the context of a call."""
        await self.may_write.wait()
        self.written.put_nowait(pb.GenerateStreamResponse.FromString(data))

    def step(self, *rows: tuple[int, list[int]], **more: Any) -> None:
        """A step's message has come."""
        for index, tokens in rows:
            self.stream.push(index, tokens, more or None)
        while self.due:
            self.due.pop().deliver()

    async def event(self) -> pb.GenerateStreamResponse:
        return await asyncio.wait_for(self.written.get(), SECONDS)

    async def ids(self) -> list[int]:
        return [*(await self.event()).delta.token_ids]

    async def nothing(self) -> None:
        """Whoever could write something has had the time to."""
        for _ in range(20):
            await asyncio.sleep(0)
        assert self.written.empty()

    def _abort(self) -> None:
        self.aborted = True


Body = Callable[[Hand, "asyncio.Task[None]"], Coroutine[Any, Any, None]]


def play(body: Body, form: OutputForm | None = None, **params: Any) -> None:
    """Run a script beside the stream that it feeds."""

    async def main() -> None:
        tokenizer = params.pop("tokenizer", None) or smollm2()
        params.setdefault("max_tokens", None)
        hand = Hand(form or OutputForm(True, False), tokenizer=tokenizer, **params)
        task = asyncio.create_task(hand.run())
        try:
            await body(hand, task)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())


def test_each_step_is_a_message_while_the_reader_keeps_up() -> None:
    async def body(hand: Hand, task: asyncio.Task[None]) -> None:
        hand.step((0, [500]), first_scheduled_time=1.0)
        assert (await hand.event()).HasField("started")
        for token in (501, 502, 503):
            assert await hand.ids() == [token - 1]
            hand.step((0, [token]))
        assert await hand.ids() == [503]
        hand.step((0, [504]), finish_reason="length")
        assert await hand.ids() == [504]
        last = await hand.event()
        assert last.finished.reason == pb.FINISH_REASON_LENGTH
        assert (last.finished.completion_tokens, last.usage.completion_tokens) == (5, 5)
        await task

    play(body)


def test_what_comes_while_a_write_waits_is_one_message() -> None:
    async def body(hand: Hand, task: asyncio.Task[None]) -> None:
        hand.step((0, [500]))
        await hand.event()
        assert await hand.ids() == [500]
        hand.may_write.clear()
        for token in range(501, 510):
            hand.step((0, [token]))
        await hand.nothing()
        hand.may_write.set()
        assert await hand.ids() == [501]  # was being written
        assert await hand.ids() == [*range(502, 510)]
        await hand.nothing()

    play(body)


def test_the_first_token_is_sent_at_once_and_later_ones_by_number() -> None:
    async def body(hand: Hand, task: asyncio.Task[None]) -> None:
        hand.step((0, [500]))
        await hand.event()
        assert await hand.ids() == [500]
        for token in range(501, 504):
            hand.step((0, [token]))
            await hand.nothing()
        hand.step((0, [504]))
        assert await hand.ids() == [501, 502, 503, 504]
        hand.step((0, [505]))
        await hand.nothing()
        hand.step((0, [506]), finish_reason="stop")  # the end waits for nothing
        assert await hand.ids() == [505, 506]
        assert (await hand.event()).finished.reason == pb.FINISH_REASON_STOP
        await task

    play(body, OutputForm(True, False, interval_tokens=4))


def test_later_tokens_are_sent_after_the_interval() -> None:
    async def body(hand: Hand, task: asyncio.Task[None]) -> None:
        hand.step((0, [500]))
        await hand.event()
        assert await hand.ids() == [500]
        hand.step((0, [501]))
        hand.step((0, [502]))
        await hand.nothing()
        assert await hand.ids() == [501, 502]

    play(body, OutputForm(True, False, interval_s=0.2))


def test_samples_are_told_apart() -> None:
    async def body(hand: Hand, task: asyncio.Task[None]) -> None:
        hand.step((0, [500]), (1, [600]), (2, [700]))
        await hand.event()
        first = [(e.delta.index, [*e.delta.token_ids]) for e in [await hand.event() for _ in "abc"]]
        assert first == [(0, [500]), (1, [600]), (2, [700])]
        hand.step((1, [601]), finish_reason="length")
        assert (await hand.event()).delta.index == 1
        end = await hand.event()
        assert end.finished.index == 1 and not end.HasField("usage")
        hand.step((0, [501]), (2, [701]), finish_reason="length")
        kinds = [(await hand.event()).WhichOneof("event") for _ in range(4)]
        assert kinds == ["delta", "finished", "delta", "finished"]
        await task

    play(body, n=3)


def test_a_stop_string_ends_the_sample_in_the_engine() -> None:
    text = smollm2().decode([500, 501])

    async def body(hand: Hand, task: asyncio.Task[None]) -> None:
        hand.step((0, [500, 501, 502]))  # the third is beyond the end
        await hand.event()
        assert await hand.ids() == [500, 501]
        end = await hand.event()
        assert end.finished.match.stop_string == text
        assert end.usage.completion_tokens == 2
        assert hand.ended == [(0, "stop")] and not hand.aborted
        await task

    play(body, stop=[text])


def test_text_that_is_held_back_goes_with_a_later_message() -> None:
    """With sentencepiece a run of byte tokens is a character once it has ended."""
    tokenizer = spm_tokenizer()
    ids = [i for i in tokenizer.encode("€", add_special_tokens=False) if i in
           tokenizer.byte_fallback_ids]  # fmt: skip
    assert len(ids) == 3
    word = tokenizer.encode("a", add_special_tokens=False)[-1]

    async def body(hand: Hand, task: asyncio.Task[None]) -> None:
        hand.step((0, [word]))
        await hand.event()
        await hand.event()
        for token in ids:
            hand.step((0, [token]))
            event = await hand.event()
            assert (event.delta.text, [*event.delta.token_ids]) == ("", [token])
        hand.step((0, [word]))
        assert (await hand.event()).delta.text.startswith("€")

    play(body, tokenizer=tokenizer)


def test_messages_without_news_are_not_sent() -> None:
    tokenizer = smollm2()
    halves = tokenizer.encode("\U0001f9ff", add_special_tokens=False)
    assert tokenizer.decode(halves[:1]) == "\ufffd"

    async def body(hand: Hand, task: asyncio.Task[None]) -> None:
        hand.step((0, halves[:1]))
        assert (await hand.event()).HasField("started")
        for token in halves[1:-1]:
            hand.step((0, [token]))
        await hand.nothing()
        hand.step((0, halves[-1:]))
        event = await hand.event()
        assert (event.delta.text, [*event.delta.token_ids]) == ("\U0001f9ff", [])

    play(body, OutputForm(False, False))


def test_a_reader_that_does_not_read() -> None:
    """Too much waits while a write is stuck: the write is given up, the request aborted."""

    async def body(hand: Hand, task: asyncio.Task[None]) -> None:
        hand.step((0, [500]))
        await hand.event()
        await hand.ids()
        hand.may_write.clear()
        for _ in range(102):
            hand.step((0, [500]))
            await asyncio.sleep(0)
        with pytest.raises(SlowConsumerError, match="101 tokens of output were not read"):
            await task
        assert hand.aborted and not task.cancelled()

    play(body)


def test_a_cancellation_while_a_write_is_stuck() -> None:
    async def body(hand: Hand, task: asyncio.Task[None]) -> None:
        hand.step((0, [500]))
        await hand.event()
        await hand.ids()
        hand.may_write.clear()
        hand.step((0, [500]))
        await hand.nothing()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    play(body)


def test_other_failures_wait_for_the_write() -> None:
    async def body(hand: Hand, task: asyncio.Task[None]) -> None:
        hand.step((0, [500]))
        await hand.event()
        await hand.ids()
        hand.may_write.clear()
        hand.step((0, [501]))
        hand.step((0, [502]))
        hand.stream.fail(EngineDeadError("killed"))
        await hand.nothing()
        hand.may_write.set()
        assert await hand.ids() == [501]
        assert await hand.ids() == [502]  # what came before the end is given
        with pytest.raises(EngineDeadError):
            await task

    play(body)


def test_samples_that_cannot_be_computed() -> None:
    async def body(hand: Hand, task: asyncio.Task[None]) -> None:
        hand.step((0, [500]), (1, [500]))
        for _ in range(3):
            await hand.event()
        hand.step((0, []), finish_reason="error")
        assert (await hand.event()).finished.reason == pb.FINISH_REASON_ERROR
        hand.step((1, []), finish_reason="error")
        with pytest.raises(NumericalError):
            await task

    play(body, n=2)


def test_one_sample_of_several_that_cannot_be_computed() -> None:
    async def body(hand: Hand, task: asyncio.Task[None]) -> None:
        hand.step((0, [500]), (1, [500]))
        for _ in range(3):
            await hand.event()
        hand.step((0, []), finish_reason="error")
        assert (await hand.event()).finished.reason == pb.FINISH_REASON_ERROR
        hand.step((1, [501]), finish_reason="stop")
        assert await hand.ids() == [501]
        assert (await hand.event()).finished.reason == pb.FINISH_REASON_STOP
        await task

    play(body, n=2)
