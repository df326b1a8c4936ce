"""Runs traces on `EngineCore` and `HashRunner` and compares every token with the oracle.

`python -m tests.fuzz.harness SEED [COUNT]` replays the traces of COUNT seeds from SEED on and
prints the first that fails, shrunk. Invariants are checked after every operation and on every plan.
"""

from __future__ import annotations

import argparse
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from random import Random

from cupaged.config import EngineConfig
from cupaged.engine.core import EngineCore
from cupaged.engine.hash_runner import HashRunner
from cupaged.engine.preemption import Cheaper
from cupaged.engine.prefix_cache import PrefixStrategy
from cupaged.engine.radix_cache import RadixCache
from cupaged.engine.runner import Runner
from cupaged.engine.scheduling_policy import (
    FirstComeFirstServed,
    LongestPrefixFirst,
    PriorityWithBoundedWait,
    SchedulingPolicy,
)
from cupaged.errors import BadValueError, EngineError, KVSanitizerError
from cupaged.outputs import CoreOutput
from cupaged.request import CoreRequest, Sequence
from tests.fuzz.beam_oracle import Contexts
from tests.fuzz.cache_model import CacheModel
from tests.fuzz.checked_runner import CheckedRunner, StuckError
from tests.fuzz.oracle import Answer, answers, most_tokens, refusal
from tests.fuzz.traces import (
    Abort,
    Add,
    Fail,
    Operation,
    Poison,
    Reset,
    Steps,
    Trace,
    make_trace,
    shrink,
)

MOST_STEPS = 3_000  # a trace needs some hundreds, at most


@dataclass(slots=True)
class Expected:
    """A request that is unfinished: what its samples must give and what they have given."""

    request: CoreRequest
    answers: list[Answer]
    tokens: list[list[int]] = field(default_factory=list)
    ended: set[int] = field(default_factory=set)


def make_eager_policy(name: str) -> SchedulingPolicy:
    """The policy of that name; one that bounds waiting promotes soon."""
    if name == "fcfs":
        return FirstComeFirstServed()
    return {"priority": PriorityWithBoundedWait, "longest-prefix": LongestPrefixFirst}[name](2)


def _make_greedy_cache(config: EngineConfig) -> PrefixStrategy | None:
    """A radix tree that evicts several blocks at once, as that of a large pool does."""
    if config.prefix_cache == "radix" and config.enable_prefix_caching and config.num_blocks % 2:
        return RadixCache(config.block_size, 1 + config.num_blocks % 3)
    return None


class TraceRun:
    """One engine, and a model of what it must do."""

    def __init__(self, trace: Trace) -> None:
        config = trace.config
        self.config = config
        self.runner = CheckedRunner(self.make_runner(), config, deferred=trace.deferred)
        self.core = EngineCore(
            config,
            self.runner,
            policy=make_eager_policy(trace.policy),
            prefix_cache=_make_greedy_cache(config),
            preemption=Cheaper(trace.swap_costs) if trace.swap_costs is not None else None,
        )
        self.cache = CacheModel(self.core, config)
        self.runner.core, self.runner.cache = self.core, self.cache
        self._fork = self.core.scheduler.fork
        self.core.scheduler.fork = self._note_fork  # type: ignore[method-assign]
        self.first_come = trace.policy == "fcfs"
        self.unfinished: dict[str, Expected] = {}
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0

    def make_runner(self) -> Runner:
        """What computes the steps."""
        return _hash_runner(self.config)

    def answers_to(self, request: CoreRequest) -> list[Answer]:
        """What each sample of a request must give."""
        return answers(request, self.config)

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
                    continue  # each was checked
                case Fail(at_submit):
                    self.runner.fail_next(at_submit=at_submit)
                case Reset():
                    self.reset()
                case Poison(request_id, at_submit):
                    self.runner.poison(request_id, at_submit=at_submit)
            self.check()
        while self.core.has_unfinished_requests:
            self.step()
            assert self.runner.num_collected < MOST_STEPS, "the engine does not drain"
        self.check_idle()

    def _note_fork(self, parent: Sequence, index: int) -> Sequence:
        child = self._fork(parent, index)
        self.cache.forked(parent, child)
        self.runner.forked(parent, child)
        return child

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
        expected = self.answers_to(request)
        self.unfinished[request.request_id] = Expected(request, expected, [[] for _ in expected])
        self.num_prompt_tokens += len(request.prompt_token_ids)

    def abort(self, request_id: str, index: int | None) -> None:
        """Abort twice: the second time nothing is left to abort."""
        expected = self.unfinished.get(request_id)
        ending: set[int] = set()
        if expected is not None:
            left = set(range(expected.request.params.n)) - expected.ended
            ending = left if index is None else left & {index}
            if expected.request.beams is not None:
                ending = left if index is None else set()
                self._check_unfinished_beams(expected.request)
            expected.ended |= ending
            self._forget_if_ended(expected)
        assert self.core.abort(request_id, index) == bool(ending), "abort is wrong about its effect"
        assert not self.core.abort(request_id, index), "something was aborted twice"

    def _check_unfinished_beams(self, request: CoreRequest) -> None:
        """What an abort would give: different outputs, best first, each of tokens that follow."""
        assert request.beams is not None
        contexts = Contexts(request.prompt_token_ids, self.config.vocab_size)
        outputs = self.core.best_so_far(request.request_id)
        scores = []
        for output in outputs:
            assert output.logprobs is not None
            tokens = output.new_token_ids
            told = [position.logprobs[0] for position in output.logprobs]
            true = [contexts.logprobs((*tokens[:i],))[token] for i, token in enumerate(tokens)]
            assert told == true, f"{output} but {true}"
            scores.append(sum(true) / len(tokens) ** request.beams.length_penalty)
        assert len({(*output.new_token_ids,) for output in outputs}) == len(outputs)
        assert scores == sorted(scores, reverse=True)

    def reset(self) -> None:
        """Forget all prefixes."""
        self.core.reset_prefix_cache()
        self.cache.reset()

    def step(self) -> None:
        """One step: it moves something on, or a failure ends the one request that it held."""
        busy, num_collected = self.core.has_unfinished_requests, self.runner.num_collected
        failed = False
        try:
            outputs = self.core.step()
        except KVSanitizerError:
            raise
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
        found = {r.core: n for r, n in self.cache.first_found.items() if r.core is expected.request}
        assert [output.num_cached_tokens] == [*found.values()], f"{output} but {found}"
        assert tokens == whole.token_ids[: len(tokens)], (
            f"{expected.request} sample {output.index} gave {tokens} instead of {whole.token_ids}"
        )
        assert (output.finish_reason is not None) == (len(tokens) == len(whole.token_ids)), (
            f"{output} ends at the wrong place: {whole}"
        )
        if whole.cumulative_logprob is not None:
            assert output.logprobs is not None
            total = sum(position.logprobs[0] for position in output.logprobs)
            assert total == whole.cumulative_logprob, f"{output} but {whole}"
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
        assert 0 <= stats.num_used_host_blocks <= stats.num_host_blocks
        assert (stats.num_swapped > 0) == (stats.num_used_host_blocks > 0)
        assert stats.num_swapped <= stats.num_preempted
        assert stats.prefix_cache_queries_total == self.cache.num_queried
        assert stats.prefix_cache_hits_total == self.cache.num_found
        self.cache.look()
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
        if self.first_come and running and not self.runner.had_suspects:
            head = core.scheduler.policy.peek()
            # While a beam waited for its siblings, others could come.
            is_older = head is None or head.request.core.beams or running[-1].order < head.order
            assert is_older, "a later arrival runs before an earlier one"

    def check_idle(self) -> None:
        """Everything was given back."""
        manager = self.core.block_manager
        self.check()
        assert not self.unfinished, f"{sorted(self.unfinished)} never ended"
        assert self.core.step() == []
        assert manager.num_free_blocks == manager.num_blocks, "blocks are lost"
        assert manager.num_quarantined_blocks == 0, "blocks stay in quarantine"
        assert manager.num_free_rows == self.config.max_num_seqs, "rows are lost"
        host_pool = self.core.swapping.host_pool
        assert host_pool.num_free_blocks == host_pool.num_blocks, "host blocks are lost"
        assert self.core.stats().kv_utilisation == 1.0


