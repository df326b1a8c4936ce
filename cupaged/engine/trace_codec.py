"""Step events as plain values that msgpack carries, and back, in few bytes.

Arrays are bytes: one that tells the type, then the numbers in the narrowest type that holds them.
A column that is nearly everywhere as usual (one new token, one sample) holds its exceptions alone.
Of the scheduled rows only the difference to the plan before is stored, and of their starts the
difference to where the row was left: a step that only decodes costs about two bytes a sequence, its
token. Encoder and decoder therefore see the same events in the same order.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, cast, get_args

import numpy as np

from cupaged.config import EngineConfig
from cupaged.engine.step_events import (
    OUTCOMES,
    AbortEvent,
    AddEvent,
    Collected,
    Ended,
    Event,
    Ints,
    PlanEvents,
    PoolCounts,
    ResetEvent,
    StepEvents,
    TableChanges,
    Taken,
    Told,
    no_ints,
)
from cupaged.outputs import FinishReason
from cupaged.request import CoreRequest
from cupaged.sampling_params import BeamSearchParams, SamplingParams

_TYPES = ("<u1", "<i1", "<u2", "<i2", "<i4")
_LIMITS = tuple((np.iinfo(name).min, np.iinfo(name).max) for name in _TYPES)
_REASONS = get_args(FinishReason)
_NO_PARAMS = SamplingParams()
_PARAM_DEFAULTS = tuple((name, getattr(_NO_PARAMS, name)) for name in SamplingParams.field_names())
_MAX_TIME_US = 2**62


def pack(values: Ints) -> bytes:
    """int32 [n] in the narrowest type; b"" for none."""
    if not len(values):
        return b""
    low, high = int(values.min()), int(values.max())
    kind = next(i for i, (a, b) in enumerate(_LIMITS) if a <= low and high <= b)
    return bytes((kind,)) + values.astype(_TYPES[kind]).tobytes()


def unpack(form: bytes, low: int = -(2**31), high: int = 2**31) -> Ints:
    """The values again; ValueError unless all are in [low, high)."""
    if not form:
        return no_ints()
    values = np.frombuffer(form, _TYPES[form[0]], offset=1).astype(np.int32)
    if not len(values) or values.min() < low or values.max() >= high:
        raise ValueError("numbers out of range")
    return values


def pack_mostly(values: Ints, usual: int) -> bytes | list[bytes] | None:
    """None if all are as usual; a pair of indices and values where few are not."""
    odd = np.flatnonzero(values != usual).astype(np.int32)
    if not len(odd):
        return None
    if 3 * len(odd) < len(values):
        return [pack(odd), pack(values[odd])]
    return pack(values)


def unpack_mostly(form: Any, usual: int, length: int) -> Ints:
    """The `length` values again."""
    values = np.full(length, usual, np.int32)
    if isinstance(form, list):
        index, odd = map(unpack, form)
        values[index] = odd
    elif form is not None:
        values[:] = _of_length(unpack(form), length)
    return values


class _RowMemory:
    """What encoder and decoder remember of the plans before."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._before = no_ints()
        self._end = np.zeros(config.max_num_seqs, np.int32)  # where each row was left


class Encoder(_RowMemory):
    """Events as lists of plain values, in the order of the file."""

    def encode(self, event: Event) -> list[Any]:
        """The kind, then the fields in their order."""
        if isinstance(event, StepEvents):
            return [
                "step",
                event.time_us,
                [self._plan(plan) for plan in event.plans],
                None if event.collected is None else _collected_form(event.collected),
                event.forked,
                event.finished,
                _changes_form(event.table),
                event.broken,
                event.total_us,
            ]
        if isinstance(event, AddEvent):
            return ["add", event.time_us, request_form(event.request)]
        if isinstance(event, AbortEvent):
            finished = event.finished
            return ["abort", event.time_us, event.request_id, event.index, event.reason, finished]
        return ["reset", event.time_us, event.num_blocks]

    def _plan(self, plan: PlanEvents) -> list[Any]:
        rows, start = plan.rows, plan.start
        form = [
            plan.step_id,
            self._rows(rows),
            pack_mostly(start - self._end[rows], 0),
            pack_mostly(plan.num_new, 1),
            pack_mostly(plan.num_samples, 1),
            plan.admitted,
            plan.preempted,
            plan.swapped_in,
            plan.swap_out,
            plan.swap_in,
            plan.copies,
            _changes_form(plan.table),
            plan.pool,
            plan.num_running,
            plan.num_waiting,
            OUTCOMES.index(plan.outcome),
            plan.schedule_us,
            plan.submit_us,
        ]
        self._end[rows] = start + plan.num_new
        return form

    def _rows(self, rows: Ints) -> bytes | list[bytes] | None:
        """None for those of the plan before; a pair: which of these are gone, which came behind."""
        before, self._before = self._before, rows
        if np.array_equal(before, rows):
            return None
        stays = np.isin(before, rows)
        num_stay = int(np.count_nonzero(stays))
        if 2 * num_stay > len(rows) and np.array_equal(before[stays], rows[:num_stay]):
            return [pack(np.flatnonzero(~stays).astype(np.int32)), pack(rows[num_stay:])]
        return pack(rows)


