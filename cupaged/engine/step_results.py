"""What the tokens of a step do to its sequences: they grow, are forked into samples, and stop.

Nearly every sequence only grows by one token; which ones, is found for all of them at once. The
texts and what a finished request leaves are others' business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from cupaged.engine.batch import StepPlan
from cupaged.engine.beams import BeamGroups
from cupaged.engine.runner import FAILED_TOKEN, StepOutput
from cupaged.engine.scheduler import Scheduler
from cupaged.engine.sequence_table import are_steady
from cupaged.outputs import CoreOutput, FinishReason, TokenLogprobs
from cupaged.request import Request, Sequence, SequenceStatus

_Sample = tuple[list[int], list[TokenLogprobs] | None]  # new tokens, and what is told about each
_Finish = Callable[[Sequence, FinishReason, int | None], None]


class StepResults:
    """Applies the outputs of steps.

    Args:
        scheduler: forks sequences, and knows which run.
        beams: what a step tells of beams goes there.
        finish: ends a sequence, with the stop token id that ended it.
        forget_if_finished: called when sequences of a request may have been its last ones.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        beams: BeamGroups,
        finish: _Finish,
        forget_if_finished: Callable[[Request], None],
    ) -> None:
        self.num_generated_tokens = 0
        self._scheduler = scheduler
        self._beams = beams
        self._finish = finish
        self._forget_if_finished = forget_if_finished

    def apply(
        self, plan: StepPlan, output: StepOutput, are_running: NDArray[np.bool_]
    ) -> list[CoreOutput]:
        """Fork where a prompt is done, append the drawn tokens, stop what has to stop.

        Args:
            are_running: [num_seqs], False for those aborted while in flight.
        """
        first = np.cumsum(plan.num_samples) - plan.num_samples  # draw of each sequence
        growing = np.flatnonzero(are_running & (plan.num_samples == 1))
        tokens = np.full(len(first), FAILED_TOKEN, np.int32)
        tokens[growing] = _single_tokens(output.token_ids)[first[growing]]
        is_steady = are_steady(plan.records, tokens)
        self._scheduler.table.grow(plan.rows[is_steady], tokens[is_steady])
        self.num_generated_tokens += int(np.count_nonzero(is_steady))
        outputs: list[CoreOutput] = []
        columns = (is_steady.tolist(), tokens.tolist())
        for i, (sequence, steady, token) in enumerate(zip(plan.sequences, *columns, strict=True)):
            if steady:
                request = sequence.request
                sequence.token_ids.append(token)
                outputs.append(
                    CoreOutput(
                        request.core.request_id,
                        sequence.index,
                        [token],
                        None,
                        (),
                        request.num_preemptions,
                        request.num_cached_tokens,
                        request.first_scheduled_time,
                    )
                )
            elif are_running[i]:
                draws = slice(first.item(i), first.item(i) + plan.num_samples.item(i))
                told = output.prompt_logprobs[i] if output.prompt_logprobs else []
                outputs += self._take(sequence, output, draws, told)
        return outputs

    def _take(
        self, parent: Sequence, output: StepOutput, draws: slice, prompt: list[TokenLogprobs]
    ) -> list[CoreOutput]:
        """What was drawn after a sequence: one sample, or one for each that it is forked into.

        Args:
            draws: of the output's samples; none for a chunk in the middle of the tokens.
            prompt: what is told about its next prompt tokens.
        """
        request = parent.request
        request.prompt_logprobs += prompt
        tokens = output.token_ids[draws]
        told = output.logprobs[draws] if output.logprobs else [None] * len(tokens)
        samples = list(zip(tokens, told, strict=True))
        if not samples:
            return []
        if request.core.beams is not None:
            outputs = self._beams.tell(parent, *samples[0])
            self.num_generated_tokens += sum(len(output.new_token_ids) for output in outputs)
            self._forget_if_finished(request)
            return outputs
        tells_prompt = request.prompt_logprobs and not parent.num_output_tokens
        if len(samples) == 1:
            outputs = [self._append(parent, *samples[0])]
        else:
            outputs = list(self._fork(parent, samples))
        if tells_prompt and outputs:
            outputs[0].prompt_logprobs = request.prompt_logprobs
        if len(samples) > 1 or parent.finish_reason is not None:
            self._forget_if_finished(request)
        return outputs

    def _fork(self, parent: Sequence, samples: list[_Sample]) -> Iterator[CoreOutput]:
        """Make a sequence of each sample, with its tokens; some may have been cancelled before."""
        parent.num_pending_samples = 1
        cancelled = parent.request.cancelled
        siblings = [self._scheduler.fork(parent, j) for j in range(1, len(samples))]
        for sequence, (tokens, logprobs) in zip([parent, *siblings], samples, strict=True):
            if sequence.index in cancelled:
                self._finish(sequence, cancelled.pop(sequence.index), None)
            else:
                yield self._append(sequence, tokens, logprobs)

    def _append(
        self, sequence: Sequence, tokens: list[int], logprobs: list[TokenLogprobs] | None
    ) -> CoreOutput:
        """Append drawn tokens up to the first that ends the sequence."""
        accepted: list[int] = []
        request = sequence.request
        for token in tokens:
            if token == FAILED_TOKEN:
                self._finish(sequence, "error", None)
                break
            accepted.append(token)
            sequence.append(token)
            if token in request.ending_ids or sequence.num_tokens >= request.max_length:
                self._stop_if_due(sequence, token)
                if sequence.status is SequenceStatus.FINISHED:
                    break
        self.num_generated_tokens += len(accepted)
        return CoreOutput(
            request.core.request_id,
            sequence.index,
            accepted,
            None if logprobs is None else logprobs[: len(accepted)],
            (),
            request.num_preemptions,
            request.num_cached_tokens,
            request.first_scheduled_time,
            sequence.finish_reason,
            sequence.stop_reason,
        )

    def _stop_if_due(self, sequence: Sequence, token: int) -> None:
        core, params = sequence.request.core, sequence.request.core.params
        if sequence.num_output_tokens >= params.min_tokens:
            if token in params.stop_ids:
                return self._finish(sequence, "stop", token)
            if token in core.eos_token_ids and not params.ignore_eos:
                return self._finish(sequence, "stop", None)
        if sequence.num_output_tokens >= sequence.request.max_tokens:
            self._finish(sequence, "length", None)


def _single_tokens(samples: list[list[int]]) -> NDArray[np.int32]:
    """int32 [num_samples], the token of each sample; `FAILED_TOKEN` where there are several."""
    tokens = np.fromiter(chain.from_iterable(samples), np.int32)
    if len(tokens) != len(samples):
        alone = [tokens[0] if len(tokens) == 1 else FAILED_TOKEN for tokens in samples]
        return np.array(alone, np.int32)
    return tokens
