"""What comes back: plain dataclasses, made of the messages of `cupaged.v1`.

Samples and log probabilities are those of `cupaged.outputs`, as `LLM.generate` gives them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from google.protobuf import duration_pb2

from cupaged.client.errors import ProtocolError
from cupaged.outputs import CompletionOutput, FinishReason, Logprob, TokenAlternatives
from cupaged.v1 import generation_pb2 as pb

_REASONS: dict[int, FinishReason] = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_ABORT: "abort",
    pb.FINISH_REASON_ERROR: "error",
}


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request took: numbers of tokens, and times in seconds as the server measured them.

    `completion_tokens` counts those of all samples. A time is None if it did not come to that:
    from the arrival to the first step (queue), from there to the first token (prefill), from the
    first token to the end (decode), from the arrival to the first token.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    num_preemptions: int = 0
    queue_time_s: float | None = None
    prefill_time_s: float | None = None
    decode_time_s: float | None = None
    time_to_first_token_s: float | None = None


@dataclass(frozen=True, slots=True)
class Started:
    """The request is accepted. `num_cached_tokens` is None if it is not known yet.

    `prompt` and `prompt_token_ids` are there if `echo` was set.
    """

    request_id: str
    model: str
    num_prompt_tokens: int
    num_cached_tokens: int | None = None
    prompt: str | None = None
    prompt_token_ids: list[int] | None = None


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Of the next tokens of the prompt; the very first entry of a stream is None."""

    positions: list[TokenAlternatives | None]


@dataclass(frozen=True, slots=True)
class Delta:
    """New text and new token ids of a sample; either may be empty.

    Text is final: what may still become a part of a stop string or of a character is held back.
    `logprobs` has an entry a token if the request asked for it.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenAlternatives] | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a sample. `stop_reason` is the stop string or stop token id that ended it."""

    index: int
    finish_reason: FinishReason
    stop_reason: int | str | None
    num_tokens: int
    cumulative_logprob: float | None = None


Event = Started | PromptLogprobs | Delta | Finished | Usage


@dataclass(frozen=True, slots=True)
class Generation:
    """A whole answer: its samples in order of their index, and what it took.

    `prompt` and `prompt_token_ids` are there if `echo` was set, `prompt_logprobs` (an entry a
    token, None for the first) if it was asked for.
    """

    request_id: str
    model: str
    outputs: list[CompletionOutput]
    usage: Usage
    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[TokenAlternatives | None] | None = None

    @property
    def text(self) -> str:
        """Of the first sample."""
        return self.outputs[0].text


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """The prompt that a chat template made; as a prompt it is `{"prompt_token_ids": token_ids}`."""

    text: str
    token_ids: list[int]


def read_generation(answer: pb.GenerateResponse) -> Generation:
    """A whole answer.

    Raises:
        ProtocolError: it breaks the protocol.
    """
    if not answer.samples:
        raise ProtocolError("the answer has no samples", request_id=answer.request_id)
    prompt_logprobs = [_position(position) for position in answer.prompt_logprobs]
    has_prompt = answer.HasField("prompt")
    return Generation(
        request_id=answer.request_id,
        model=answer.model,
        outputs=[_sample(sample) for sample in answer.samples],
        usage=read_usage(answer.usage),
        prompt=answer.prompt.text if has_prompt else None,
        prompt_token_ids=list(answer.prompt.token_ids) if has_prompt else None,
        prompt_logprobs=prompt_logprobs or None,
    )


def read_events(message: pb.GenerateStreamResponse) -> Iterable[Event]:
    """The events of a message, none for a kind that this version does not know.

    Raises:
        ProtocolError: it breaks the protocol.
    """
    kind = message.WhichOneof("event")
    if kind == "delta":
        yield _delta(message.delta)
    elif kind == "finished":
        yield _finished(message.finished)
    elif kind == "started":
        yield _started(message.started)
    elif kind == "prompt_logprobs":
        yield PromptLogprobs([_position(p) for p in message.prompt_logprobs.positions])
    if message.HasField("usage"):
        yield read_usage(message.usage)


def read_usage(usage: pb.Usage) -> Usage:
    """What a request took."""
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
        num_preemptions=usage.num_preemptions,
        queue_time_s=_seconds(usage.queue_time) if usage.HasField("queue_time") else None,
        prefill_time_s=_seconds(usage.prefill_time) if usage.HasField("prefill_time") else None,
        decode_time_s=_seconds(usage.decode_time) if usage.HasField("decode_time") else None,
        time_to_first_token_s=_seconds(usage.time_to_first_token)
        if usage.HasField("time_to_first_token")
        else None,
    )


def _sample(sample: pb.Sample) -> CompletionOutput:
    return CompletionOutput(
        index=sample.index,
        text=sample.text,
        token_ids=list(sample.token_ids),
        cumulative_logprob=_sum(sample),
        logprobs=_logprobs(sample.logprobs),
        finish_reason=_reason(sample.finish_reason),
        stop_reason=_match(sample.match),
        delta=sample.text,
    )


def _started(started: pb.Started) -> Started:
    has_prompt = started.HasField("prompt")
    return Started(
        request_id=started.request_id,
        model=started.model,
        num_prompt_tokens=started.prompt_tokens,
        num_cached_tokens=started.cached_tokens if started.HasField("cached_tokens") else None,
        prompt=started.prompt.text if has_prompt else None,
        prompt_token_ids=list(started.prompt.token_ids) if has_prompt else None,
    )


def _delta(delta: pb.Delta) -> Delta:
    return Delta(delta.index, delta.text, list(delta.token_ids), _logprobs(delta.logprobs))


def _finished(finished: pb.Finished) -> Finished:
    return Finished(
        index=finished.index,
        finish_reason=_reason(finished.reason),
        stop_reason=_match(finished.match),
        num_tokens=finished.completion_tokens,
        cumulative_logprob=_sum(finished),
    )


def _sum(of: pb.Sample | pb.Finished) -> float | None:
    return of.cumulative_logprob if of.HasField("cumulative_logprob") else None


def _reason(number: int) -> FinishReason:
    reason = _REASONS.get(number)
    if reason is None:
        raise ProtocolError(f"the finish reason {number} is unknown")
    return reason


def _match(match: pb.StopMatch) -> int | str | None:
    kind = match.WhichOneof("match")
    if kind == "stop_string":
        return match.stop_string
    return match.stop_token_id if kind == "stop_token_id" else None


def _logprobs(positions: Iterable[pb.PositionLogprobs]) -> list[TokenAlternatives] | None:
    return [_position(position) or {} for position in positions] or None


def _position(position: pb.PositionLogprobs) -> TokenAlternatives | None:
    """The token that stands there first, then the likeliest; None for an empty entry."""
    if not position.HasField("token"):
        return None
    return {
        known.token_id: Logprob(
            logprob=known.logprob,
            rank=known.rank or None,
            decoded_token=known.text.decode("utf-8", "replace"),
        )
        for known in (position.token, *position.top)
    }


def _seconds(duration: duration_pb2.Duration) -> float:
    return duration.seconds + duration.nanos / 1e9
