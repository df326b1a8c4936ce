"""The prefix cache: names of blocks, what is found, what is evicted, worked out by hand.

What is asked of an engine holds for both kinds of cache.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from hashlib import sha256
from typing import Any

import pytest

from cupaged.config import PREFIX_CACHES, EngineConfig
from cupaged.engine.batch import StepPlan
from cupaged.engine.block_names import NO_PARENT, hash_block
from cupaged.engine.core import EngineCore
from cupaged.engine.runner import FAILED_TOKEN, StepOutput
from cupaged.errors import ConfigError, InvalidParameterError
from cupaged.request import CoreRequest, Request
from cupaged.sampling_params import SamplingParams
from tests.unit.small_core import (
    DEFAULTS,
    RecordingRunner,
    drain,
    recorded,
    request,
    small_config,
    small_core,
    tokens_of,
)


@pytest.fixture(params=PREFIX_CACHES, autouse=True)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kind of cache that small cores have."""
    monkeypatch.setitem(DEFAULTS, "prefix_cache", request.param)
    return str(request.param)


def cached(core: EngineCore, core_request: CoreRequest) -> int:
    """Run a request to its end; the tokens that it found."""
    core.add_request(core_request)
    outputs = drain(core)
    return outputs[-1].num_cached_tokens


def test_a_name_is_the_hash_of_parent_tokens_and_extras() -> None:
    data = NO_PARENT + struct.pack("<4i", 1, 2, 3, 4)
    tokens = data[len(NO_PARENT) :]
    assert hash_block(NO_PARENT, tokens) == sha256(data).digest()
    salted = data + b"\x04\0\0\0salt" + b"\x02\0\0\0\xc3\xa9"
    assert hash_block(NO_PARENT, tokens, [("salt", "é")]) == sha256(salted).digest()


def test_names_of_different_variants_differ() -> None:
    variants = [
        (), (("adapter", "a"),), (("adapter", "b"),), (("salt", "a"),), (("adapter", ""),),
        (("adapter", "a"), ("salt", "b")), (("adapter", "asalt"), ("", "b")),
    ]  # fmt: skip
    tokens, others = struct.pack("<2i", 1, 2), struct.pack("<2i", 2, 1)
    names = {hash_block(NO_PARENT, tokens, extras) for extras in variants}
    names |= {hash_block(bytes(31) + b"\1", tokens), hash_block(NO_PARENT, others)}
    assert len(names) == len(variants) + 2


@pytest.mark.parametrize(
    ("length", "found"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12)]
)
def test_the_same_prompt_again_computes_one_token_at_least(length: int, found: int) -> None:
    core = small_core()
    core.add_request(request("first", length, max_tokens=2))
    first = drain(core)
    for name in ("second", "third"):
        core.add_request(request(name, length, max_tokens=2))
        outputs = drain(core)
        assert {o.num_cached_tokens for o in outputs} == {found}
        assert tokens_of(outputs, name) == tokens_of(first, "first")
        starts = [(start, n) for step in recorded(core).steps for i, _, start, n, _ in step]
        assert starts[-2] == (found, length - found)
    assert not core.block_manager.ref_counts.any()


def test_what_was_answered_is_found_too() -> None:
    core = small_core()
    core.add_request(request("a", 6, max_tokens=7))
    answer = tokens_of(drain(core), "a")
    prompt = (*request("a", 6).prompt_token_ids, *answer)  # 13 tokens, 12 of them computed
    assert cached(core, replace(request("b", 6), prompt_token_ids=prompt)) == 12


def test_equal_prompts_in_one_step_share_when_it_has_completed() -> None:
    core = small_core()
    core.add_request(request("a", 9, max_tokens=4))
    core.add_request(request("b", 9, max_tokens=4))
    core.step()
    assert recorded(core).steps[0] == [("a", 0, 0, 9, 1), ("b", 0, 0, 9, 1)]
    core.add_request(request("c", 9, max_tokens=4))
    core.step()
    assert recorded(core).steps[1][-1] == ("c", 0, 8, 1, 1)
    a, b, c = core.scheduler.running
    blocks = core.block_manager.blocks_of
    assert blocks(a.order)[:2] == blocks(b.order)[:2] == blocks(c.order)[:2]
    assert core.stats().num_used_blocks == 2 + 3
    drain(core)


