"""What happened to an engine core, as records: arrivals, aborts, and one record a step.

They hold all that decides what a step does, so that the same schedule can run again without the
model, and what it did, so that the two can be compared. Sequences are named by the row of the block
table that they have, or by (arrival, sample): the first request that was accepted has arrival 0.
Which blocks were handed out, freed or shared is what the changes of the block table say; nothing
here hooks into the block manager.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from cupaged.engine.block_manager import UNUSED, BlockManager
from cupaged.outputs import FinishReason, TokenLogprobs
from cupaged.request import CoreRequest

Ints = NDArray[np.int32]
OK, FAILED, INTERRUPTED = "ok", "failed", "interrupted"  # how a call of the runner ended
OUTCOMES = (OK, FAILED, INTERRUPTED)


def no_ints() -> Ints:
    """int32 [0]."""
    return np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class TableChanges:
    """Entries of the block table that differ from what they were, all int32 [n].

    blocks: what stands there now, -1 for no block.
    """

    rows: Ints = field(default_factory=no_ints)
    columns: Ints = field(default_factory=no_ints)
    blocks: Ints = field(default_factory=no_ints)


class PoolCounts(NamedTuple):
    """Blocks that are held by sequences; of these, by several; free but findable; in quarantine."""

    used: int
    shared: int
    cached: int
    quarantined: int


class Taken(NamedTuple):
    """A sequence has a row from now on."""

    arrival: int
    sample: int
    row: int


class Ended(NamedTuple):
    """A sequence has ended."""

    arrival: int
    sample: int
    reason: FinishReason


@dataclass(slots=True)
class PlanEvents:
    """A step that was planned, and the pool as the step finds it.

    rows, start, num_new, num_samples: int32 [num_seqs], the scheduled sequences: tokens [start,
        start + num_new) are computed, and num_samples are drawn after them.
    admitted: those that had waited. preempted: (arrival, sample) of those that lost their blocks.
    swapped_in: those that came back from the host.
    swap_out, swap_in, copies: (source block, destination block), made in this order.
    table: changes since the last record of it.
    num_running, num_waiting: sequences, the preempted ones among those that wait.
    outcome: of submitting it, one of `OUTCOMES`.
    schedule_us, submit_us: how long that took.
    """

    step_id: int
    rows: Ints
    start: Ints
    num_new: Ints
    num_samples: Ints
    admitted: list[Taken]
    preempted: list[tuple[int, int]]
    swapped_in: list[Taken]
    swap_out: list[tuple[int, int]]
    swap_in: list[tuple[int, int]]
    copies: list[tuple[int, int]]
    table: TableChanges
    pool: PoolCounts
    num_running: int
    num_waiting: int
    outcome: str = OK
    schedule_us: int = 0
    submit_us: int = 0


@dataclass(frozen=True, slots=True)
class Told:
    """What may follow the beams of a step: the search that goes on depends on it.

    samples: int32 [n], the step's samples that are beams. counts: int32 [n], tokens told of each.
    token_ids: int32 [total], logprobs: float32 [total], of one after another.
    """

    samples: Ints = field(default_factory=no_ints)
    counts: Ints = field(default_factory=no_ints)
    token_ids: Ints = field(default_factory=no_ints)
    logprobs: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))

    @staticmethod
    def of(reports: list[list[TokenLogprobs] | None], samples: list[int]) -> Told:
        """The reports on some samples of a step."""
        told = [report[0] for i in samples if (report := reports[i]) is not None]
        return Told(
            np.array(samples, np.int32),
            np.array([len(each.token_ids) for each in told], np.int32),
            np.array([token for each in told for token in each.token_ids], np.int32),
            np.array([value for each in told for value in each.logprobs], np.float32),
        )

    def reports(self, num_samples: int) -> list[list[TokenLogprobs] | None]:
        """The reports again, without ranks; empty if there are none."""
        reports: list[list[TokenLogprobs] | None] = [None] * num_samples
        ends = np.cumsum(self.counts).tolist()
        for sample, end, count in zip(
            self.samples.tolist(), ends, self.counts.tolist(), strict=True
        ):
            ids = self.token_ids[end - count : end].tolist()
            values = self.logprobs[end - count : end].tolist()
            reports[sample] = [TokenLogprobs(ids, values, [0] * count)]
        return reports if ends else []


@dataclass(slots=True)
class Collected:
    """The oldest step in flight is over.

    tokens: int32 [n], what was drawn. num_tokens: int32 [num_samples], how many of them belong to
        each sample. Both are empty unless the outcome is OK.
    num_prompt_logprobs: int32 [num_seqs], prompt tokens of each sequence that were told of; empty
        where nothing was. A request is computed until all it asked for is told.
    told: what may follow beams.
    collect_us: how long the engine waited for it.
    """

    step_id: int
    outcome: str = OK
    tokens: Ints = field(default_factory=no_ints)
    num_tokens: Ints = field(default_factory=no_ints)
    num_prompt_logprobs: Ints = field(default_factory=no_ints)
    told: Told = field(default_factory=Told)
    collect_us: int = 0


@dataclass(slots=True)
class StepEvents:
    """A call of `EngineCore.step`: plans that it submitted, and the step that it collected.

    time_us: when it began, since the trace began. total_us: how long it took.
    forked: sequences that were made. finished: those that ended.
    table: changes after the last plan.
    broken: name of the exception that it ended with, if neither the runner nor a request was the
        cause; "" for none.
    """

    time_us: int
    plans: list[PlanEvents] = field(default_factory=list)
    collected: Collected | None = None
    forked: list[Taken] = field(default_factory=list)
    finished: list[Ended] = field(default_factory=list)
    table: TableChanges = field(default_factory=TableChanges)
    broken: str = ""
    total_us: int = 0

    @property
    def has_failure(self) -> bool:
        """True when the runner failed or was interrupted."""
        outcomes = [plan.outcome for plan in self.plans]
        if self.collected is not None:
            outcomes.append(self.collected.outcome)
        return any(outcome != OK for outcome in outcomes)


@dataclass(frozen=True, slots=True)
class AddEvent:
    """A request was accepted."""

    time_us: int
    request: CoreRequest


@dataclass(frozen=True, slots=True)
class AbortEvent:
    """A request, or one sample of it, was ended from outside: its client left, its text stopped."""

    time_us: int
    request_id: str
    index: int | None
    reason: FinishReason
    finished: list[Ended]


@dataclass(frozen=True, slots=True)
class ResetEvent:
    """All cached prefixes were forgotten; num_blocks were given back by that."""

    time_us: int
    num_blocks: int


Event = AddEvent | AbortEvent | ResetEvent | StepEvents


class EventSink(Protocol):
    """Takes records, in order."""

    def write(self, event: Event) -> None:
        """Take one. It must not raise: the engine goes on whatever becomes of its trace."""


class TableWatch:
    """Finds what has changed in a block table since it was asked last."""

    def __init__(self, manager: BlockManager) -> None:
        self._manager = manager
        self._known = manager.block_table.copy()
        self._width = 0

    def changes(self) -> TableChanges:
        """Compares the columns that are in use, or were."""
        width = self._manager.num_columns
        widest, self._width = max(width, self._width), width
        now, known = self._manager.block_table[:, :widest], self._known[:, :widest]
        changed = np.flatnonzero(now != known)  # far faster than in two dimensions
        if not len(changed):
            return TableChanges()
        rows, columns = np.divmod(changed, widest)
        blocks = now[rows, columns]
        known[rows, columns] = blocks
        return TableChanges(rows.astype(np.int32), columns.astype(np.int32), blocks)


class TableReplica:
    """The block table again, from its changes.

    table: int32 [max_num_seqs, max_blocks_per_seq]. ref_counts: int32 [num_blocks].
    """

    def __init__(self, max_num_seqs: int, max_blocks_per_seq: int, num_blocks: int) -> None:
        self.table = np.full((max_num_seqs, max_blocks_per_seq), UNUSED, np.int32)
        self.ref_counts = np.zeros(num_blocks, np.int32)

    def apply(self, changes: TableChanges) -> tuple[int, int, int]:
        """Blocks that were handed out, freed, and entries that share a block that others hold."""
        before = self.table[changes.rows, changes.columns]
        self.table[changes.rows, changes.columns] = changes.blocks
        old, new = before[before != UNUSED], changes.blocks[changes.blocks != UNUSED]
        was_held = self.ref_counts > 0
        np.add.at(self.ref_counts, old, -1)
        np.add.at(self.ref_counts, new, 1)
        held = self.ref_counts > 0
        handed_out = int(np.count_nonzero(held & ~was_held))
        return handed_out, int(np.count_nonzero(was_held & ~held)), len(new) - handed_out


class Difference(NamedTuple):
    """The first place where two records differ, and what stands there in each."""

    place: str
    recorded: Any
    now: Any


def first_difference(recorded: Any, now: Any, *, but: tuple[str, ...] = ()) -> Difference | None:
    """Compare two records, all but their times and the fields `but`."""
    return next(_differences(recorded, now, "", but), None)


def _differences(recorded: Any, now: Any, place: str, but: tuple[str, ...]) -> Iterator[Difference]:
    if type(recorded) is not type(now):
        yield Difference(place, recorded, now)
    elif isinstance(recorded, np.ndarray):
        if len(recorded) != len(now):
            yield Difference(f"length of {place}", len(recorded), len(now))
        for i in np.flatnonzero(recorded[: len(now)] != now[: len(recorded)])[:1].tolist():
            yield Difference(f"{place}[{i}]", recorded.item(i), now.item(i))
    elif is_dataclass(recorded):
        for each in fields(recorded):
            if not each.name.endswith("_us") and each.name not in but:
                inner = f"{place}.{each.name}" if place else each.name
                pair = getattr(recorded, each.name), getattr(now, each.name)
                yield from _differences(*pair, inner, but)
    elif isinstance(recorded, list) and len(recorded) == len(now):
        for i, pair in enumerate(zip(recorded, now, strict=True)):
            yield from _differences(*pair, f"{place}[{i}]", but)
    elif recorded != now:
        yield Difference(place, recorded, now)
