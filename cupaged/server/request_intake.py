"""The way of every request into the engine, whichever service it came by.

Ids, the state of the engine, the deadline and the model's name are looked at first; then the prompt
and the parameters are made ready. What is long runs in a thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from cupaged.engine.completion import Completion
from cupaged.engine.text_shell import TextRequest
from cupaged.errors import EngineError, InvalidParameterError
from cupaged.outputs import CoreOutput
from cupaged.server.conversions import MAX_ABORT_IDS, Asked, check_request_id
from cupaged.server.engine_client import EngineClient
from cupaged.server.event_stream import check_numbers
from cupaged.server.observation import Observation, Observers
from cupaged.server.output_stream import OutputStream
from cupaged.server.rpc import Call
from cupaged.server.served_model import Prepared, ServedModel
from cupaged.server.service_errors import DeadlinePassedError

T = TypeVar("T")
_QUICK_BYTES = 4096  # a request of that size is prepared at once, a larger one in a thread


class RequestIntake:
    """Takes requests for one model.

    Args:
        model: of this front end.
        client: of the engine.
        observers: of all requests.
    """

    def __init__(self, model: ServedModel, client: EngineClient, observers: Observers) -> None:
        self.model = model
        self.client = client
        self._observers = observers

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken now."""
        client = self.client
        return client.state.phase == "ready" and self.model.is_ready and not client.is_silent

    def observe(self, call: Call, method: str, *, stream: bool) -> Observation:
        """A request has arrived; what is returned must come to an end."""
        return Observation(self._observers, call, method, stream=stream)

    async def prepare(
        self,
        request_id: str,
        model_name: str,
        ask: Callable[[], Asked],
        call: Call,
        observation: Observation,
        *,
        is_chat: bool = False,
    ) -> Prepared:
        """Whatever has to be right before the engine hears of a request.

        Args:
            ask: reads the request; may be called in a thread.
            is_chat: the prompt is to be rendered, which is slow.

        Raises:
            CupagedError: it cannot be served.
        """
        observation.identified(check_request_id(request_id))
        error = self.client.state.error()
        if error is not None:
            raise error
        remaining = call.context.time_remaining()
        if remaining is not None and remaining <= 0:
            raise DeadlinePassedError("the deadline had passed when the request arrived")
        model = self.model
        model.check_name(model_name)
        prepared = await run_quickly(
            lambda: model.prepare(request_id, ask(), call.facts), call.num_bytes, is_chat
        )
        observation.meter.num_prompt_tokens = len(prepared.core.prompt_token_ids)
        operation = "chat" if is_chat else "text_completion"
        shown = prepared.core.prompt_token_ids if prepared.text is None else prepared.text
        observation.asked(operation, prepared.core.params, shown)
        return prepared

    async def abort(self, request_ids: Iterable[str]) -> list[str]:
        """End requests of any front end; returns the ids of those that were unfinished.

        Raises:
            InvalidParameterError: too many at once.
        """
        ids = list(dict.fromkeys(request_ids))
        if len(ids) > MAX_ABORT_IDS:
            raise InvalidParameterError("request_ids", len(ids), f"at most {MAX_ABORT_IDS} ids")
        if not ids or self.client.state.phase not in ("ready", "draining"):
            return []  # nothing is live
        aborted: list[str] = await self.client.call("abort_ids", ids)
        return aborted

    def submit(
        self, prepared: Prepared, observation: Observation
    ) -> tuple[OutputStream, TextRequest]:
        """Hand a request to the engine; the caller closes the stream, whatever happens.

        Raises:
            CupagedError: the engine would refuse it.
        """
        text = prepared.text_request(self.model.tokenizer, observation.arrival_time)
        return self.client.submit(prepared.core, prepared.queue_timeout_s), text


async def read_whole(stream: OutputStream, text: TextRequest) -> None:
    """Wait for all that the engine makes of a request.

    Raises:
        CupagedError: it failed.
    """
    while not text.finished:
        take_outputs(await stream.next(), stream, text)


def take_outputs(
    outputs: list[CoreOutput], stream: OutputStream, text: TextRequest
) -> list[Completion]:
    """The samples that have moved on by what the stream has given.

    Raises:
        CupagedError: the request failed, which its last output may show.
    """
    if not outputs:
        raise EngineError("the request ended before its output did")
    moved = text.append_all(outputs, time.perf_counter(), stream.end_sample)
    if text.finished:
        check_numbers(text)
    return moved


async def run_quickly(work: Callable[[], T], num_bytes: int, is_slow: bool) -> T:
    """Do what is quick here, and the rest in a thread, so that other calls go on meanwhile."""
    if num_bytes <= _QUICK_BYTES and not is_slow:
        return work()
    return await asyncio.get_running_loop().run_in_executor(None, work)
