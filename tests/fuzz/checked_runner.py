"""A runner that looks at every plan before it is computed, and fails when it is told to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cupaged.config import EngineConfig
from cupaged.engine.batch import ScheduledSequence, StepPlan
from cupaged.engine.block_manager import UNUSED
from cupaged.engine.core import EngineCore
from cupaged.engine.kv_memory import HoldsKV
from cupaged.engine.runner import Runner, StepOutput
from cupaged.request import Sequence, SequenceStatus
from tests.fuzz.cache_model import CacheModel

_MOST_FAILURES = 100


class PlantedError(RuntimeError):
    """A failure that a trace asked for."""


class StuckError(BaseException):
    """Steps fail again and again: the core must not take this for one more failure."""


class CheckedRunner:
    """Hands plans on to another runner, at once or, `deferred`, as late as a device may.

    `core` and `cache` must be set before the first step. `failed_plan` is the last plan that
    failed, and `violation` what was wrong with a plan, which the core may have taken for a failure.
    `had_suspects`: a step of several requests has failed.
    """

    core: EngineCore
    cache: CacheModel

    def __init__(self, inner: Runner, config: EngineConfig, *, deferred: bool) -> None:
        self._inner = inner
        if isinstance(inner, HoldsKV):
            self.kv_memory = inner.kv_memory
        self._config = config
        self._deferred = deferred
        self._in_flight: dict[int, StepPlan] = {}
        self._tables: dict[int, list[list[int]]] = {}  # as they were when the step was submitted
        self._computed: dict[Sequence, int] = {}  # tokens of it that were given to a step
        self._fail_at_submit = False
        self._fail_at_collect = False
        self._poison: dict[str, bool] = {}  # requests whose steps fail, and whether at once
        self.failed_plan: StepPlan | None = None
        self.violation: Exception | None = None
        self.had_suspects = False
        self.num_collected = 0
        self._num_failures = 0  # since a step was collected

    def poison(self, request_id: str, *, at_submit: bool) -> None:
        """Fail for every step with a request of that name."""
        self._poison[request_id] = at_submit

    def fail_next(self, *, at_submit: bool) -> None:
        """Fail once, at the next `submit` or `collect`."""
        self._fail_at_submit |= at_submit
        self._fail_at_collect |= not at_submit

    def forked(self, parent: Sequence, child: Sequence) -> None:
        """A sequence has from now on what another one has computed."""
        self._computed[child] = self._computed[parent]

    def blocks_in_flight(self) -> set[int]:
        """Blocks that a step in flight reads or writes."""
        in_flight = self._in_flight.values()
        copied = {block for p in in_flight for pair in p.copies for block in pair}
        copied |= {b for p in in_flight for b, _ in p.swap_out}
        copied |= {b for p in in_flight for _, b in p.swap_in}
        rows = (row for table in self._tables.values() for row in table)
        return copied.union(*rows) - {UNUSED}

    def submit(self, plan: StepPlan) -> int:
        """Check the plan and compute it now or later."""
        with self._noting_violations():
            self._check(plan)
        if self._fail_at_submit or self._is_poisoned(plan, at_submit=True):
            self._fail_at_submit = False
            raise self._failure(plan)
        self._in_flight[plan.step_id] = plan
        self._tables[plan.step_id] = plan.block_tables[0].tolist()
        if not self._deferred:
            self._compute(plan)
        return plan.step_id

    def collect(self, handle: int) -> StepOutput:
        """The tokens of the oldest step."""
        assert handle == min(self._in_flight), "steps are collected out of order"
        plan = self._in_flight.pop(handle)
        assert plan.block_tables[0].tolist() == self._tables.pop(handle), (
            "a table changed in flight"
        )
        fails = self._fail_at_collect or self._is_poisoned(plan, at_submit=False)
        if self._deferred and not fails:
            self._compute(plan)
        output = None if self._deferred and fails else self._inner.collect(handle)
        if fails or output is None:
            self._fail_at_collect = False
            raise self._failure(plan)
        self.num_collected += 1
        self._num_failures = 0
        self.cache.computed(plan)
        return output

    def _compute(self, plan: StepPlan) -> None:
        with self._noting_violations():
            self._inner.submit(plan)

    @contextmanager
    def _noting_violations(self) -> Iterator[None]:
        """The core takes what is raised for a failed step; the test must still hear of it."""
        try:
            yield
        except Exception as error:
            self.violation = self.violation or error
            raise

    def _is_poisoned(self, plan: StepPlan, *, at_submit: bool) -> bool:
        names = (e.sequence.request.core.request_id for e in plan.scheduled)
        return any(self._poison.get(name) is at_submit for name in names)

    def _failure(self, plan: StepPlan) -> PlantedError:
        """Whoever goes on after a failed step begins again."""
        self.failed_plan = plan
        self._num_failures += 1
        if self._num_failures > _MOST_FAILURES:
            raise StuckError(f"{_MOST_FAILURES} steps failed, one after another")
        self.had_suspects |= len({e.sequence.request for e in plan.scheduled}) > 1
        self.cache.failed(plan)
        self._computed.update((e.sequence, 0) for e in plan.scheduled)
        self._computed.update((s, 0) for s in (*plan.swapped_out, *plan.swapped_in))
        return PlantedError(f"step {plan.step_id}")

    def _check(self, plan: StepPlan) -> None:
        config, running = self._config, self.core.scheduler.running
        assert len(self._in_flight) < config.max_steps_in_flight, "too many steps in flight"
        assert plan.scheduled, "an empty step"
        assert plan.num_tokens <= config.max_num_batched_tokens, "over the token budget"
        assert sum(s.num_pending_samples for s in running) <= config.max_num_seqs, "too many run"
        assert {*running} >= {e.sequence for e in plan.scheduled}, "what is planned does not run"
        assert not {*plan.preempted} & {e.sequence for e in plan.scheduled}, "planned and preempted"
        self.cache.planned(plan)
        self._check_swaps(plan)
        for sequence in plan.preempted:
            if sequence not in plan.swapped_out:
                self._computed[sequence] = 0
        for entry in plan.scheduled:
            if entry.sequence in plan.admitted:  # what it found was checked
                self._computed[entry.sequence] = entry.start
        written: list[int] = []
        for entry, row in zip(plan.scheduled, plan.block_tables[0].tolist(), strict=True):
            self._check_entry(entry)
            blocks = self.core.block_manager.blocks_of(entry.sequence.order)
            needed = -(-entry.sequence.num_tokens // config.block_size)
            assert len(blocks) >= needed, "a sequence runs before all of it fits"
            used = -(-(entry.start + entry.num_tokens) // config.block_size)
            assert row[:used] == blocks[:used], "the plan's block table is not the sequence's"
            written += blocks[entry.start // config.block_size : used]
        self._check_blocks(plan, written)

    def _check_entry(self, entry: ScheduledSequence) -> None:
        sequence, end = entry.sequence, entry.start + entry.num_tokens
        assert sequence.status is SequenceStatus.RUNNING
        assert entry.num_tokens >= 1, "a query without tokens"
        limit = self._config.long_prefill_token_threshold
        assert not limit or entry.num_tokens <= limit, "a chunk is longer than allowed"
        assert end <= sequence.num_tokens, "tokens that are not there yet"
        assert entry.start == self._computed.get(sequence, 0), "tokens are left out or repeated"
        samples = sequence.num_pending_samples if end == sequence.num_tokens else 0
        assert entry.num_samples == samples, "the wrong number of samples"
        for other in self._in_flight.values():
            assert all(e.sequence is not sequence for e in other.scheduled), "in flight twice"
        self._computed[sequence] = end

    def _check_swaps(self, plan: StepPlan) -> None:
        """Groups move whole, shared blocks once; no block of the host is used by two steps."""
        pool, manager = self.core.swapping.host_pool, self.core.block_manager
        assert not (plan.swapped_out and plan.swapped_in), "groups go out and come in"
        assert {*plan.swapped_out} <= {*plan.preempted}, "swapped out and not preempted"
        for blocks in (
            [host for _, host in plan.swap_out],
            [block for _, block in plan.swap_in],
        ):
            assert len(blocks) == len(set(blocks)), "a block is swapped twice"
        for request in {s.request for s in plan.swapped_out}:  # two may share a cached prefix
            group = [s for s in plan.swapped_out if s.request is request]
            kept = {block for s in group for block in pool.blocks_of(s.order)}
            sources = [block for block, host in plan.swap_out if host in kept]
            assert len(sources) == len(set(sources)), "what a group shares goes out twice"
        for sequence in plan.swapped_out:
            assert sequence.status is SequenceStatus.SWAPPED
            assert not any(
                s.status is SequenceStatus.RUNNING for s in sequence.request.sequences
            ), "a part of a group was swapped out"
        saved = {b for s in plan.swapped_out for b in pool.blocks_of(s.order)}
        assert saved <= {host for _, host in plan.swap_out}, "not all of a group is saved"
        for sequence in plan.swapped_in:
            assert sequence.status is SequenceStatus.RUNNING and sequence.in_flight
            assert not any(
                s.status is SequenceStatus.SWAPPED for s in sequence.request.sequences
            ), "a part of a group came back"
        written, read = {host for _, host in plan.swap_out}, {host for host, _ in plan.swap_in}
        assert written.isdisjoint(read), "a block of the host goes out and comes in"
        filled = {block for _, block in plan.swap_in}
        assert not filled & {block for _, block in plan.copies}, "a block is filled twice"
        if filled:
            rows = [manager.blocks_of(s.order) for s in (*plan.swapped_in, *plan.admitted)]
            assert filled <= {block for row in rows for block in row}, "filled for nobody"
        for other in self._in_flight.values():
            theirs = {h for _, h in other.swap_out}
            assert read.isdisjoint(theirs), "a block of the host is read before it is written"
            theirs |= {h for h, _ in other.swap_in}
            assert written.isdisjoint(theirs), "two steps in flight use a block of the host"
            assert not {*plan.swapped_in} & {*other.swapped_out}, "it has not left yet"

    def _check_blocks(self, plan: StepPlan, written: list[int]) -> None:
        sources = [source for source, _ in plan.copies]
        private = [destination for _, destination in plan.copies]
        assert len(written) == len(set(written)), "two sequences write one block"
        assert (self.core.block_manager.ref_counts[written] == 1).all(), "a shared block is written"
        assert len(private) == len(set(private)), "two copies go to one block"
        assert not set(private) & set(sources), "a destination is also a source"
        assert set(private) <= set(written), "a copy that nobody writes"
