"""`cupaged.v1.GenerationService`: requests in, answers out, whole or streamed.

One call is one request of the engine, and whatever ends the call ends the request: a status, a
cancellation, a deadline, a lost connection.
"""

from __future__ import annotations

import asyncio
import time
import uuid

from cupaged.errors import InvalidParameterError, PromptError
from cupaged.server.conversions import (
    MAX_DETOKENIZE_IDS,
    GenerationRequest,
    asked_of,
)
from cupaged.server.event_stream import EventStream
from cupaged.server.field_paths import paths_for
from cupaged.server.observation import Observation
from cupaged.server.output_stream import OutputStream
from cupaged.server.plain_deltas import PlainDeltas
from cupaged.server.request_intake import RequestIntake, read_whole, run_quickly
from cupaged.server.responses import Responses
from cupaged.server.rpc import REQUEST_ID_KEY, Call
from cupaged.server.served_model import Prepared, ServedModel
from cupaged.v1 import generation_pb2 as pb


class GenerationService:
    """Answers with one model.

    Args:
        intake: of this front end.
    """

    def __init__(self, intake: RequestIntake) -> None:
        self._model = intake.model
        self._client = intake.client
        self._intake = intake
        self._plain = PlainDeltas()

    async def Generate(self, request: pb.GenerateRequest, call: Call) -> pb.GenerateResponse:
        """Answer when the last sample has ended."""
        observation = self._intake.observe(call, "Generate", stream=False)
        stream: OutputStream | None = None
        try:
            prepared = await self._prepare(request, call, observation)
            stream, text = self._intake.submit(prepared, observation)
            await read_whole(stream, text)
            answers = Responses(text, self._model.name, prepared.form, self._model.text.token_bytes)
            response = answers.whole(time.perf_counter())
            await call.check_size(response.ByteSize())
            await call.context.send_initial_metadata(((REQUEST_ID_KEY, call.request_id),))
            observation.finished(text, response.ByteSize())
            return response
        except asyncio.CancelledError:
            observation.dropped()
            raise
        finally:
            if stream is not None:
                stream.close()

    async def GenerateStream(self, request: pb.GenerateStreamRequest, call: Call) -> None:
        """Answer as the tokens come."""
        observation = self._intake.observe(call, "GenerateStream", stream=True)
        stream: OutputStream | None = None
        try:
            prepared = await self._prepare(request, call, observation)
            stream, text = self._intake.submit(prepared, observation)
            answers = Responses(
                text, self._model.name, prepared.form, self._model.text.token_bytes, self._plain
            )
            # Headers wait for the engine's first word: gRPC's own retries end with them.
            first = await stream.next()
            await call.context.send_initial_metadata(((REQUEST_ID_KEY, call.request_id),))
            events = EventStream(call.context, stream, text, answers, observation.meter)
            await events.run(first, prepared.form)
            observation.finished(text)
        except asyncio.CancelledError:
            observation.dropped()
            raise
        finally:
            if stream is not None:
                stream.close()

    async def Abort(self, request: pb.AbortRequest, call: Call) -> pb.AbortResponse:
        """End requests of any front end."""
        aborted = await self._intake.abort(request.request_ids)
        return pb.AbortResponse(aborted_request_ids=aborted)

    async def Tokenize(self, request: pb.TokenizeRequest, call: Call) -> pb.TokenizeResponse:
        """Token ids of a text, or of a chat by way of its template."""
        model = self._open_model(request.model)
        given = request.add_special_tokens if request.HasField("add_special_tokens") else None
        kind = request.WhichOneof("input")
        call.field_path = paths_for(kind or "input")

        def tokenize() -> list[int]:
            if kind == "text":
                special = True if given is None else given
                return model.encode(request.text, add_special_tokens=special)
            if kind == "chat":
                text, token_ids = model.render(request.chat)
                return model.tokenizer.encode(text) if given else token_ids
            raise PromptError("input", None, "text or chat")

        token_ids = await run_quickly(tokenize, call.num_bytes, kind == "chat")
        info = model.info
        max_model_len = 0 if info is None else info.config.max_model_len
        return pb.TokenizeResponse(token_ids=token_ids, max_model_len=max_model_len)

    async def Detokenize(self, request: pb.DetokenizeRequest, call: Call) -> pb.DetokenizeResponse:
        """Text of token ids."""
        model = self._open_model(request.model)
        number = len(request.token_ids)
        if number > MAX_DETOKENIZE_IDS:
            allowed = f"a list of at most {MAX_DETOKENIZE_IDS} ids"
            raise InvalidParameterError("token_ids", number, allowed)
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True

        def detokenize() -> str:
            ids = list(request.token_ids)
            for i, token in enumerate(ids):
                if token >= model.vocab_size:
                    allowed = f"in [0, {model.vocab_size})"
                    raise InvalidParameterError(f"token_ids[{i}]", token, allowed)
            return model.tokenizer.decode(ids, skip_special_tokens=skip)

        text = await run_quickly(detokenize, call.num_bytes, False)
        return pb.DetokenizeResponse(text=text)

    async def ApplyChatTemplate(
        self, request: pb.ApplyChatTemplateRequest, call: Call
    ) -> pb.ApplyChatTemplateResponse:
        """The prompt that a chat becomes."""
        model = self._open_model(request.model)
        call.field_path = paths_for("chat")
        text, token_ids = await run_quickly(
            lambda: model.render(request.chat), call.num_bytes, True
        )
        return pb.ApplyChatTemplateResponse(text=text, token_ids=token_ids)

    def _open_model(self, name: str) -> ServedModel:
        """The model, for what needs no engine; while the server drains it is closed, too."""
        state = self._client.state
        error = state.error()
        if error is not None and state.phase in ("draining", "loading"):
            raise error
        self._model.check_name(name)
        _ = self._model.text
        return self._model

    async def _prepare(
        self, request: GenerationRequest, call: Call, observation: Observation
    ) -> Prepared:
        kind = request.WhichOneof("input") or "input"
        call.field_path = paths_for(kind)
        return await self._intake.prepare(
            request.request_id or call.metadata(REQUEST_ID_KEY) or str(uuid.uuid4()),
            request.model,
            lambda: asked_of(request),
            call,
            observation,
            is_chat=kind == "chat",
        )