class Decoder(_RowMemory):
    """Events out of such lists. Whatever is no such list raises one of `DECODING_ERRORS`."""

    def decode(self, form: Any) -> Event:
        """The event again."""
        kind, time_us, *rest = form
        _check_times(time_us)
        if kind == "step":
            plans, collected, forked, finished, table, broken, total_us = rest
            _check_times(total_us)
            return StepEvents(
                time_us,
                [self._plan(*plan) for plan in plans],
                None if collected is None else _collected(*collected),
                self._taken(forked),
                _ended(finished),
                self._changes(table),
                str(broken),
                total_us,
            )
        if kind == "add":
            (request,) = rest
            return AddEvent(time_us, request_of(request))
        if kind == "abort":
            request_id, index, reason, finished = rest
            return AbortEvent(time_us, request_id, index, _reason(reason), _ended(finished))
        if kind == "reset":
            (num_blocks,) = rest
            return ResetEvent(time_us, int(num_blocks))
        raise ValueError(f"an unknown kind of event: {kind!r}")

    def _plan(
        self,
        step_id: int,
        rows_form: Any,
        start_form: Any,
        num_new_form: Any,
        num_samples_form: Any,
        admitted: list[Any],
        preempted: list[Any],
        swapped_in: list[Any],
        swap_out: list[Any],
        swap_in: list[Any],
        copies: list[Any],
        table: list[bytes],
        pool: list[int],
        num_running: int,
        num_waiting: int,
        outcome: int,
        schedule_us: int,
        submit_us: int,
    ) -> PlanEvents:
        _check_times(step_id, schedule_us, submit_us)
        rows = self._rows(rows_form)
        start = unpack_mostly(start_form, 0, len(rows)) + self._end[rows]
        num_new = unpack_mostly(num_new_form, 1, len(rows))
        self._end[rows] = start + num_new
        return PlanEvents(
            step_id,
            rows,
            start,
            num_new,
            unpack_mostly(num_samples_form, 1, len(rows)),
            self._taken(admitted),
            _pairs(preempted),
            self._taken(swapped_in),
            _pairs(swap_out),
            _pairs(swap_in),
            _pairs(copies),
            self._changes(table),
            PoolCounts(*map(int, pool)),
            int(num_running),
            int(num_waiting),
            OUTCOMES[outcome],
            schedule_us,
            submit_us,
        )

    def _rows(self, form: Any) -> Ints:
        rows, limit = self._before, self._config.max_num_seqs
        if isinstance(form, list):
            gone, new = form
            rows = np.concatenate([np.delete(rows, unpack(gone)), unpack(new, 0, limit)])
        elif form is not None:
            rows = unpack(form, 0, limit)
        if len(rows) > limit:
            raise ValueError("too many rows")
        self._before = rows
        return rows

    def _taken(self, form: list[Any]) -> list[Taken]:
        taken = [Taken(int(arrival), int(sample), int(row)) for arrival, sample, row in form]
        if not all(0 <= each.row < self._config.max_num_seqs for each in taken):
            raise ValueError("a row out of range")
        return taken

    def _changes(self, form: list[bytes]) -> TableChanges:
        rows_form, columns_form, blocks_form = form
        rows = unpack(rows_form, 0, self._config.max_num_seqs)
        columns = unpack(columns_form, 0, self._config.max_blocks_per_seq)
        blocks = unpack(blocks_form, -1, self._config.num_blocks)
        return TableChanges(rows, _of_length(columns, len(rows)), _of_length(blocks, len(rows)))