def test_a_chunk_is_found_while_the_rest_of_its_prompt_is_computed() -> None:
    core = small_core(max_num_batched_tokens=8)
    core.add_request(request("a", 30, max_tokens=1))
    core.step()
    core.add_request(request("b", 9, max_tokens=1))
    core.step()
    core.step()
    core.step()
    core.step()
    assert ("b", 0, 8, 1, 1) in [entry for step in recorded(core).steps for entry in step]


def test_salts_and_opting_out() -> None:
    core = small_core(num_blocks=64)
    first = replace(request("x", 9, max_tokens=1), cache_salt="a")
    assert cached(core, first) == 0
    assert cached(core, replace(first, cache_salt="b")) == 0
    assert cached(core, replace(first, cache_salt=None)) == 0
    assert cached(core, replace(first, prefix_caching=False)) == 0
    assert cached(core, first) == 8
    assert cached(core, replace(first, cache_salt="")) == 8  # as None
    stats = core.stats()
    assert (stats.prefix_cache_queries_total, stats.prefix_cache_hits_total) == (45, 16)
    hidden = replace(first, prefix_caching=False, cache_salt="c")
    assert cached(core, hidden) == cached(core, replace(hidden, prefix_caching=None)) == 0


def test_without_a_cache() -> None:
    core = small_core(enable_prefix_caching=False)
    same = request("x", 9, max_tokens=1)
    assert [cached(core, same) for _ in range(3)] == [0, 0, 0]
    assert core.reset_prefix_cache() == 0
    with pytest.raises(InvalidParameterError, match="prefix_caching"):
        core.add_request(replace(same, prefix_caching=True))
    assert core.stats().prefix_cache_queries_total == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [("cache_salt", "é" * 129), ("cache_salt", 1), ("prefix_caching", 1), ("prefix_caching", "")],
)
def test_bad_fields_are_refused(field: str, value: object) -> None:
    changes: dict[str, Any] = {field: value}
    with pytest.raises(InvalidParameterError, match=field):
        small_core().add_request(replace(request("x", 9), **changes))


def test_the_switch_is_true_or_false() -> None:
    with pytest.raises(ConfigError, match="enable_prefix_caching"):
        small_config(enable_prefix_caching=None)


def test_the_tail_of_the_least_recently_used_prefix_is_evicted_first() -> None:
    core = small_core(num_blocks=8)
    long, other = request("long", 13, max_tokens=1), request("other", 9, max_tokens=1)
    other = replace(other, prompt_token_ids=tuple(range(20, 29)))
    assert cached(core, long) == 0  # 3 blocks stay
    assert cached(core, other) == 0  # 2 blocks stay, 3 are free
    fresh = replace(other, prompt_token_ids=tuple(range(30, 46)))  # 4 blocks, one evicted
    assert cached(core, replace(fresh, prefix_caching=False)) == 0
    assert cached(core, replace(long, prefix_caching=False)) == 0  # takes free ones
    assert cached(core, replace(request("again", 12, max_tokens=1))) == 8
    assert cached(core, other) == 8


