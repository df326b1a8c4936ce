"""The prefix cache's tier in the host's memory: small situations worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cupaged.config import PREFIX_CACHES
from cupaged.engine.core import EngineCore
from cupaged.engine.preemption import Cheaper, PreemptionCosts
from cupaged.engine.runner import StepOutput
from cupaged.errors import EngineError
from cupaged.request import CoreRequest
from tests.unit.small_core import (
    DEFAULTS,
    RecordingRunner,
    drain,
    recorded,
    request,
    small_core,
    tokens_of,
)


@pytest.fixture(params=PREFIX_CACHES, autouse=True)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kind of cache that small cores have: 4 blocks of 4 tokens, and 8 of the host."""
    monkeypatch.setitem(DEFAULTS, "prefix_cache", request.param)
    monkeypatch.setitem(DEFAULTS, "num_blocks", 4)
    monkeypatch.setitem(DEFAULTS, "num_host_blocks", 8)
    return str(request.param)


def asked(name: str, length: int = 13, *, salt: str | None = None) -> CoreRequest:
    """A prompt of 13 tokens fills 4 blocks: 3 are full, all that the pool has are held."""
    return replace(request(name, length, max_tokens=1), cache_salt=salt)


def ask(core: EngineCore, core_request: CoreRequest) -> tuple[int, list[int]]:
    """Run a request to its end: the tokens that it found, and what it gave."""
    core.add_request(core_request)
    outputs = drain(core)
    return outputs[-1].num_cached_tokens, tokens_of(outputs, core_request.request_id)


def counts(core: EngineCore) -> tuple[int, int, int]:
    """Blocks kept on the host, copied there, and copied back."""
    stats = core.stats()
    return stats.num_kept_host_blocks, stats.blocks_offloaded_total, stats.blocks_loaded_total


def test_what_was_evicted_comes_back_for_who_asks_for_it() -> None:
    core = small_core()
    first = ask(core, asked("a", salt="x"))
    assert ask(core, asked("b", salt="y"))[0] == 0  # takes all 4 blocks: 3 of them were cached
    saved = recorded(core).plans[1]
    assert len(saved.swap_out) == 3 and not saved.swapped_out
    assert counts(core) == (3, 3, 0)
    assert ask(core, asked("c", salt="x")) == (12, first[1])
    loaded = recorded(core).plans[2]
    row = loaded.block_tables[0][0].tolist()
    kept = {block: host for host, block in loaded.swap_in}
    assert sorted(kept) == sorted(row[:3])
    assert [kept[block] for block in row[:3]] == [2, 1, 0]  # the end of a prefix leaves first
    assert recorded(core).steps[2] == [("c", 0, 12, 1, 1)]
    assert counts(core) == (6, 6, 3)  # b's blocks left for c's, and x stays on the host, too
    stats = core.stats()
    assert stats.prefix_cache_hits_total == 12 and stats.num_used_host_blocks == 0
    assert core.swapping.host_pool.num_free_blocks == 8


def test_what_is_there_already_is_not_copied_again() -> None:
    core = small_core()
    for name, salt in ("ax", "by", "cx", "dy", "ex"):
        ask(core, asked(name, salt=salt))
    assert counts(core) == (6, 6, 9)


def test_what_was_loaded_is_found_on_the_device_afterwards() -> None:
    core = small_core(num_blocks=8)
    for name, salt in ("ax", "by", "cz"):
        ask(core, asked(name, 9, salt=salt))
    ask(core, asked("d", 21, salt="w"))  # 6 of 8 blocks: 2 were free, x and y were evicted
    assert counts(core) == (4, 4, 0)
    assert ask(core, asked("e", 9, salt="x"))[0] == 8
    assert counts(core)[2] == 2
    assert ask(core, asked("f", 9, salt="x"))[0] == 8
    assert counts(core)[2] == 2


def test_a_prefix_goes_on_from_the_device_to_the_host() -> None:
    core = small_core(num_blocks=5)
    ask(core, asked("a", 13))
    ask(core, asked("b", 9, salt="y"))  # 3 blocks: 2 were free, the end of a's prefix was evicted
    assert counts(core) == (1, 1, 0)
    assert ask(core, asked("c", 13))[0] == 12
    (pair,) = recorded(core).plans[-1].swap_in
    row = recorded(core).plans[-1].block_tables[0][0].tolist()
    assert pair == (0, row[2])