DECODING_ERRORS = (
    ValueError, TypeError, KeyError, IndexError, OverflowError, AttributeError, RecursionError,
)  # fmt: skip


def request_form(request: CoreRequest) -> dict[str, Any]:
    """The fields of a request that are not at their defaults; its prompt as `pack` makes it."""
    form = {
        each.name: value
        for each in fields(CoreRequest)
        if (value := getattr(request, each.name)) != each.default
    }
    params = request.params
    given = {
        name: value
        for name, default in _PARAM_DEFAULTS
        if (value := getattr(params, name)) != default
    }
    if request.beams is not None:
        names = BeamSearchParams.field_names()
        form["beams"] = {name: getattr(request.beams, name) for name in names}
    prompt = np.array(request.prompt_token_ids, np.int32)
    return {**form, "prompt_token_ids": pack(prompt), "params": given}


def request_of(form: dict[str, Any]) -> CoreRequest:
    """The request again."""
    given = {name: _tuples(value) for name, value in form.items()}
    if "beams" in given:
        given["beams"] = BeamSearchParams(**form["beams"])
    given["prompt_token_ids"] = tuple(unpack(form["prompt_token_ids"]).tolist())
    return CoreRequest(**{**given, "params": SamplingParams(**form["params"])})


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _collected_form(collected: Collected) -> list[Any]:
    return [
        collected.step_id,
        OUTCOMES.index(collected.outcome),
        pack(collected.tokens),
        len(collected.num_tokens),
        pack_mostly(collected.num_tokens, 1),
        pack(collected.num_prompt_logprobs),
        None if not len(collected.told.samples) else _told_form(collected.told),
        collected.collect_us,
    ]


def _told_form(told: Told) -> list[bytes]:
    values = told.logprobs.astype("<f4").tobytes()
    return [pack(told.samples), pack(told.counts), pack(told.token_ids), values]


def _told(form: list[bytes] | None, num_samples: int) -> Told:
    if form is None:
        return Told()
    samples, counts = unpack(form[0], 0, num_samples), unpack(form[1], 0)
    ids = _of_length(unpack(form[2]), int(counts.sum()))
    values = np.frombuffer(form[3], "<f4").astype(np.float32)
    if len(values) != len(ids):
        raise ValueError("other numbers of tokens than of log probabilities")
    return Told(samples, _of_length(counts, len(samples)), ids, values)


def _collected(
    step_id: int,
    outcome: int,
    tokens: bytes,
    num_samples: int,
    counts: Any,
    num_told: bytes,
    told_form: list[bytes] | None,
    collect_us: int,
) -> Collected:
    _check_times(step_id, collect_us)
    drawn = unpack(tokens)
    if not 0 <= num_samples <= max(len(drawn), 2**20):
        raise ValueError("too many samples")
    num_tokens = unpack_mostly(counts, 1, num_samples)
    if (num_tokens < 0).any() or int(num_tokens.sum()) != len(drawn):
        raise ValueError("numbers of tokens that are not their number")
    told = unpack(num_told, 0)
    beams = _told(told_form, num_samples)
    return Collected(step_id, OUTCOMES[outcome], drawn, num_tokens, told, beams, collect_us)


def _changes_form(changes: TableChanges) -> list[bytes]:
    return [pack(changes.rows), pack(changes.columns), pack(changes.blocks)]


def _pairs(form: list[Any]) -> list[tuple[int, int]]:
    return [(int(first), int(second)) for first, second in form]


def _ended(form: list[Any]) -> list[Ended]:
    return [Ended(int(arrival), int(sample), _reason(reason)) for arrival, sample, reason in form]


def _reason(form: Any) -> FinishReason:
    if form not in _REASONS:
        raise ValueError(f"an unknown reason: {form!r}")
    return cast(FinishReason, form)


def _of_length(values: Ints, length: int) -> Ints:
    if len(values) != length:
        raise ValueError(f"{len(values)} numbers instead of {length}")
    return values


def _check_times(*times: Any) -> None:
    for time in times:
        if not isinstance(time, int) or not 0 <= time < _MAX_TIME_US:
            raise ValueError(f"a time or a number of a step that is none: {time!r}")