def test_two_hundred_requests_leave_nothing_in_use() -> None:
    core = small_core(num_blocks=16)
    for i in range(201):
        prompt = ((i // 40) + 1, *(i % 40 + j for j in range(8)))
        assert cached(core, CoreRequest(str(i), prompt, SamplingParams(max_tokens=3))) == 0
        assert core.stats().num_used_blocks == 0
        assert core.block_manager.num_free_blocks == 16


def test_a_reset_forgets_all_and_what_runs_leaves_nothing() -> None:
    core = small_core()
    assert cached(core, request("a", 9, max_tokens=1)) == 0
    core.add_request(request("b", 9, max_tokens=8))
    core.step()
    assert core.reset_prefix_cache() == 0  # b holds both blocks
    drain(core)
    assert cached(core, request("c", 17, max_tokens=1)) == 0
    assert core.reset_prefix_cache() == 4
    assert cached(core, request("c", 17, max_tokens=1)) == 0


def test_a_preempted_request_finds_its_blocks_again() -> None:
    core = small_core(num_blocks=5, max_num_seqs=2)
    core.add_request(request("a", 7, max_tokens=6))
    core.add_request(replace(request("b", 7, max_tokens=6), prompt_token_ids=tuple(range(20, 27))))
    outputs = drain(core)
    assert core.stats().num_preemptions_total == 1
    starts = [e[2:4] for step in recorded(core).steps for e in step if e[0] == "b"]
    assert starts == [(0, 7), (7, 1), (8, 1), (9, 1), (10, 1), (11, 1)]  # nothing twice
    assert {o.num_cached_tokens for o in outputs} == {0}  # as it was when it came
    assert core.stats().prefix_cache_hits_total == 0


def test_samples_share_what_their_request_found() -> None:
    core, alone = small_core(), small_core(enable_prefix_caching=False)
    for engine in (core, alone):
        engine.add_request(request("first", 10, max_tokens=1))
        drain(engine)
        engine.add_request(request("many", 10, n=4, max_tokens=9, seed=3))
    found, computed = drain(core), drain(alone)
    for index in range(4):
        assert tokens_of(found, "many", index) == tokens_of(computed, "many", index)
    assert {o.num_cached_tokens for o in found} == {8}


class FailingRunner(RecordingRunner):
    """Draws `FAILED_TOKEN` for the request called "bad"."""

    def submit(self, plan: StepPlan) -> int:
        handle = super().submit(plan)
        names = [e.sequence.request.core.request_id for e in plan.scheduled]
        read, written, output = self._in_flight[handle]
        tokens = [
            [FAILED_TOKEN] if name == "bad" else drawn
            for name, drawn in zip(names, output.token_ids, strict=True)
        ]
        self._in_flight[handle] = (read, written, StepOutput(plan.step_id, tokens))
        return handle


def test_nobody_finds_what_a_request_without_numbers_has_left() -> None:
    core = small_core(FailingRunner)
    assert cached(core, request("good", 9, max_tokens=1)) == 0
    assert cached(core, request("bad", 17, max_tokens=5)) == 8
    assert cached(core, request("good", 17, max_tokens=1)) == 0
    assert cached(core, request("good", 17, max_tokens=1)) == 16


@pytest.mark.parametrize("length", [3, 4, 5, 7, 8, 9])
def test_prompt_logprobs_compute_the_whole_prompt(length: int) -> None:
    core = small_core()
    for _ in range(2):
        assert cached(core, request("a", length, max_tokens=2, prompt_logprobs=1)) == 0
    starts = [(start, n) for step in recorded(core).steps for _, _, start, n, _ in step]
    assert starts == [(0, length), (length, 1)] * 2
    assert cached(core, request("b", length, max_tokens=2)) == (length - 1) // 4 * 4


def test_blocks_in_quarantine_are_found_and_stay_out_of_the_free_list() -> None:
    """An aborted request's block is found, given up and found while one step is in flight."""
    core = small_core(num_blocks=8, max_num_batched_tokens=9, max_steps_in_flight=3)
    core.add_request(request("a", 9, max_tokens=9))
    core.step()
    manager = core.block_manager
    sequence = core.scheduler.running[0]
    blocks = manager.blocks_of(sequence.order)[:2]
    manager.step_submitted(100)
    manager.free(sequence.order)
    manager.step_submitted(101)
    assert manager.num_quarantined_blocks == 3
    assert manager.admit("x", blocks, 9)
    assert manager.num_quarantined_blocks == 1
    manager.free("x")
    assert manager.num_quarantined_blocks == 4
    manager.step_completed(100)
    manager.audit()
    assert manager.num_quarantined_blocks == 3
    manager.step_completed(101)
    manager.audit()
    assert manager.num_free_blocks == 8


def test_the_config_says_whether_there_is_a_cache() -> None:
    config = EngineConfig(vocab_size=50, num_blocks=4, max_model_len=10)
    assert config.enable_prefix_caching and config.prefix_cache == "radix"


def test_a_kind_of_cache_has_a_name(kind: str) -> None:
    names = {"radix": "RadixCache", "hash": "PrefixCache"}
    assert type(small_core().block_manager.prefix_cache).__name__ == names[kind]
    for name in ("lru", None, 1):
        with pytest.raises(ConfigError, match="prefix_cache must be one of 'radix', 'hash'"):
            small_config(prefix_cache=name)


def test_what_is_generated_is_found_when_it_has_ended() -> None:
    core = small_core()
    core.add_request(request("a", 5, max_tokens=9, seed=3))
    first = [output for _ in range(8) for output in core.step()]
    prompt = (*request("a", 5).prompt_token_ids, *tokens_of(first, "a"))
    longer = CoreRequest("b", prompt, SamplingParams(max_tokens=1))
    sequence = Request(longer, arrival=9, max_tokens=1).sequences[0]
    find = core.block_manager.prefix_cache.find
    assert len(find(sequence)) == 1  # of the prompt
    core.abort("a")
    assert len(find(sequence)) == 3  # 12 of 13 tokens, all of them computed