def test_the_least_recently_used_gives_way_when_the_host_is_full() -> None:
    core = small_core(num_host_blocks=6)
    for name, salt in ("ax", "by", "cz"):
        ask(core, asked(name, salt=salt))
    assert counts(core) == (6, 6, 0)  # x and y
    assert ask(core, asked("d", salt="x"))[0] == 12  # z takes the place of y
    assert ask(core, asked("e", salt="y"))[0] == 0
    assert ask(core, asked("f", salt="x"))[0] == 12


def test_swapped_sequences_come_before_what_is_kept() -> None:
    """Two of 7 tokens fill 4 blocks and grow past an edge: one is swapped to where a's prefix is"""
    core = small_core(num_host_blocks=3, max_num_seqs=2)
    ask(core, asked("a", 13))
    for name in "bc":
        core.add_request(replace(request(name, 7, max_tokens=6), cache_salt=name))
    outputs = core.step()
    assert counts(core)[0] == 3
    outputs += drain(core)
    assert core.stats().num_swap_preemptions_total == 1
    room = small_core(num_blocks=30)
    room.add_request(replace(request("c", 7, max_tokens=6), cache_salt="c"))
    assert tokens_of(outputs, "c") == tokens_of(drain(room), "c")
    assert core.swapping.host_pool.num_free_blocks == 3


def test_a_request_that_opted_out_loads_nothing() -> None:
    core = small_core()
    first = ask(core, asked("a"))
    ask(core, asked("b", salt="y"))
    assert ask(core, replace(asked("c"), prefix_caching=False)) == (0, first[1])
    assert counts(core)[2] == 0


def test_a_reset_forgets_both_tiers() -> None:
    core = small_core()
    ask(core, asked("a"))
    ask(core, asked("b", salt="y"))
    core.reset_prefix_cache()
    assert counts(core)[0] == 0
    assert ask(core, asked("c"))[0] == 0


def test_what_is_loaded_while_the_cache_is_reset_is_not_found() -> None:
    """As after new weights: what the step in flight has read belongs to the old ones."""
    core = small_core()
    ask(core, asked("a"))
    ask(core, asked("b", salt="y"))
    core.add_request(asked("c"))
    plan = core.scheduler.schedule()
    assert len(plan.swap_in) == 3
    core.reset_prefix_cache()
    core._in_flight.append((plan, core._runner.submit(plan)))
    drain(core)
    assert ask(core, asked("d"))[0] == 0


@pytest.mark.parametrize(("per_block", "found"), [(23.9, 12), (24.1, 0)])
def test_it_is_computed_where_that_costs_less(per_block: float, found: int) -> None:
    """3 blocks one way, half of what they cost both ways, against 12 tokens of 3."""
    core = small_core()
    core.swapping.strategy.loads = Cheaper(  # type: ignore[method-assign]
        PreemptionCosts(0.0, per_block, 3.0)
    ).loads
    ask(core, asked("a"))
    ask(core, asked("b", salt="y"))
    assert ask(core, asked("c"))[0] == found


class FailingRunner(RecordingRunner):
    """The steps with these ids are not computed."""

    failing = frozenset[int]()

    def collect(self, handle: int) -> StepOutput:
        """Fail, or not."""
        output = super().collect(handle)
        if handle in self.failing:
            raise RuntimeError("no")
        return output


def test_what_a_failed_step_was_to_save_is_not_kept() -> None:
    core = small_core(FailingRunner, kv_sanitizer=False)
    ask(core, asked("a"))
    recorded(core).failing = frozenset({1})  # type: ignore[attr-defined]
    core.add_request(asked("b", salt="y"))
    with pytest.raises(EngineError):
        core.step()
    core.audit()
    assert counts(core)[0] == 0
    assert ask(core, asked("c"))[0] == 0


