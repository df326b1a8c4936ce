"""One sample as text: its tokens detokenised, its stop strings matched, its delta kept."""

from __future__ import annotations

from collections.abc import Sequence

from cupaged.engine.detokenizer import IncrementalDetokenizer
from cupaged.engine.stop_strings import StopStringMatcher
from cupaged.engine.token_alternatives import alternatives
from cupaged.loading.tokenizer import Tokenizer
from cupaged.outputs import (
    CompletionOutput,
    CoreOutput,
    FinishReason,
    TokenAlternatives,
    TokenLogprobs,
)
from cupaged.sampling_params import SamplingParams


class Completion:
    """Grows with every output of the core for sample `index` of a request."""

    __slots__ = (
        "_cumulative", "_delta", "_detokenizer", "_logprobs", "_matcher", "_num_taken", "_params",
        "_text", "_token_ids", "_tokenizer", "_told", "finish_reason", "index", "stop_reason",
    )  # fmt: skip

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
        self.stop_reason: int | str | None = None
        self._token_ids: list[int] = []
        self._num_taken = 0  # of the tokens, by `take`
        self._text = ""  # all that `output` has given
        self._delta = ""  # what came since
        self._tokenizer = tokenizer
        self._told: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self._logprobs: list[TokenAlternatives] = []  # of the first tokens, as far as asked for
        self._cumulative = 0.0
        self._detokenizer = (
            IncrementalDetokenizer(
                tokenizer, prompt_token_ids, skip_special_tokens=params.skip_special_tokens
            )
            if params.detokenize
            else None
        )
        self._matcher = (
            StopStringMatcher(params.stop_strings, include_stop=params.include_stop_str_in_output)
            if params.stop_strings
            else None
        )

    @property
    def num_tokens(self) -> int:
        """Tokens of the sample so far."""
        return len(self._token_ids)

    @property
    def token_ids(self) -> list[int]:
        """All tokens of the sample so far, whether they were taken or not."""
        return self._token_ids.copy()

    @property
    def num_new_tokens(self) -> int:
        """Tokens since the last `take`."""
        return len(self._token_ids) - self._num_taken

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the log probabilities of its tokens, if the request asked for them."""
        return None if self._told is None else self._cumulative

    def append(self, output: CoreOutput) -> None:
        """Take the new tokens; may end the sample at a stop string before the core ends it.

        The result does not depend on how the tokens are split into outputs: what comes behind a
        stop string is dropped.
        """
        tokens = output.new_token_ids
        if len(tokens) > 1 and self._params.stop:
            for i, token in enumerate(tokens):
                told = output.logprobs[i : i + 1] if output.logprobs else None
                last = i == len(tokens) - 1
                reason = output.finish_reason if last else None
                self._append([token], told, reason, output.stop_reason)
        else:
            self._append(tokens, output.logprobs, output.finish_reason, output.stop_reason)

    def _append(
        self,
        tokens: list[int],
        told: list[TokenLogprobs] | None,
        finish_reason: FinishReason | None,
        stop_reason: int | None,
    ) -> None:
        if self.finish_reason is not None:
            return
        self._token_ids += tokens
        if self._told is not None and told:
            self._told += told
            self._cumulative += sum(position.logprobs[0] for position in told)
        if self._detokenizer is not None:
            if finish_reason == "stop" and not self._params.include_stop_str_in_output:
                tokens = tokens[:-1]  # the token that stopped it is no text
            text = self._detokenizer.append(tokens)
            if self._matcher is None:
                self._delta += text
            else:
                self._deliver(text, self._matcher)
        if finish_reason is not None and self.finish_reason is None:
            self.stop_reason = stop_reason
            self.end(finish_reason)

    @property
    def is_plain(self) -> bool:
        """True where tokens are nothing but text, or not even that: `pass_on` may be used."""
        return self._matcher is None and self._told is None

    def pass_on(self, tokens: list[int]) -> str:
        """`append` of tokens that end nothing and `take` in one: their text.

        For plain samples of which `take` has left nothing.
        """
        self._token_ids += tokens
        self._num_taken += len(tokens)
        return "" if self._detokenizer is None else self._detokenizer.append(tokens)

    def end(self, reason: FinishReason) -> None:
        """Deliver what was held back and finish, unless it has finished already."""
        if self.finish_reason is not None:
            return
        if self._detokenizer is not None:
            text = self._detokenizer.finish()
            if self._matcher is None:
                self._delta += text
            else:
                self._deliver(text, self._matcher)
        if self.finish_reason is None:
            if self._matcher is not None:
                self._delta += self._matcher.flush()
            self.finish_reason = reason

    def output(self) -> CompletionOutput:
        """The sample so far; the next output's delta begins here."""
        delta, self._delta = self._delta, ""
        self._text += delta
        logprobs: list[TokenAlternatives] | None = None
        if self._told is not None:
            untold = self._told[len(self._logprobs) :]
            self._logprobs += [alternatives(self._tokenizer, position) for position in untold]
            logprobs = self._logprobs.copy()
        return CompletionOutput(
            index=self.index,
            text=self._text,
            token_ids=self._token_ids.copy(),
            cumulative_logprob=self.cumulative_logprob,
            logprobs=logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            delta=delta,
        )

    def take(self) -> tuple[str, list[int], list[TokenLogprobs]]:
        """What came since the last call: text, token ids, and log probabilities if asked for.

        For those who need no texts of log probabilities, nor all that came before. Do not mix with
        `output`.
        """
        start, self._num_taken = self._num_taken, len(self._token_ids)
        delta, self._delta = self._delta, ""
        told = [] if self._told is None else self._told[start:]
        return delta, self._token_ids[start:], told

    def _deliver(self, text: str, matcher: StopStringMatcher) -> None:
        if len(self._token_ids) < self._params.min_tokens:
            matcher.skip(text)  # stop strings do not end here yet
            self._delta += text
            return
        text, stop = matcher.feed(text)
        self._delta += text
        if stop is not None:
            self.finish_reason = "stop"
            self.stop_reason = stop
