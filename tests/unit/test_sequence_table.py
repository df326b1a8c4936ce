"""The table of running sequences: rows that change hands, tokens that end a sequence, damage."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from cupaged.config import EngineConfig
from cupaged.engine.sequence_table import NUM_ENDING_IDS, RECORD, are_steady, record_of
from cupaged.request import NEVER, Request
from tests.unit.small_core import (
    ScriptedRunner,
    drain,
    endings,
    request,
    small_core,
    tokens_of,
)


def test_the_output_of_a_step_does_not_move_the_next_owner_of_its_row_on() -> None:
    core = small_core(max_num_seqs=1)
    scheduler = core.scheduler
    core.add_request(request("a", 3, max_tokens=9))
    plan = scheduler.schedule()
    core.abort("a")
    core.add_request(request("b", 6, max_tokens=4))
    later = scheduler.schedule()
    assert later.rows.tolist() == plan.rows.tolist() == [0]
    assert scheduler.complete(plan).tolist() == [False]
    assert later.sequences[0].num_computed_tokens == 0
    assert later.sequences[0].in_flight
    assert scheduler.complete(later).tolist() == [True]
    assert later.sequences[0].num_computed_tokens == 6
    assert not later.sequences[0].in_flight


def scripted(script: dict[str, list[list[int]]], _: EngineConfig) -> ScriptedRunner:
    return ScriptedRunner(script)


@pytest.mark.parametrize("num_stops", [1, NUM_ENDING_IDS, NUM_ENDING_IDS + 1, 12])
def test_any_number_of_tokens_can_end_a_sequence(num_stops: int) -> None:
    stops = list(range(20, 20 + num_stops))
    for stop in (stops[0], stops[-1]):
        script = {"a": [[1, 2, stop, 3, 4]]}
        core = small_core(partial(scripted, script))
        core.add_request(request("a", 3, max_tokens=5, stop_token_ids=stops))
        outputs = drain(core)
        assert tokens_of(outputs, "a") == [1, 2, stop]
        assert endings(outputs) == {("a", 0): ("stop", stop)}


def test_a_sequence_keeps_what_its_record_says_when_it_stops_running() -> None:
    core = small_core()
    core.add_request(request("a", 5, max_tokens=9))
    core.step()
    sequence = core.scheduler.running[0]
    assert (sequence.num_computed_tokens, sequence.row) == (5, 0)
    core.scheduler.table.leave(sequence)
    assert (sequence.num_computed_tokens, sequence.num_pending_samples) == (5, 1)
    assert sequence.store_at == NEVER or sequence.store_at > 5
    assert (sequence.row, sequence.record) == (-1, None)


KEPT_NOWHERE_ELSE = {
    "serial",
    "num_computed_tokens",
    "store_at",
    "num_pending_samples",
    "in_flight",
}


@pytest.mark.parametrize("name", sorted({*(RECORD.names or ())} - KEPT_NOWHERE_ELSE))
def test_the_audit_sees_a_wrong_value_in_every_column(name: str) -> None:
    core = small_core()
    core.add_request(request("a", 5, max_tokens=9))
    core.step()
    core.audit()
    record = core.scheduler.table.records[0]
    record[name] = not record[name] if record[name].dtype == np.bool_ else record[name] + 1
    with pytest.raises(AssertionError, match=name):
        core.audit()


def test_a_stale_record_is_seen() -> None:
    core = small_core()
    core.scheduler.table.records["serial"][2] = 7
    with pytest.raises(AssertionError, match="stale"):
        core.audit()


def steady(token: int, **params: object) -> bool:
    core = request("a", 3, max_tokens=3, **params)  # type: ignore[arg-type]
    sequence = Request(core, arrival=0, max_tokens=3).sequences[0]
    records = np.array([record_of(sequence)], RECORD)
    return bool(are_steady(records, np.array([token], np.int32))[0])


def test_what_makes_a_token_more_than_one_more_token() -> None:
    assert steady(5)
    assert not steady(-1)  # the draw failed
    assert not steady(5, stop_token_ids=[5])
    assert not steady(5, logprobs=0)
    assert not steady(5, prompt_logprobs=0)


def test_the_last_token_that_is_allowed_is_looked_at() -> None:
    core = request("a", 3, max_tokens=1)
    sequence = Request(core, arrival=0, max_tokens=1).sequences[0]
    records = np.array([record_of(sequence)], RECORD)
    assert are_steady(records, np.array([5], np.int32)).tolist() == [False]