def test_what_a_failed_step_has_loaded_is_loaded_by_nobody_else() -> None:
    """A request that fails takes along what it began with: perhaps that is what is wrong."""
    core = small_core(FailingRunner, kv_sanitizer=False)
    first = ask(core, asked("a"))
    ask(core, asked("b", salt="y"))
    recorded(core).failing = frozenset({2})  # type: ignore[attr-defined]
    core.add_request(asked("c"))
    with pytest.raises(EngineError):
        core.step()
    core.audit()
    assert ask(core, asked("d")) == (0, first[1])


def test_a_failed_request_that_opted_out_drops_nothing() -> None:
    core = small_core(FailingRunner, kv_sanitizer=False)
    ask(core, asked("a"))
    ask(core, asked("b", salt="y"))
    recorded(core).failing = frozenset({2})  # type: ignore[attr-defined]
    core.add_request(replace(asked("c"), prefix_caching=False))
    with pytest.raises(EngineError):
        core.step()
    assert ask(core, asked("d"))[0] == 12


def test_who_loads_the_same_as_one_that_fails_stores_nothing() -> None:
    """Both steps are in flight; the first fails, and nobody finds what the second has read."""
    core = small_core(FailingRunner, kv_sanitizer=False, num_blocks=8, max_steps_in_flight=2)
    ask(core, asked("a"))
    ask(core, asked("b", 32, salt="y"))
    runner = recorded(core)
    failing = len(runner.plans)
    runner.failing = frozenset({failing})  # type: ignore[attr-defined]
    core.add_request(asked("c"))
    core._in_flight.append((plan := core.scheduler.schedule(), runner.submit(plan)))
    core.add_request(request("d", 13, max_tokens=3))
    with pytest.raises(EngineError):
        core.step()
    assert [len(p.swap_in) for p in runner.plans[failing:]] == [3, 3]
    drain(core)
    assert ask(core, asked("e"))[0] == 0


def test_two_that_begin_in_one_step_load_the_same_blocks() -> None:
    core = small_core(num_blocks=8)
    first = ask(core, asked("a"))
    ask(core, asked("b", 29, salt="y"))
    for name in "cd":
        core.add_request(asked(name))
    outputs = drain(core)
    plan = recorded(core).plans[-1]
    assert sorted(host for host, _ in plan.swap_in) == [0, 0, 1, 1, 2, 2]
    assert tokens_of(outputs, "c") == tokens_of(outputs, "d") == first[1]


def test_the_beginning_of_a_prefix_is_kept_where_the_host_has_no_room_for_all() -> None:
    """The end leaves first, and is worth nothing alone."""
    core = small_core(num_blocks=8, num_host_blocks=3)
    ask(core, asked("a", 25))
    ask(core, asked("b", 32, salt="y"))
    assert counts(core)[:2] == (3, 3)
    assert ask(core, asked("c", 25))[0] == 12


def test_a_head_that_has_no_room_does_not_look_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    core = small_core()
    ask(core, asked("a"))
    core.add_request(replace(request("b", 9, max_tokens=6), cache_salt="y"))
    core.step()
    looked = []

    def find(*arguments: object) -> list[tuple[bytes, int]]:
        looked.append(arguments)
        return []

    monkeypatch.setattr(core.offloading, "find", find)
    core.add_request(asked("c"))
    core.step()
    assert not looked
    drain(core)
    assert len(looked) == 1


def test_without_host_blocks_nothing_is_kept() -> None:
    core = small_core(num_host_blocks=0)
    ask(core, asked("a"))
    ask(core, asked("b", salt="y"))
    assert counts(core) == (0, 0, 0)
    assert not any(plan.swap_out for plan in recorded(core).plans)


def test_a_long_prefix_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is evicted block by block; naming it must not begin at its first block each time."""
    from cupaged.engine import block_names, radix_cache

    calls = []

    def counted(*args: object) -> bytes:
        calls.append(1)
        return original(*args)  # type: ignore[arg-type]

    original = block_names.hash_block
    monkeypatch.setattr(block_names, "hash_block", counted)
    monkeypatch.setattr(radix_cache, "hash_block", counted)
    core = small_core(num_blocks=102, num_host_blocks=200, max_num_batched_tokens=500)
    ask(core, asked("a", 401))
    for i in range(60):
        ask(core, asked(f"b{i}", 5, salt=str(i)))
    assert counts(core)[0] > 50
    assert len(calls) < 100 + 2 * 2 * 60 + 60
