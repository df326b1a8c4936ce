"""One sample as text: its tokens detokenised, its stop strings matched, its delta kept."""

from __future__ import annotations

from collections.abc import Sequence

from cupaged.engine.detokenizer import IncrementalDetokenizer
from cupaged.engine.stop_strings import StopStringMatcher
from cupaged.engine.token_alternatives import alternatives
from cupaged.loading.tokenizer import Tokenizer
from cupaged.outputs import CompletionOutput, CoreOutput, FinishReason, TokenAlternatives
from cupaged.sampling_params import SamplingParams


class Completion:
    """Grows with every output of the core for sample `index` of a request."""

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
    ) -> None:
        self.index = index
        self.finish_reason: FinishReason | None = None
        self._params = params
        self._token_ids: list[int] = []
        self._text = ""
        self._delta = ""
        self._stop_reason: int | str | None = None
        self._tokenizer = tokenizer
        self._logprobs: list[TokenAlternatives] | None = None if params.logprobs is None else []
        self._cumulative = 0.0
        self._detokenizer = (
            IncrementalDetokenizer(
                tokenizer, prompt_token_ids, skip_special_tokens=params.skip_special_tokens
            )
            if params.detokenize
            else None
        )
        self._matcher = StopStringMatcher(
            params.stop_strings, include_stop=params.include_stop_str_in_output
        )

    def append(self, output: CoreOutput) -> None:
        """Take the new tokens; may end the sample at a stop string before the core ends it."""
        if self.finish_reason is not None:
            return
        visible = output.new_token_ids
        if output.finish_reason == "stop" and not self._params.include_stop_str_in_output:
            visible = visible[:-1]  # the token that stopped it is no text
        self._token_ids += output.new_token_ids
        if self._logprobs is not None:
            told = output.logprobs or []
            self._logprobs += [alternatives(self._tokenizer, position) for position in told]
            self._cumulative += sum(position.logprobs[0] for position in told)
        if self._detokenizer is not None:
            self._deliver(self._detokenizer.append(visible))
        if output.finish_reason is not None and self.finish_reason is None:
            self._stop_reason = output.stop_reason
            self.end(output.finish_reason)

    def end(self, reason: FinishReason) -> None:
        """Deliver what was held back and finish, unless it has finished already."""
        if self.finish_reason is not None:
            return
        if self._detokenizer is not None:
            self._deliver(self._detokenizer.finish())
        if self.finish_reason is None:
            self._add(self._matcher.flush())
            self.finish_reason = reason

    def output(self) -> CompletionOutput:
        """The sample so far; the next output's delta begins here."""
        delta, self._delta = self._delta, ""
        logprobs = None if self._logprobs is None else self._logprobs.copy()
        return CompletionOutput(
            index=self.index,
            text=self._text,
            token_ids=self._token_ids.copy(),
            cumulative_logprob=None if logprobs is None else self._cumulative,
            logprobs=logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
            delta=delta,
        )

    def _deliver(self, text: str) -> None:
        if len(self._token_ids) < self._params.min_tokens:
            self._matcher.skip(text)  # stop strings do not end here yet
            self._add(text)
            return
        text, stop = self._matcher.feed(text)
        self._add(text)
        if stop is not None:
            self.finish_reason = "stop"
            self._stop_reason = stop

    def _add(self, text: str) -> None:
        self._text += text
        self._delta += text
