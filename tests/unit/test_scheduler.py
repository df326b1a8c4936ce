"""Who runs in which step: small situations worked out by hand."""

from __future__ import annotations

from random import Random

import pytest

from cupaged.engine.core import EngineCore
from cupaged.engine.scheduling_policy import PriorityWithBoundedWait
from cupaged.request import SequenceStatus
from tests.unit.small_core import drain, endings, recorded, request, small_core


def first_steps(core: EngineCore, request_id: str) -> int:
    """The number of the step in which a request runs first."""
    return next(i for i, ids in enumerate(recorded(core).ids()) if request_id in ids)


def test_a_prompt_is_computed_in_chunks_of_the_token_budget() -> None:
    core = small_core(max_num_batched_tokens=4)
    core.add_request(request("a", 10, max_tokens=2))
    drain(core)
    assert recorded(core).steps == [
        [("a", 0, 0, 4, 0)],
        [("a", 0, 4, 4, 0)],
        [("a", 0, 8, 2, 1)],
        [("a", 0, 10, 1, 1)],
    ]


def test_running_sequences_come_first_and_a_new_prompt_gets_what_is_left() -> None:
    core = small_core(max_num_batched_tokens=4)
    core.add_request(request("a", 3, max_tokens=4))
    core.step()
    core.add_request(request("b", 7, max_tokens=1))
    drain(core)
    assert recorded(core).steps == [
        [("a", 0, 0, 3, 1)],
        [("a", 0, 3, 1, 1), ("b", 0, 0, 3, 0)],
        [("a", 0, 4, 1, 1), ("b", 0, 3, 3, 0)],
        [("a", 0, 5, 1, 1), ("b", 0, 6, 1, 1)],
    ]


def test_a_prompt_waits_until_all_of_it_fits_and_is_then_not_preempted() -> None:
    """10 blocks; one that runs holds 6 and grows to 8; a prompt of 8 comes in chunks of 2."""
    core = small_core(num_blocks=10, max_num_batched_tokens=8, enable_prefix_caching=False)
    core.add_request(request("running", 22, max_tokens=9))
    for _ in range(3):
        core.step()
    assert core.stats().num_used_blocks == 6
    core.add_request(request("long", 32, max_tokens=2))
    drain(core)
    ids = recorded(core).ids()
    assert max(i for i, step in enumerate(ids) if "running" in step) < first_steps(core, "long")
    assert core.stats().num_preemptions_total == 0


def test_nobody_overtakes_the_head_of_the_queue() -> None:
    """12 blocks, 8 of them held; the head needs 8, the small request behind it 1: both wait."""
    core = small_core(num_blocks=12, enable_prefix_caching=False)
    core.add_request(request("running", 29, max_tokens=4))
    core.step()
    core.add_request(request("big", 32, max_tokens=2))
    core.add_request(request("small", 3, max_tokens=2))
    assert (core.stats().num_used_blocks, core.stats().num_waiting) == (8, 2)
    drain(core)
    assert first_steps(core, "running") < first_steps(core, "big") <= first_steps(core, "small")
    assert recorded(core).ids()[1:4] == [["running"]] * 3
    assert recorded(core).ids()[4] == ["big", "small"]


def test_the_latest_arrival_gives_way_and_comes_back_before_new_requests() -> None:
    """4 blocks of 4 tokens: two sequences of 7 tokens fill them and both grow past a block edge."""
    core = small_core(num_blocks=4, max_num_seqs=2, enable_prefix_caching=False)
    core.add_request(request("a", 7, max_tokens=6))
    core.add_request(request("b", 7, max_tokens=6))
    core.add_request(request("c", 3, max_tokens=1))
    core.step()  # both prompts; the sequences are 8 tokens long then
    core.step()  # 9 tokens
    outputs = core.step()  # position 8 needs a third block each
    plan = recorded(core).plans[2]
    assert [e.sequence.request.core.request_id for e in plan.scheduled] == ["a"]
    assert [s.request.core.request_id for s in plan.preempted] == ["b"]
    assert plan.preempted[0].status is SequenceStatus.PREEMPTED
    assert [o.request_id for o in outputs] == ["a"]
    stats = core.stats()
    assert (stats.num_running, stats.num_preempted, stats.num_waiting) == (1, 1, 1)
    outputs = drain(core)
    ids = recorded(core).ids()
    assert ids[3:6] == [["a"]] * 3
    assert ids[6] == ["b", "c"]
    assert recorded(core).steps[6][0] == ("b", 0, 0, 9, 1)  # prompt and output, all again
    assert core.stats().num_preemptions_total == 1
    assert {o.num_preemptions for o in outputs if o.request_id == "b"} == {1}


