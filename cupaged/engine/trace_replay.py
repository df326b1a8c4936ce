"""Runs the requests of a trace through the real scheduler and block manager, without the model.

The runner gives the tokens, and the failures, that were recorded; every record that the new run
makes is compared with the one in the trace. A trace from elsewhere is thus a report of a fault that
anybody can run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cupaged.engine.batch import StepPlan
from cupaged.engine.preemption import make_strategy
from cupaged.engine.runner import StepOutput
from cupaged.engine.scheduling_policy import SchedulingPolicy, make_policy
from cupaged.engine.step_events import (
    FAILED,
    INTERRUPTED,
    AbortEvent,
    AddEvent,
    Difference,
    Event,
    PlanEvents,
    ResetEvent,
    StepEvents,
    first_difference,
)
from cupaged.engine.trace_file import TraceHeader
from cupaged.engine.traced_core import TracedCore
from cupaged.errors import CupagedError, EngineError
from cupaged.outputs import TokenLogprobs

_NOT_KNOWN = TokenLogprobs([], [], [])


@dataclass(frozen=True, slots=True)
class Replayed:
    """How far a replay came.

    num_steps: steps that were equal. difference: the first one, None for none, and `where`.
    plans: the plan that was recorded there and the one that was made now, in words.
    broken: the exception that ended the recorded engine and that nothing can bring about again.
    """

    num_steps: int
    difference: Difference | None = None
    where: str = ""
    plans: tuple[str, str] | None = None
    broken: str = ""


class Divergence(BaseException):
    """The new run is not the recorded one. The core must not take this for a failing step."""

    def __init__(self, difference: Difference) -> None:
        super().__init__(difference)
        self.difference = difference


class RecordedFailure(RuntimeError):
    """The runner failed here."""


class RecordedInterrupt(BaseException):
    """The runner was interrupted here."""


class RecordedRunner:
    """Gives what the runner of the trace gave. `core` is set before the first step."""

    core: TracedCore

    def __init__(self) -> None:
        self._step = StepEvents(0)

    def expect(self, step: StepEvents) -> None:
        """The step that comes next, as it was recorded."""
        self._step = step

    def submit(self, plan: StepPlan) -> int:
        """Compare the plan, then do what was done."""
        plans = self.core.plans
        if len(plans) > len(self._step.plans):
            raise Divergence(Difference("plans", len(self._step.plans), len(plans)))
        recorded = self._step.plans[len(plans) - 1]
        difference = first_difference(recorded, plans[-1], but=("outcome",))
        if difference is not None:
            raise Divergence(difference)
        _raise_as_recorded(recorded.outcome)
        return plan.step_id

    def collect(self, handle: int) -> StepOutput:
        """The recorded tokens. Of prompt logprobs only their number counts."""
        recorded = self._step.collected
        if recorded is None or recorded.step_id != handle:
            step_id = None if recorded is None else recorded.step_id
            raise Divergence(Difference("collected", step_id, handle))
        _raise_as_recorded(recorded.outcome)
        flat = iter(recorded.tokens.tolist())
        tokens = [[next(flat) for _ in range(count)] for count in recorded.num_tokens.tolist()]
        told = [[_NOT_KNOWN] * count for count in recorded.num_prompt_logprobs.tolist()]
        return StepOutput(handle, tokens, recorded.told.reports(len(tokens)), told)


def _raise_as_recorded(outcome: str) -> None:
    if outcome == FAILED:
        raise RecordedFailure("as it was recorded")
    if outcome == INTERRUPTED:
        raise RecordedInterrupt


class _LastEvent:
    """Keeps what the core tells."""

    def __init__(self) -> None:
        self.event: Event | None = None

    def write(self, event: Event) -> None:
        """Keep it."""
        self.event = event


class Replay:
    """A core that goes through recorded events.

    Args:
        header: of the trace.
        policy: in place of the one that the header names.
    """

    def __init__(self, header: TraceHeader, policy: SchedulingPolicy | None = None) -> None:
        self._runner = RecordedRunner()
        self._made = _LastEvent()
        if policy is None:
            policy = make_policy(header.scheduling_policy)
        self.core = TracedCore(
            header.config,
            self._runner,
            self._made,
            policy=policy,
            preemption=make_strategy(header.config, header.swap_costs),
        )
        self._runner.core = self.core

    def run(self, events: Iterable[Event]) -> Replayed:
        """Until the first difference, or the end. For errors see `TraceReader`."""
        num_steps, names = 0, _Names()
        for event in events:
            self._made.event = None
            error = self._do(event)
            made = self._made.event
            difference = error or first_difference(event, made)
            if isinstance(event, StepEvents) and event.broken and not _breaks_too(event, made):
                return Replayed(num_steps, broken=event.broken)
            if difference is not None:
                where = f"{_name(event)}, after {num_steps} steps"
                return Replayed(num_steps, difference, where, names.plans(event, made))
            num_steps += isinstance(event, StepEvents)
            names.follow(event)
        return Replayed(num_steps)

    def _do(self, event: Event) -> Difference | None:
        """Let the core do it; what cannot be compared as a record comes back."""
        try:
            if isinstance(event, AddEvent):
                self.core.add_request(event.request)
            elif isinstance(event, AbortEvent):
                self.core.abort(event.request_id, event.index, reason=event.reason)
            elif isinstance(event, ResetEvent):
                self.core.reset_prefix_cache()
            else:
                self._runner.expect(event)
                self.core.step()
        except (EngineError, RecordedInterrupt):
            return None
        except Divergence as divergence:
            return divergence.difference
        except CupagedError as error:
            return Difference("accepted", True, f"refused: {error}")
        except Exception as error:
            if isinstance(event, StepEvents):
                return None  # it is in the record
            return Difference("error", None, f"{type(error).__name__}: {error}")
        return None


def _breaks_too(recorded: StepEvents, made: Event | None) -> bool:
    return isinstance(made, StepEvents) and made.broken == recorded.broken


def _name(event: Event) -> str:
    if isinstance(event, AddEvent):
        return f"arrival of {event.request.request_id}"
    if isinstance(event, StepEvents):
        return f"step {event.plans[0].step_id}" if event.plans else "step without a plan"
    return f"abort of {event.request_id}" if isinstance(event, AbortEvent) else "reset"


class _Names:
    """Who has which row, by the records so far."""

    def __init__(self) -> None:
        self._request_ids: list[str] = []
        self._owners: dict[int, tuple[int, int]] = {}

    def follow(self, event: Event) -> None:
        """Take the next record."""
        if isinstance(event, AddEvent):
            self._request_ids.append(event.request.request_id)
        elif isinstance(event, StepEvents):
            for plan in event.plans:
                self._owners |= _taken(plan)
            self._owners |= {row: (arrival, i) for arrival, i, row in event.forked}

    def plans(self, recorded: Event, made: Event | None) -> tuple[str, str] | None:
        """The plan where two records of a step part, in each of them; None if it is no step."""
        if not isinstance(recorded, StepEvents) or not isinstance(made, StepEvents):
            return None
        place = max(0, len(made.plans) - 1)
        return self._in_words(recorded.plans, place), self._in_words(made.plans, place)

    def _in_words(self, plans: list[PlanEvents], place: int) -> str:
        """`a 0+9, b 5+1; preempted c`: from which token on, and how many."""
        if place >= len(plans):
            return "none"
        plan = plans[place]
        owners = self._owners | _taken(plan)
        columns = zip(plan.rows.tolist(), plan.start.tolist(), plan.num_new.tolist(), strict=True)
        words = [f"{self._name(owners.get(row))} {first}+{n}" for row, first, n in columns]
        preempted = [self._name(who) for who in plan.preempted]
        return ", ".join(words) + ("; preempted " + ", ".join(preempted) if preempted else "")

    def _name(self, who: tuple[int, int] | None) -> str:
        arrival, sample = who or (-1, 0)
        known = 0 <= arrival < len(self._request_ids)
        name = self._request_ids[arrival] if known else "unknown"
        return f"{name}.{sample}" if sample else name


def _taken(plan: PlanEvents) -> dict[int, tuple[int, int]]:
    """Sequences that the plan has given a row."""
    return {row: (arrival, i) for arrival, i, row in [*plan.admitted, *plan.swapped_in]}
