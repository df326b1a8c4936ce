"""What the engine gives as messages of the protos."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from google.protobuf.duration_pb2 import Duration

from cupaged.engine.completion import Completion
from cupaged.engine.text_shell import TextRequest
from cupaged.loading.token_bytes import TokenBytes
from cupaged.outputs import FinishReason, TokenLogprobs
from cupaged.server.conversions import OutputForm
from cupaged.server.plain_deltas import PlainDeltas
from cupaged.v1 import generation_pb2 as pb

_MAX_LOGPROBS = 16384  # in one event: many clients take messages of at most 4 MiB
_REASONS: dict[FinishReason, pb.FinishReason.ValueType] = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "abort": pb.FINISH_REASON_ABORT,
    "error": pb.FINISH_REASON_ERROR,
}


class Responses:
    """Makes the messages that answer one request.

    Args:
        request: its samples and times.
        model: the name that answers.
        form: what the messages hold.
        token_bytes: texts of single tokens, for log probabilities.
        plain: makes plain deltas; one for all requests keeps what it has made.
    """

    __slots__ = ("_encode_plain", "_form", "_model", "_request", "_token_bytes")

    def __init__(
        self,
        request: TextRequest,
        model: str,
        form: OutputForm,
        token_bytes: TokenBytes,
        plain: PlainDeltas | None = None,
    ) -> None:
        self._request = request
        self._model = model
        self._form = form
        self._token_bytes = token_bytes
        self._encode_plain = (plain or PlainDeltas()).encode

    def started(self, num_cached_tokens: int | None) -> pb.GenerateStreamResponse:
        """The first event of a stream; None if nobody knows what was cached."""
        started = pb.Started(
            request_id=self._request.request_id,
            model=self._model,
            prompt_tokens=len(self._request.prompt_token_ids),
            cached_tokens=num_cached_tokens,
            prompt=self._prompt(),
        )
        return pb.GenerateStreamResponse(started=started)

    def prompt_logprobs(self) -> Iterator[pb.GenerateStreamResponse]:
        """The events of that name, none of them so large that it could not be sent."""
        positions = self._prompt_positions()
        size = _num_positions(self._request.prompt_logprobs or [])
        for start in range(0, len(positions), size):
            part = pb.PromptLogprobs(positions=positions[start : start + size])
            yield pb.GenerateStreamResponse(prompt_logprobs=part)

    def deltas(self, completion: Completion) -> Iterator[pb.GenerateStreamResponse]:
        """What a sample has more than in the last delta: nothing if the caller would see nothing,
        one message, or as many as its log probabilities need."""
        text, token_ids, told = completion.take()
        if not self._form.token_ids:
            token_ids = []
        if not (text or token_ids or told):
            return
        size = _num_positions(told) if told else len(token_ids) or 1
        for start in range(0, max(len(token_ids), len(told), 1), size):
            response = pb.GenerateStreamResponse()
            delta = response.delta
            delta.index = completion.index
            delta.text, text = text, ""
            delta.token_ids.extend(token_ids[start : start + size])
            if told:
                delta.logprobs.extend(self._positions(told[start : start + size]))
            yield response

    def plain_delta(self, index: int, text: str, token_ids: list[int]) -> bytes:
        """The bytes of a delta without log probabilities; b"" if the caller would see nothing."""
        if self._form.token_ids:
            return self._encode_plain(index, text, token_ids)
        return self._encode_plain(index, text, ()) if text else b""

    def finished(
        self, completion: Completion, ended: float | None = None
    ) -> pb.GenerateStreamResponse:
        """The end of a sample; the last event of a stream carries the usage until `ended`."""
        assert completion.finish_reason is not None
        usage = None if ended is None else self.usage(ended)
        finished = pb.Finished(
            index=completion.index,
            reason=_REASONS[completion.finish_reason],
            match=_match(completion),
            completion_tokens=completion.num_tokens,
            cumulative_logprob=completion.cumulative_logprob,
        )
        return pb.GenerateStreamResponse(finished=finished, usage=usage)

    def whole(self, now: float) -> pb.GenerateResponse:
        """The answer of a call that is not streamed."""
        response = pb.GenerateResponse(
            request_id=self._request.request_id,
            model=self._model,
            samples=[self._sample(c) for c in self._request.completions],
            usage=self.usage(now),
            prompt=self._prompt(),
        )
        if self._request.prompt_logprobs is not None:
            response.prompt_logprobs.extend(self._prompt_positions())
        return response

    def usage(self, now: float) -> pb.Usage:
        """What the request took; `now` is its end."""
        times = self._request.metrics(now)
        return pb.Usage(
            prompt_tokens=len(self._request.prompt_token_ids),
            cached_tokens=times.num_cached_tokens,
            completion_tokens=sum(c.num_tokens for c in self._request.completions),
            num_preemptions=times.num_preemptions,
            queue_time=_duration(times.queue_time),
            prefill_time=_duration(times.prefill_time),
            decode_time=_duration(times.decode_time),
            time_to_first_token=_duration(times.time_to_first_token),
        )

    def _sample(self, completion: Completion) -> pb.Sample:
        assert completion.finish_reason is not None
        text, token_ids, told = completion.take()
        return pb.Sample(
            index=completion.index,
            text=text,
            token_ids=token_ids if self._form.token_ids else [],
            logprobs=self._positions(told),
            finish_reason=_REASONS[completion.finish_reason],
            match=_match(completion),
            completion_tokens=completion.num_tokens,
            cumulative_logprob=completion.cumulative_logprob,
        )

    def _prompt(self) -> pb.Prompt | None:
        if not self._form.echo:
            return None
        request = self._request
        return pb.Prompt(text=request.prompt or "", token_ids=request.prompt_token_ids)

    def _prompt_positions(self) -> list[pb.PositionLogprobs]:
        return [pb.PositionLogprobs(), *self._positions(self._request.prompt_logprobs or [])]

    def _positions(self, told: Sequence[TokenLogprobs]) -> list[pb.PositionLogprobs]:
        texts = self._token_bytes
        positions = []
        for position in told:
            tokens = [
                pb.TokenLogprob(token_id=token, logprob=logprob, rank=rank, text=texts[token])
                for token, logprob, rank in zip(
                    position.token_ids, position.logprobs, position.ranks, strict=True
                )
            ]
            positions.append(pb.PositionLogprobs(token=tokens[0], top=tokens[1:]))
        return positions


def _num_positions(told: Sequence[TokenLogprobs]) -> int:
    """How many positions go into one event."""
    return max(1, _MAX_LOGPROBS // max((len(p.token_ids) for p in told), default=1))


def _match(completion: Completion) -> pb.StopMatch | None:
    stop = completion.stop_reason
    if stop is None:
        return None
    return (
        pb.StopMatch(stop_string=stop)
        if isinstance(stop, str)
        else pb.StopMatch(stop_token_id=stop)
    )


def _duration(seconds: float | None) -> Duration | None:
    if seconds is None:
        return None
    nanos = max(0, round(seconds * 1e9))
    return Duration(seconds=nanos // 10**9, nanos=nanos % 10**9)
