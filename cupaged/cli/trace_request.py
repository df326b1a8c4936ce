"""The life of one request in a trace: arrival, admissions, steps, preemptions, the end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cupaged.engine.step_events import OK, AbortEvent, AddEvent, PlanEvents, StepEvents, Taken
from cupaged.engine.trace_file import TraceReader
from cupaged.errors import TraceError


@dataclass(slots=True)
class _Run:
    """Steps of one sequence in a row that computed one token each and drew one."""

    name: str
    first_step: int
    last_step: int
    ended_us: int
    first_token: int
    num_tokens: int

    def line(self) -> str:
        one = self.first_step == self.last_step
        steps = f"step {self.first_step}" if one else f"steps {self.first_step}-{self.last_step}"
        what = f"{self.num_tokens} token{'s' * (self.num_tokens > 1)} drawn one by one"
        return _line(self.ended_us, f"{steps}: {what}, from position {self.first_token}", self.name)


def lines(trace: TraceReader, request_id: str) -> Iterator[str]:
    """What happened to the request of that name; to each of them if the name was used again.

    Raises:
        TraceError: there is no such request.
    """
    life, num_arrivals = _Life(request_id), 0
    for event in trace:
        if isinstance(event, AddEvent):
            num_arrivals += 1
            if event.request.request_id == request_id:
                life.arrivals.add(num_arrivals - 1)
                request = event.request
                width = "n" if request.beams is None else "beam_width"
                text = (
                    f"arrives: {len(request.prompt_token_ids)} prompt tokens, "
                    f"{width}={request.params.n}, max_tokens={request.params.max_tokens}, "
                    f"priority={request.priority}"
                )
                yield _line(event.time_us, text)
        elif isinstance(event, AbortEvent) and event.request_id == request_id:
            yield from life.flush()
            sample = "" if event.index is None else f" of sample {event.index}"
            yield _line(event.time_us, f"ended from outside{sample}: {event.reason}")
        elif isinstance(event, StepEvents):
            yield from life.step(event)
    yield from life.flush()
    if not life.arrivals:
        raise TraceError(f"{trace.path}: has no request {request_id!r}")


def _line(time_us: int, text: str, name: str = "") -> str:
    return f"{time_us / 1e6:>10.3f} s  {name + ': ' if name else ''}{text}"


class _Life:
    """Gathers what belongs to a request; plain steps of a sequence become one line."""

    def __init__(self, request_id: str) -> None:
        self.arrivals: set[int] = set()
        self._request_id = request_id
        self._owners: dict[int, Taken] = {}  # the sequence in each row
        self._runs: dict[tuple[int, int], _Run] = {}

    def step(self, event: StepEvents) -> Iterator[str]:
        for plan in event.plans:
            yield from self._plan(plan, event)
        collected = event.collected
        if collected is not None and collected.outcome != OK and self._runs:
            yield from self.flush()
            yield _line(event.time_us, f"step {collected.step_id} {collected.outcome}")
        for taken in event.forked:
            self._owners[taken.row] = taken
            if taken.arrival in self.arrivals:
                yield from self.flush((taken.arrival, taken.sample))
                text = "forked: it shares all blocks of a sibling"
                yield _line(event.time_us + event.total_us, text, self._name(taken.sample))
        for ended in event.finished:
            if ended.arrival in self.arrivals:
                yield from self.flush((ended.arrival, ended.sample))
                name = self._name(ended.sample)
                yield _line(event.time_us + event.total_us, f"ends: {ended.reason}", name)

    def flush(self, key: tuple[int, int] | None = None) -> Iterator[str]:
        keys = list(self._runs) if key is None else [key]
        for each in keys:
            run = self._runs.pop(each, None)
            if run is not None:
                yield run.line()

    def _plan(self, plan: PlanEvents, step: StepEvents) -> Iterator[str]:
        time_us, end_us = step.time_us, step.time_us + step.total_us
        for arrival, sample in plan.preempted:
            if arrival in self.arrivals:
                yield from self.flush((arrival, sample))
                text = f"preempted while step {plan.step_id} was planned"
                yield _line(time_us, text, self._name(sample))
        self._owners.update({taken.row: taken for taken in plan.admitted})
        for taken in plan.swapped_in:
            self._owners[taken.row] = taken
            if taken.arrival in self.arrivals:
                text = f"comes back from the host while step {plan.step_id} is planned"
                yield _line(time_us, text, self._name(taken.sample))
        admitted = {(taken.arrival, taken.sample) for taken in plan.admitted}
        columns = (plan.rows, plan.start, plan.num_new, plan.num_samples)
        for row, start, num_new, num_samples in zip(*(c.tolist() for c in columns), strict=True):
            owner = self._owners.get(row)
            if owner is None or owner.arrival not in self.arrivals:
                continue
            key, name = (owner.arrival, owner.sample), self._name(owner.sample)
            if key not in admitted and (num_new, num_samples) == (1, 1) and plan.outcome == OK:
                run = self._runs.get(key)
                if run is None:
                    run = _Run(name, plan.step_id, plan.step_id, end_us, start, 0)
                    self._runs[key] = run
                run.last_step, run.ended_us = plan.step_id, end_us
                run.num_tokens += 1
                continue
            yield from self.flush(key)
            begins = f"admitted with {start} tokens cached, " if key in admitted else ""
            draws = f", draws {num_samples}" if num_samples else ""
            failed = "" if plan.outcome == OK else f" ({plan.outcome})"
            text = f"step {plan.step_id}: {begins}computes {start}..{start + num_new - 1}{draws}"
            yield _line(time_us, text + failed, name)

    def _name(self, sample: int) -> str:
        """The request's, and the number of the sample unless that is the first."""
        return f"{self._request_id}.{sample}" if sample else self._request_id