def run_alone(request: CoreRequest, config: EngineConfig) -> list[list[int]]:
    """The tokens of a request in an engine of its own with room for everything."""
    most = most_tokens(request, config)
    params = replace(
        request.params, max_tokens=most, min_tokens=min(most, request.params.min_tokens)
    )
    if request.beams is not None:
        beams = replace(request.beams, max_tokens=most)
        params = beams.sampling_params(request.eos_token_ids)
        request = replace(request, beams=beams)
    roomy = replace(
        config, num_blocks=500, max_num_batched_tokens=512, max_num_seqs=8, max_steps_in_flight=1
    )
    core = EngineCore(roomy, _hash_runner(roomy))
    core.add_request(replace(request, params=params))
    tokens: list[list[int]] = [[] for _ in range(request.params.n)]
    while core.has_unfinished_requests:
        for output in core.step():
            tokens[output.index] += output.new_token_ids
    return tokens


def _hash_runner(config: EngineConfig) -> HashRunner:
    return HashRunner(
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        vocab_size=config.vocab_size,
        num_host_blocks=config.num_host_blocks,
    )


def failure_of(trace: Trace, run: Callable[[Trace], TraceRun] = TraceRun) -> str | None:
    """What goes wrong in a trace, None if nothing does."""
    try:
        run(trace).run(trace.operations)
    except (Exception, StuckError):
        return traceback.format_exc()
    return None


def first_failure(seeds: Iterable[int], make: Callable[[Random], Trace] = make_trace) -> int | None:
    """The first seed whose trace fails."""
    return next((s for s in seeds if failure_of(make(Random(s))) is not None), None)


def report(
    trace: Trace,
    replay: str,
    run: Callable[[Trace], TraceRun] = TraceRun,
    max_runs: int = 300,
) -> str:
    """How a trace fails, the least of it that fails, and the command to see it again."""
    small = shrink(trace, lambda t: failure_of(t, run) is not None, max_runs)
    operations = "\n  ".join(map(repr, small.operations))
    return (
        f"{failure_of(small, run)}\nreplay: {replay}\n{small.config}\n"
        f"deferred={small.deferred} policy={small.policy} "
        f"swap_costs={small.swap_costs}\n  {operations}"
    )


def report_of(seed: int) -> str:
    """The report of a seed."""
    return report(make_trace(Random(seed)), f"python -m tests.fuzz.harness {seed}")


def main() -> None:
    """Exit status 1 if a trace fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.harness")
    parser.add_argument("seed", type=int)
    parser.add_argument("count", type=int, nargs="?", default=1)
    arguments = parser.parse_args()
    failing = first_failure(range(arguments.seed, arguments.seed + arguments.count))
    if failing is not None:
        raise SystemExit(report_of(failing))


if __name__ == "__main__":
    main()
