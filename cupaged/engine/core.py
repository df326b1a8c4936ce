"""The engine core: requests of token ids in, tokens out, one step at a time.

It checks requests at the door, lets the scheduler plan, hands plans to the runner, appends the
tokens, forks samples and stops sequences. It knows no text, no files and no clock, and
what goes in and out are plain dataclasses.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from cupaged.config import EngineConfig
from cupaged.engine.batch import StepPlan
from cupaged.engine.block_manager import BlockManager
from cupaged.engine.runner import FAILED_TOKEN, Runner, StepOutput
from cupaged.engine.scheduler import FirstComeFirstServed, Scheduler, SchedulingPolicy
from cupaged.errors import (
    CapacityError,
    EngineError,
    InvalidParameterError,
    PromptError,
)
from cupaged.outputs import CoreOutput, EngineStats, FinishReason
from cupaged.request import CoreRequest, Request, Sequence, SequenceStatus
from cupaged.sampling_params import SamplingParams


class EngineCore:
    """Continuous batching over a paged KV pool.

    Args:
        config: the limits.
        runner: computes the steps.
        policy: order of waiting and victims of preemption; first come, first served by default.
    """

    def __init__(
        self, config: EngineConfig, runner: Runner, *, policy: SchedulingPolicy | None = None
    ) -> None:
        self.config = config
        self.block_manager = BlockManager(
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_blocks_per_seq=config.max_blocks_per_seq,
        )
        if policy is None:  # an empty policy is false
            policy = FirstComeFirstServed()
        self.scheduler = Scheduler(config, self.block_manager, policy)
        self._runner = runner
        self._requests: dict[str, Request] = {}
        self._in_flight: deque[tuple[StepPlan, int]] = deque()
        self._num_arrivals = 0
        self._num_steps = 0
        self._num_preemptions = 0
        self._num_prompt_tokens = 0
        self._num_generated_tokens = 0
        self._finished: Counter[str] = Counter()

    # ---- requests ------------------------------------------------------------------------------

    def add_request(self, core_request: CoreRequest) -> None:
        """Check a request and queue it. On an error nothing has changed.

        Raises:
            InvalidParameterError: the id is in use, `n` exceeds max_num_seqs, a stop or EOS token
                id is outside the vocabulary, or another field cannot be served.
            PromptError: the prompt is empty, too long, or has ids outside the vocabulary.
            CapacityError: prompt and output can never fit into the KV pool.
        """
        max_tokens = self._check(core_request)
        request = Request(core_request, arrival=self._num_arrivals, max_tokens=max_tokens)
        self._num_arrivals += 1
        self._num_prompt_tokens += request.num_prompt_tokens
        self._requests[core_request.request_id] = request
        self.scheduler.add(request.sequences[0])

    def abort(
        self, request_id: str, index: int | None = None, *, reason: FinishReason = "abort"
    ) -> bool:
        """End a request, or only its sample `index`; its blocks are given back.

        Returns False, and does nothing, if there is no such unfinished request or sample.
        """
        request = self._requests.get(request_id)
        if request is None:
            return False
        if index is not None and not request.has_forked:
            return self._cancel(request, index, reason)
        ending = [s for s in request.unfinished() if index is None or s.index == index]
        for sequence in ending:
            self._finish(sequence, reason)
        self._forget_if_finished(request)
        return bool(ending)

    def holds(self, request_id: str) -> bool:
        """True while the request is unfinished."""
        return request_id in self._requests

    @property
    def has_unfinished_requests(self) -> bool:
        """True while a step is worth making."""
        return bool(self._requests) or bool(self._in_flight)

    # ---- steps ---------------------------------------------------------------------------------

    def step(self) -> list[CoreOutput]:
        """Submit a step if there is room in flight, collect the oldest one, give its tokens.

        Raises:
            EngineError: the runner failed; the requests of that step are gone, all others go on.
        """
        while len(self._in_flight) < self.config.max_steps_in_flight:
            plan = self.scheduler.schedule()
            self._num_preemptions += len(plan.preempted)
            if not plan.scheduled:
                break
            with self._dropping_on_failure(plan):
                self._in_flight.append((plan, self._runner.submit(plan)))
        if not self._in_flight:
            assert not self._requests, "no request can be scheduled, though some are unfinished"
            return []
        plan, handle = self._in_flight.popleft()
        with self._dropping_on_failure(plan):
            output = self._runner.collect(handle)
        self._num_steps += 1
        self.scheduler.complete(plan)
        return self._apply(plan, output)

    def stats(self) -> EngineStats:
        """A snapshot; costs time in proportion to the blocks in use."""
        running, manager = self.scheduler.running, self.block_manager
        waiting = [
            s
            for request in self._requests.values()
            for s in request.sequences
            if s.status is SequenceStatus.PREEMPTED
        ]
        return EngineStats(
            num_running=len(running),
            num_waiting=self.scheduler.num_waiting - len(waiting),
            num_preempted=len(waiting),
            num_preemptions_total=self._num_preemptions,
            num_blocks=manager.num_blocks,
            num_used_blocks=manager.num_used_blocks,
            num_shared_blocks=manager.num_shared_blocks,
            kv_utilisation=manager.kv_utilisation(
                {s.order: s.num_computed_tokens for s in running}
            ),
            num_steps=self._num_steps,
            prompt_tokens_total=self._num_prompt_tokens,
            generation_tokens_total=self._num_generated_tokens,
            finished_total=dict(self._finished),
        )

    def audit(self) -> None:
        """Check the block manager, and that exactly the running sequences hold blocks."""
        self.block_manager.audit()
        unfinished = [s for r in self._requests.values() for s in r.unfinished()]
        running = [s for s in unfinished if s.status is SequenceStatus.RUNNING]
        orders = [s.order for s in self.scheduler.running]
        assert orders == sorted({s.order for s in running}), "running list is out of order"
        for sequence in unfinished:
            blocks = self.block_manager.blocks_of(sequence.order)
            held = self.block_manager.holds_blocks(sequence.order)
            assert held == (sequence.status is SequenceStatus.RUNNING), "who holds blocks is wrong"
            computed = self.block_manager.blocks_for(sequence.num_computed_tokens)
            assert len(blocks) >= computed, f"{sequence.order} has tokens without a block"
        assert self.scheduler.num_waiting == len(unfinished) - len(running), "a sequence is lost"
        rows_in_use = self.config.max_num_seqs - self.block_manager.num_free_rows
        assert rows_in_use == len(running), "a finished sequence holds a row"

    # ---- inside --------------------------------------------------------------------------------

    def _cancel(self, request: Request, index: int, reason: FinishReason) -> bool:
        """Remember to end a sample when it is forked; the last one ends the request now."""
        if index in request.cancelled or not 0 <= index < request.core.params.n:
            return False
        request.cancelled[index] = reason
        if len(request.cancelled) == request.core.params.n:
            self._finish(request.sequences[0], reason)
            self._forget_if_finished(request)
        return True

    def _check(self, core_request: CoreRequest) -> int:
        """Refuse what cannot be served; returns the most tokens that may be generated."""
        config, params = self.config, core_request.params
        if not isinstance(core_request.request_id, str):
            raise InvalidParameterError("request_id", core_request.request_id, "a string")
        if core_request.request_id in self._requests:
            raise InvalidParameterError(
                "request_id", core_request.request_id, "different from all unfinished requests"
            )
        if not isinstance(params, SamplingParams):
            raise InvalidParameterError("params", params, "a SamplingParams")
        prompt = _checked_prompt(core_request.prompt_token_ids, config.vocab_size)
        if len(prompt) >= config.max_model_len:
            raise PromptError(
                "prompt length in tokens",
                len(prompt),
                f"at most {config.max_model_len - 1} (max_model_len={config.max_model_len} less "
                "one token of output)",
            )
        for name, ids in (
            ("stop_token_ids", params.stop_token_ids or ()),
            ("eos_token_ids", core_request.eos_token_ids),
        ):
            for i, token in enumerate(ids):
                if not 0 <= token < config.vocab_size:
                    raise InvalidParameterError(
                        f"{name}[{i}]", token, f"in [0, {config.vocab_size})"
                    )
        seed = core_request.seed
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**64:
            raise InvalidParameterError("seed", seed, "an integer in [0, 2^64)")
        ending = {*(params.stop_token_ids or ())}
        if not params.ignore_eos:
            ending.update(core_request.eos_token_ids)
        if params.min_tokens and len(ending) >= config.vocab_size:
            raise InvalidParameterError(
                "min_tokens", params.min_tokens, "0 when every token ends the output"
            )
        if params.n > config.max_num_seqs:
            raise InvalidParameterError(
                "n", params.n, f"at most max_num_seqs={config.max_num_seqs}"
            )
        room = config.max_model_len - len(prompt)
        pool = config.num_blocks * config.block_size
        # The last token of a sequence is drawn but never computed: it needs no slot.
        fitting = pool - len(prompt) + 1
        if fitting < 1:
            raise CapacityError(
                "prompt length in tokens",
                len(prompt),
                f"at most {pool}: the KV pool has {config.num_blocks} blocks of "
                f"{config.block_size} tokens",
            )
        if params.max_tokens is None:
            return min(room, fitting)
        if min(params.max_tokens, room) > fitting:
            raise CapacityError(
                "max_tokens",
                params.max_tokens,
                f"at most {fitting} for a prompt of {len(prompt)} tokens: the KV pool has "
                f"{config.num_blocks} blocks of {config.block_size} tokens",
            )
        return min(params.max_tokens, room)

    @contextmanager
    def _dropping_on_failure(self, plan: StepPlan) -> Iterator[None]:
        """End the requests of a step whose runner fails, so that the others can go on."""
        try:
            yield
        except BaseException as error:
            self.scheduler.complete(plan)
            for request in dict.fromkeys(e.sequence.request for e in plan.scheduled):
                for sequence in request.unfinished():
                    self._finish(sequence, "error")
                self._forget_if_finished(request)
            if isinstance(error, Exception):
                raise EngineError(f"step {plan.step_id} failed: {error}") from error
            raise

    def _apply(self, plan: StepPlan, output: StepOutput) -> list[CoreOutput]:
        """Fork where a prompt is done, append the drawn tokens, stop what has to stop."""
        outputs: list[CoreOutput] = []
        drawn = iter(output.token_ids)
        for entry in plan.scheduled:
            tokens = [next(drawn) for _ in range(entry.num_samples)]
            parent = entry.sequence
            if parent.status is not SequenceStatus.RUNNING or not tokens:
                continue  # aborted while in flight, or a chunk in the middle of the tokens
            parent.num_pending_samples = 1
            siblings = [self.scheduler.fork(parent, i) for i in range(1, len(tokens))]
            for sequence, new_tokens in zip([parent, *siblings], tokens, strict=True):
                if sequence.index in parent.request.cancelled:
                    self._finish(sequence, parent.request.cancelled.pop(sequence.index))
                else:
                    outputs.append(self._append(sequence, new_tokens))
            self._forget_if_finished(parent.request)
        return outputs

    def _append(self, sequence: Sequence, tokens: list[int]) -> CoreOutput:
        """Append drawn tokens up to the first that ends the sequence."""
        accepted: list[int] = []
        for token in tokens:
            if token == FAILED_TOKEN:
                self._finish(sequence, "error")
                break
            accepted.append(token)
            sequence.token_ids.append(token)
            self._num_generated_tokens += 1
            self._stop_if_due(sequence, token)
            if sequence.status is SequenceStatus.FINISHED:
                break
        return CoreOutput(
            request_id=sequence.request.core.request_id,
            index=sequence.index,
            new_token_ids=accepted,
            num_preemptions=sequence.request.num_preemptions,
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
        )

    def _stop_if_due(self, sequence: Sequence, token: int) -> None:
        core, params = sequence.request.core, sequence.request.core.params
        if sequence.num_output_tokens >= params.min_tokens:
            if token in (params.stop_token_ids or ()):
                return self._finish(sequence, "stop", token)
            if token in core.eos_token_ids and not params.ignore_eos:
                return self._finish(sequence, "stop")
        if sequence.num_output_tokens >= sequence.request.max_tokens:
            self._finish(sequence, "length")

    def _finish(self, sequence: Sequence, reason: FinishReason, stop: int | None = None) -> None:
        self.scheduler.remove(sequence)
        sequence.finish(reason, stop)
        self._finished[reason] += 1

    def _forget_if_finished(self, request: Request) -> None:
        request_id = request.core.request_id
        if request.finished and self._requests.get(request_id) is request:  # ids are used again
            del self._requests[request_id]


def _checked_prompt(token_ids: Iterable[int], vocab_size: int) -> NDArray[np.int64]:
    """The prompt as an array; PromptError unless it is integers inside the vocabulary."""
    try:
        prompt = np.array(token_ids)
    except ValueError:  # lists of unequal lengths
        prompt = np.array(None)
    if prompt.ndim == 1 and not len(prompt):
        raise PromptError("prompt", [], "at least one token")
    if prompt.ndim != 1 or prompt.dtype.kind != "i":
        raise PromptError("prompt_token_ids", token_ids, f"integers in [0, {vocab_size})")
    outside = np.flatnonzero((prompt < 0) | (prompt >= vocab_size))
    if outside.size:
        position = int(outside[0])
        raise PromptError(
            f"prompt_token_ids[{position}]", int(prompt[position]), f"in [0, {vocab_size})"
        )
    return prompt