@pytest.mark.parametrize("first", ["low", "high"])
def test_the_least_urgent_gives_way_and_is_not_in_the_plan(first: str) -> None:
    """Two blocks, full; the urgent sequence is served first and needs one more."""
    core = small_core(num_blocks=2, policy=PriorityWithBoundedWait())
    requests = {
        "low": request("low", 2, priority=2, max_tokens=3),
        "high": request("high", 4, priority=-1, max_tokens=2),
    }
    for name in (first, *(requests.keys() - {first})):
        core.add_request(requests[name])
    core.step()
    core.step()
    plan = recorded(core).plans[1]
    assert [e.sequence.request.core.request_id for e in plan.scheduled] == ["high"]
    assert [s.request.core.request_id for s in plan.preempted] == ["low"]
    assert plan.num_tokens == 1  # the victim's share of the budget is not counted
    drain(core)


def test_the_least_urgent_gives_way_when_it_asks_itself() -> None:
    core = small_core(num_blocks=2, policy=PriorityWithBoundedWait())
    core.add_request(request("low", 4, priority=2, max_tokens=2))
    core.add_request(request("high", 2, priority=0, max_tokens=3))
    core.step()
    core.step()
    plan = recorded(core).plans[1]
    assert [e.sequence.request.core.request_id for e in plan.scheduled] == ["high"]
    assert [s.request.core.request_id for s in plan.preempted] == ["low"]
    drain(core)


def test_a_policy_that_is_empty_is_still_the_policy() -> None:
    core = small_core(policy=PriorityWithBoundedWait(), max_num_seqs=1)
    core.add_request(request("low", 2, priority=2, max_tokens=3))
    core.step()
    core.add_request(request("lower", 2, priority=2, max_tokens=1))
    core.add_request(request("high", 2, priority=0, max_tokens=1))
    drain(core)
    # Urgent requests overtake in the queue, but nobody is preempted to let them in.
    assert recorded(core).ids() == [["low"]] * 3 + [["high"], ["lower"]]


@pytest.mark.parametrize(("length", "admitted"), [(12, True), (13, False)])
def test_the_watermark_stays_free_beside_others(length: int, admitted: bool) -> None:
    """10 blocks, 4 held, 3 kept free: a prompt may take 3."""
    core = small_core(num_blocks=10, watermark=0.3, enable_prefix_caching=False)
    core.add_request(request("a", 13, max_tokens=2))
    core.step()
    core.add_request(request("b", length, max_tokens=1))
    outputs = core.step()
    assert ("b" in recorded(core).ids()[1]) is admitted
    assert endings(outputs + drain(core))["b", 0] == ("length", None)


def test_the_watermark_does_not_keep_a_sequence_from_running_alone() -> None:
    core = small_core(num_blocks=10, watermark=0.9)
    core.add_request(request("a", 40, max_tokens=1))
    assert endings(drain(core)) == {("a", 0): ("length", None)}


def test_samples_that_come_later_have_their_places_kept() -> None:
    core = small_core(max_num_batched_tokens=2)
    core.add_request(request("three", 4, n=3, max_tokens=2))
    core.add_request(request("two", 2, n=2, max_tokens=1))
    core.add_request(request("one", 2, n=1, max_tokens=1))
    drain(core)
    assert recorded(core).ids()[:4] == [
        ["three"],
        ["three"],  # the prompt is done; 3 of 4 places are taken, and `two` needs 2
        ["three", "three"],  # both samples end here
        ["three", "two"],
    ]


def test_a_sequence_in_flight_is_passed_over() -> None:
    core = small_core(max_num_batched_tokens=1, max_steps_in_flight=2)
    core.add_request(request("a", 1, max_tokens=2))
    core.add_request(request("b", 1, max_tokens=2))
    drain(core)
    assert recorded(core).ids() == [["a"], ["b"], ["a"], ["b"]]


def test_preemption_waits_for_steps_in_flight() -> None:
    """What a victim gives back would be in quarantine, so the step is collected first."""
    core = small_core(num_blocks=2, max_num_batched_tokens=4, max_steps_in_flight=2)
    core.add_request(request("a", 4, max_tokens=5))
    core.add_request(request("b", 4, max_tokens=5))
    outputs = drain(core)
    assert endings(outputs) == {("a", 0): ("length", None), ("b", 0): ("length", None)}
    assert core.stats().num_preemptions_total == 1


def test_nobody_starves_in_a_thousand_steps() -> None:
    """At most 6 requests of at most 16 tokens at once: each is done within 6 * 16 steps.

    The earliest request gets at least one token in every step and is never a victim.
    """
    random, core = Random(0), small_core(num_blocks=6, max_num_batched_tokens=5, max_num_seqs=3)
    added: dict[str, int] = {}
    first_tokens: list[str] = []
    ages: list[int] = []
    for step in range(1000):
        while len(added) - len(ages) < 6:
            request_id = str(len(added))
            length, most = random.randint(1, 8), random.randint(1, 8)
            core.add_request(request(request_id, length, max_tokens=most, seed=step))
            added[request_id] = step
        for output in core.step():
            if output.request_id not in first_tokens:
                first_tokens.append(output.request_id)
            if output.finish_reason is not None:
                ages.append(step - added[output.request_id])
        core.audit()
    assert first_tokens == [str(i) for i in range(len(first_tokens))]
    assert len(ages) > 100
    assert max(ages) <= 6 * 16
    assert core.stats().num_preemptions_total > 0
