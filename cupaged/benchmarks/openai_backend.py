"""The backends `openai` and `openai-chat`: /v1/completions and /v1/chat/completions, streamed.

A message is an event with text in it; an event that brings only a role, or only the usage, is none.
What is asked for beyond OpenAI's own parameters (`top_k`, `ignore_eos` and so on) goes by vLLM's
names; many servers know them. A request for which no connection is free makes one on the clock, as
in vLLM's benchmark.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any, ClassVar

import msgspec

from cupaged.benchmarks.backend import (
    NO_LIMIT,
    BackendOptions,
    Received,
    RequestFailed,
    ServerFacts,
    ServerNotReady,
    ServerUnusable,
    Usage,
    chosen_name,
)
from cupaged.benchmarks.datasets import ModelFacts, Sample
from cupaged.benchmarks.http_client import Address, Answer, HttpClient
from cupaged.benchmarks.readiness import when_ready
from cupaged.benchmarks.server_sent_events import EventReader
from cupaged.client.connection import checked_request_id

__all__ = ["ChatBackend", "CompletionsBackend"]

_JSON = ("content-type", "application/json")
_CALL_S = 10.0  # for an answer that needs no model
_DONE = b"[DONE]"
_FAILED_ENDS = ("abort", "error")
_NOT_THERE = (404, 405, 501)  # not all servers list their models
_LASTING = ("TLS failed", "protocol error")  # no waiting helps
_MOST_SHOWN = 300


class CompletionsBackend:
    """See `Backend`. `address` is a URL; a path that ends in /v1 is taken as it is."""

    endpoint: ClassVar[str] = "/completions"
    is_chat: ClassVar[bool] = False

    def __init__(self, options: BackendOptions) -> None:
        self._options = options
        self._address = Address.read(options.address, options.connection)
        self._client = HttpClient(self._address, options.timeout_s)
        self._base = "" if self._address.path.endswith("/v1") else "/v1"
        self._model = options.model

    def facts(self, wait_s: float) -> ServerFacts:
        """What /v1/models tells; a server that is not there yet, or has no model, is waited for.

        Raises:
            ServerUnusable: not in time, or another failure, at once.
        """
        return when_ready(lambda: asyncio.run(self._facts()), wait_s, (ServerNotReady,))

    def prepare(self, sample: Sample, request_id: str) -> bytes:
        """The id as a line of its own, and the body."""
        body = {
            "model": self._model,
            **self._asked(str(sample.prompt), sample.max_tokens),
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._options.sampling,
        }
        return checked_request_id(request_id).encode() + b"\n" + msgspec.json.encode(body)

    async def open(self) -> None:
        """Connect once; a request that finds no free connection makes its own.

        Raises:
            RequestFailed: there is no connection.
        """
        await self._client.connect()

    async def request(self, prepared: bytes) -> AsyncGenerator[Received, None]:
        """Send it; give its messages."""
        request_id, _, body = prepared.partition(b"\n")
        headers = (_JSON, ("accept", "text/event-stream"), ("x-request-id", request_id.decode()))
        path = self._base + self.endpoint
        async with await self._client.request("POST", path, headers, body) as answer:
            if answer.status != 200:
                raise _failure(answer.status, await answer.whole())
            kind = answer.header("content-type")
            if kind.partition(";")[0].strip().lower() != "text/event-stream":
                raise RequestFailed(
                    "protocol error", f"the answer is no event stream, but {kind!r}"
                )
            events, usage, has_text, is_complete = EventReader(), None, False, False
            async for piece in answer.pieces:
                now = time.perf_counter()
                for data in _events(events, piece):
                    if data == _DONE:  # after nothing at all it ends no answer
                        is_complete = is_complete or has_text or usage is not None
                        continue
                    event = _decoded(data)
                    text, has_ended = self._read(event)
                    is_complete = is_complete or has_ended
                    usage = _usage(event) or usage
                    if text:
                        has_text = True
                        yield Received(now, 0, None, text)
            if not is_complete:
                raise RequestFailed(
                    "HTTP 200 incomplete", "the answer ended without its last event"
                )
            yield Received(now, 0, usage)

    async def close(self) -> None:
        """Cancel what runs and disconnect."""
        await self._client.close()

    def _asked(self, prompt: str, max_tokens: int) -> dict[str, Any]:
        return {"prompt": prompt, "max_tokens": max_tokens}

    def _read(self, event: dict[str, Any]) -> tuple[str, bool]:
        """New text of an event, and whether it ends the answer.

        Raises:
            RequestFailed: it tells of a failure.
        """
        if event.get("error"):
            raise _failure(200, msgspec.json.encode(event))
        text, end = "", None
        try:
            for choice in event.get("choices") or ():
                text += self._text(choice)
                end = choice.get("finish_reason") or end
        except (AttributeError, TypeError):
            shown = msgspec.json.encode(event)[:_MOST_SHOWN]
            raise RequestFailed("protocol error", f"an event of another form: {shown!r}") from None
        if end in _FAILED_ENDS:
            raise RequestFailed(f"HTTP 200 {end}", f"the server ended the answer: {end}")
        return text, end is not None

    def _text(self, choice: dict[str, Any]) -> str:
        return choice.get("text") or ""

    async def _facts(self) -> ServerFacts:
        client = HttpClient(self._address, _CALL_S)
        try:
            async with await client.request("GET", f"{self._base}/models") as answer:
                return self._described(answer, await answer.whole())
        except RequestFailed as error:
            kind = ServerUnusable if error.code in _LASTING else ServerNotReady
            raise kind(f"{self._options.address}: {error}") from None
        finally:
            await client.close()

    def _described(self, answer: Answer, body: bytes) -> ServerFacts:
        where = f"{self._options.address}: {self._address.path}{self._base}/models"
        if answer.status in _NOT_THERE and self._model:
            return ServerFacts(self._facts_of(None), {"server": answer.header("server")})
        if answer.status != 200:
            error = _failure(answer.status, body)
            kind = ServerNotReady if answer.status in (502, 503, 504) else ServerUnusable
            raise kind(f"{where}: {error}")
        try:
            models = {str(entry["id"]): entry for entry in msgspec.json.decode(body)["data"]}
            lengths = {name: entry.get("max_model_len") for name, entry in models.items()}
        except (msgspec.DecodeError, AttributeError, KeyError, TypeError):
            raise ServerUnusable(f"{where} is no list of models: is it OpenAI's API?") from None
        self._model = chosen_name(self._options.model, [*models])
        facts = self._facts_of(lengths[self._model])
        return ServerFacts(facts, {"server": answer.header("server")})

    def _facts_of(self, length: Any) -> ModelFacts:
        """length: of the context; some servers tell it."""
        return ModelFacts(
            name=self._model,
            vocab_size=0,  # the protocol does not tell
            max_model_len=length if isinstance(length, int) and length > 0 else NO_LIMIT,
            has_chat_template=self.is_chat,
        )


class ChatBackend(CompletionsBackend):
    """The same for /v1/chat/completions: every prompt is a message of a user."""

    endpoint: ClassVar[str] = "/chat/completions"
    is_chat: ClassVar[bool] = True

    def _asked(self, prompt: str, max_tokens: int) -> dict[str, Any]:
        messages = [{"role": "user", "content": prompt}]
        return {"messages": messages, "max_completion_tokens": max_tokens}

    def _text(self, choice: dict[str, Any]) -> str:
        delta = choice.get("delta") or {}
        # A model's thoughts are tokens too; their name differs by server.
        return "".join(
            delta.get(key) or "" for key in ("reasoning_content", "reasoning", "content")
        )


def _events(events: EventReader, piece: bytes) -> list[bytes]:
    try:
        return [*events.feed(piece)]
    except ValueError as error:
        raise RequestFailed("protocol error", str(error)) from None


def _decoded(data: bytes) -> dict[str, Any]:
    try:
        event = msgspec.json.decode(data)
    except msgspec.DecodeError:
        event = None
    if not isinstance(event, dict):
        raise RequestFailed("protocol error", f"an event is no JSON object: {data[:80]!r}")
    return event


def _usage(event: dict[str, Any]) -> Usage | None:
    usage = event.get("usage")
    if not isinstance(usage, dict):
        return None
    prompt, answer = usage.get("prompt_tokens"), usage.get("completion_tokens")
    return Usage(prompt, answer) if isinstance(prompt, int) and isinstance(answer, int) else None


def _failure(status: int, body: bytes) -> RequestFailed:
    """Counted by status and what the server calls it: `HTTP 429 rate_limit_exceeded`."""
    try:
        told = msgspec.json.decode(body)
    except msgspec.DecodeError:
        told = body.decode("utf-8", "replace")
    if isinstance(told, dict):
        told = told.get("error") or told.get("detail") or told
    name = ""
    if isinstance(told, dict):
        name = next((str(told[k]) for k in ("code", "type") if isinstance(told.get(k), str)), "")
        told = told.get("message", told)
    message = " ".join(str(told).split())[:_MOST_SHOWN] or "no reason given"
    return RequestFailed(f"HTTP {status} {name}".strip(), message)
