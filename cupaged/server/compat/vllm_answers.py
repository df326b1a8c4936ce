"""Outputs of the engine as messages of `vllm.grpc.engine`: token ids, no text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from cupaged.engine.completion import Completion
from cupaged.engine.text_shell import TextRequest
from cupaged.outputs import TokenLogprobs


class VllmAnswers:
    """Makes the messages of one request that is streamed.

    Args:
        message: gives a class of the service by its name.
        request: its samples.
    """

    def __init__(self, message: Callable[[str], Any], request: TextRequest) -> None:
        self._message = message
        self._request = request
        self._response = message("GenerateResponse")()  # a plain chunk, filled again and again
        self._num_cached_tokens = 0

    def started(self, num_cached_tokens: int | None) -> None:
        """The service has no such message; every other one tells what was cached."""
        self._num_cached_tokens = num_cached_tokens or 0
        chunk = self._response.chunk
        chunk.prompt_tokens = len(self._request.prompt_token_ids)
        chunk.cached_tokens = self._num_cached_tokens

    def prompt_logprobs(self) -> Iterator[Any]:
        """A first chunk of nothing else."""
        response = self._chunk(0, [])
        response.chunk.input_logprobs.CopyFrom(self._input_logprobs())
        yield response

    def deltas(self, completion: Completion) -> Iterator[Any]:
        """A chunk of the new tokens, if there are any."""
        _, token_ids, told = completion.take()
        if token_ids:
            response = self._chunk(completion.index, token_ids)
            if told:
                response.chunk.output_logprobs.CopyFrom(self._output_logprobs(told))
            yield response

    def plain_delta(self, index: int, text: str, token_ids: list[int]) -> bytes:
        """The bytes of such a chunk."""
        chunk = self._response.chunk
        chunk.index = index
        chunk.completion_tokens = len(token_ids)
        del chunk.token_ids[:]
        chunk.token_ids.extend(token_ids)
        data: bytes = self._response.SerializeToString()
        return data

    def finished(self, completion: Completion, ended: float | None = None) -> Any:
        """The end of a sample; chunks have brought its tokens."""
        complete = self._message("GenerateComplete")(
            finish_reason=completion.finish_reason,
            prompt_tokens=len(self._request.prompt_token_ids),
            completion_tokens=completion.num_tokens,
            cached_tokens=self._num_cached_tokens,
            index=completion.index,
        )
        if isinstance(completion.stop_reason, str):
            complete.matched_stop_str = completion.stop_reason
        elif completion.stop_reason is not None:
            complete.matched_token_id = completion.stop_reason
        return self._message("GenerateResponse")(complete=complete)

    def _chunk(self, index: int, token_ids: Sequence[int]) -> Any:
        response = self._message("GenerateResponse")()
        chunk = response.chunk
        chunk.token_ids.extend(token_ids)
        chunk.prompt_tokens = len(self._request.prompt_token_ids)
        chunk.completion_tokens = len(token_ids)
        chunk.cached_tokens = self._num_cached_tokens
        chunk.index = index
        return response

    def _input_logprobs(self) -> Any:
        """Of the whole prompt; its first token has none."""
        request = self._request
        told = request.prompt_logprobs or []
        logprobs = self._message("InputLogProbs")(token_ids=request.prompt_token_ids)
        logprobs.token_logprobs.add()
        for position in told:
            logprobs.token_logprobs.add().value = position.logprobs[0]
        if _has_top(told):
            logprobs.top_logprobs.add()
            logprobs.top_logprobs.extend(self._top(told))
        return logprobs

    def _output_logprobs(self, told: Sequence[TokenLogprobs]) -> Any:
        return self._message("OutputLogProbs")(
            token_logprobs=[position.logprobs[0] for position in told],
            token_ids=[position.token_ids[0] for position in told],
            top_logprobs=self._top(told) if _has_top(told) else (),
        )

    def _top(self, told: Iterable[TokenLogprobs]) -> Iterator[Any]:
        """The likeliest tokens; a position's first entry is the token that stands there."""
        for position in told:
            yield self._message("TopLogProbs")(
                values=position.logprobs[1:], token_ids=position.token_ids[1:]
            )


class VllmWholeAnswers(VllmAnswers):
    """The same for a request that is not streamed: one message a sample, at its end."""

    def prompt_logprobs(self) -> Iterator[Any]:
        """They belong to the end."""
        return iter(())

    def deltas(self, completion: Completion) -> Iterator[Any]:
        """None."""
        return iter(())

    def plain_delta(self, index: int, text: str, token_ids: list[int]) -> bytes:
        """None."""
        return b""

    def finished(self, completion: Completion, ended: float | None = None) -> Any:
        """All of a sample."""
        response = super().finished(completion)
        complete = response.complete
        complete.output_ids.extend(completion.token_ids)
        _, _, told = completion.take()
        if told:
            complete.output_logprobs.CopyFrom(self._output_logprobs(told))
        if self._request.prompt_logprobs is not None:
            complete.input_logprobs.CopyFrom(self._input_logprobs())
        return response


def _has_top(told: Sequence[TokenLogprobs]) -> bool:
    return any(len(position.token_ids) > 1 for position in told)
