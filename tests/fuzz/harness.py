"""Runs traces on `EngineCore` and `HashRunner` and compares every token with the oracle.

`python -m tests.fuzz.harness SEED [COUNT]` replays the traces of COUNT seeds from SEED on and
prints the first that fails, shrunk. Invariants are checked after every operation and on every plan.
"""

from __future__ import annotations

import argparse
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from random import Random

from cupaged.config import EngineConfig
from cupaged.engine.core import EngineCore
from cupaged.engine.hash_runner import HashRunner
from cupaged.engine.scheduling_policy import PriorityWithBoundedWait
from cupaged.errors import BadValueError, EngineError
from cupaged.outputs import CoreOutput
from cupaged.request import CoreRequest
from tests.fuzz.checked_runner import CheckedRunner
from tests.fuzz.oracle import Answer, answer, most_tokens, refusal
from tests.fuzz.traces import Abort, Add, Fail, Operation, Poison, Steps, Trace, make_trace, shrink

MOST_STEPS = 20_000  # far more than any trace needs


@dataclass(slots=True)
class Expected:
    """A request that is unfinished: what its samples must give and what they have given."""

    request: CoreRequest
    answers: list[Answer]
    tokens: list[list[int]] = field(default_factory=list)
    ended: set[int] = field(default_factory=set)


class TraceRun:
    """One engine, and a model of what it must do."""

    def __init__(self, trace: Trace) -> None:
        config = trace.config
        hashes = HashRunner(
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            vocab_size=config.vocab_size,
        )
        self.config = config
        self.runner = CheckedRunner(hashes, config, deferred=trace.deferred)
        self.core = EngineCore(
            config, self.runner, policy=PriorityWithBoundedWait(2) if trace.by_priority else None
        )
        self.runner.core = self.core
        self.first_come = not trace.by_priority
        self.unfinished: dict[str, Expected] = {}
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0

    def run(self, operations: Iterable[Operation]) -> None:
        """Do everything, let it drain, and look at what is left."""
        for operation in operations:
            match operation:
                case Add(request):
                    self.add(request)
                case Abort(request_id, index):
                    self.abort(request_id, index)
                case Steps(count):
                    for _ in range(count):
                        self.step()
                case Fail(at_submit):
                    self.runner.fail_next(at_submit=at_submit)
                case Poison(request_id, at_submit):
                    self.runner.poison(request_id, at_submit=at_submit)
            self.check()
        while self.core.has_unfinished_requests:
            self.step()
            assert self.runner.num_collected < MOST_STEPS, "the engine does not drain"
        self.check_idle()

    def add(self, request: CoreRequest) -> None:
        """Submit; it is refused exactly when the oracle says so."""
        error = refusal(request, self.config, request.request_id in self.unfinished)
        if error is not None:
            try:
                self.core.add_request(request)
            except BadValueError as refused:
                assert type(refused) is error, f"{refused!r} instead of {error}"
                return
            raise AssertionError(f"{request} was not refused with {error}")
        request = replace(request)  # a trace may submit one twice; this is that submission
        self.core.add_request(request)
        n = request.params.n
        answers = [answer(request, i, self.config) for i in range(n)]
        self.unfinished[request.request_id] = Expected(request, answers, [[] for _ in range(n)])
        self.num_prompt_tokens += len(request.prompt_token_ids)

    def abort(self, request_id: str, index: int | None) -> None:
        """Abort twice: the second time nothing is left to abort."""
        expected = self.unfinished.get(request_id)
        ending: set[int] = set()
        if expected is not None:
            left = set(range(expected.request.params.n)) - expected.ended
            ending = left if index is None else left & {index}
            expected.ended |= ending
            self._forget_if_ended(expected)
        assert self.core.abort(request_id, index) == bool(ending), "abort is wrong about its effect"
        assert not self.core.abort(request_id, index), "something was aborted twice"

    def step(self) -> None:
        """One step: it moves something on, or a failure ends the one request that it held."""
        busy, num_collected = self.core.has_unfinished_requests, self.runner.num_collected
        failed = False
        try:
            outputs = self.core.step()
        except EngineError:
            if self.runner.failed_plan is None or self.runner.violation is not None:
                raise
            failed = True
            self._drop_failed()
        else:
            for output in outputs:
                self._take(output)
        if self.runner.violation is not None:
            raise self.runner.violation
        moved = failed or self.runner.had_suspects or self.runner.num_collected > num_collected
        assert moved or not busy, "a step moved nothing on"
        self.check()

    def _take(self, output: CoreOutput) -> None:
        assert output.request_id in self.unfinished, f"{output} came after the end"
        expected = self.unfinished[output.request_id]
        assert output.index not in expected.ended, f"{output} came after the end"
        tokens, whole = expected.tokens[output.index], expected.answers[output.index]
        tokens += output.new_token_ids
        self.num_generated_tokens += len(output.new_token_ids)
        assert output.new_token_ids, f"{output} has no token"
        assert tokens == whole.token_ids[: len(tokens)], (
            f"{expected.request} sample {output.index} gave {tokens} instead of {whole.token_ids}"
        )
        assert (output.finish_reason is not None) == (len(tokens) == len(whole.token_ids)), (
            f"{output} ends at the wrong place: {whole}"
        )
        if output.finish_reason is not None:
            ending = (output.finish_reason, output.stop_reason)
            assert ending == (whole.finish_reason, whole.stop_reason), f"{output} but {whole}"
            expected.ended.add(output.index)
            self._forget_if_ended(expected)

    def _forget_if_ended(self, expected: Expected) -> None:
        if len(expected.ended) == expected.request.params.n:
            del self.unfinished[expected.request.request_id]

    def _drop_failed(self) -> None:
        plan, self.runner.failed_plan = self.runner.failed_plan, None
        assert plan is not None
        assert len({entry.sequence.request for entry in plan.scheduled}) == 1, "one for another"
        for entry in plan.scheduled:
            request = entry.sequence.request.core
            expected = self.unfinished.get(request.request_id)
            if expected is not None and expected.request is request:
                del self.unfinished[request.request_id]

    def check(self) -> None:
        """What holds between any two calls."""
        core, manager = self.core, self.core.block_manager
        core.audit()
        stats = core.stats()
        assert 0 <= stats.num_shared_blocks <= stats.num_used_blocks <= stats.num_blocks
        assert 0.0 <= stats.kv_utilisation <= 1.0
        assert stats.prompt_tokens_total == self.num_prompt_tokens
        assert stats.generation_tokens_total == self.num_generated_tokens
        assert stats.num_steps == self.runner.num_collected, "a step was not counted"
        for request_id in self.unfinished:
            assert core.holds(request_id), f"{request_id} was lost"
        assert bool(self.unfinished) <= core.has_unfinished_requests
        assert self.runner.blocks_in_flight().isdisjoint(manager._free), "free, though in flight"
        running = core.scheduler.running
        for sequence in running:
            most = -(-sequence.num_tokens // self.config.block_size)
            assert len(manager.blocks_of(sequence.order)) <= most, "a block is held for nothing"
        head = core.scheduler.policy.peek()
        if self.first_come and running and head is not None and not self.runner.had_suspects:
            assert running[-1].order < head.order, "a later arrival runs before an earlier one"

    def check_idle(self) -> None:
        """Everything was given back."""
        manager = self.core.block_manager
        self.check()
        assert not self.unfinished, f"{sorted(self.unfinished)} never ended"
        assert self.core.step() == []
        assert manager.num_free_blocks == manager.num_blocks, "blocks are lost"
        assert manager.num_quarantined_blocks == 0, "blocks stay in quarantine"
        assert manager.num_free_rows == self.config.max_num_seqs, "rows are lost"
        assert self.core.stats().kv_utilisation == 1.0


def run_alone(request: CoreRequest, config: EngineConfig) -> list[list[int]]:
    """The tokens of a request in an engine of its own with room for everything."""
    most = most_tokens(request, config)
    params = replace(
        request.params, max_tokens=most, min_tokens=min(most, request.params.min_tokens)
    )
    roomy = replace(
        config, num_blocks=500, max_num_batched_tokens=512, max_num_seqs=8, max_steps_in_flight=1
    )
    hashes = HashRunner(num_blocks=500, block_size=config.block_size, vocab_size=config.vocab_size)
    core = EngineCore(roomy, hashes)
    core.add_request(replace(request, params=params))
    tokens: list[list[int]] = [[] for _ in range(request.params.n)]
    while core.has_unfinished_requests:
        for output in core.step():
            tokens[output.index] += output.new_token_ids
    return tokens


def failure_of(trace: Trace) -> str | None:
    """What goes wrong in a trace, None if nothing does."""
    try:
        TraceRun(trace).run(trace.operations)
    except Exception:
        return traceback.format_exc()
    return None


def first_failure(seeds: Iterable[int]) -> int | None:
    """The first seed whose trace fails."""
    return next((s for s in seeds if failure_of(make_trace(Random(s))) is not None), None)


def report(seed: int) -> str:
    """How the trace of a seed fails, the least that makes it fail, and how to see it again."""
    trace = make_trace(Random(seed))
    small = shrink(trace, lambda t: failure_of(t) is not None)
    operations = "\n  ".join(map(repr, small.operations))
    return (
        f"{failure_of(small)}\nreplay: python -m tests.fuzz.harness {seed}\n{small.config}\n"
        f"deferred={small.deferred} by_priority={small.by_priority}\n  {operations}"
    )


def main() -> None:
    """Exit status 1 if a trace fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.harness")
    parser.add_argument("seed", type=int)
    parser.add_argument("count", type=int, nargs="?", default=1)
    arguments = parser.parse_args()
    failing = first_failure(range(arguments.seed, arguments.seed + arguments.count))
    if failing is not None:
        raise SystemExit(report(failing))


if __name__ == "__main__":
    main()
