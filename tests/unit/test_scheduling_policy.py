"""Priorities, bounded waiting, the bounds of the queue, and chunks that leave room for others."""

from __future__ import annotations

from random import Random

import pytest

from cupaged.engine.core import EngineCore
from cupaged.engine.scheduling_policy import (
    FirstComeFirstServed,
    LongestPrefixFirst,
    PriorityWithBoundedWait,
    make_policy,
)
from cupaged.errors import ConfigError, InvalidParameterError, QueueFullError
from cupaged.request import Request
from tests.unit.small_core import drain, recorded, request, small_core


class Compared(int):
    """An integer that counts how often any is compared."""

    num_comparisons = 0

    def __lt__(self, other: int) -> bool:
        Compared.num_comparisons += 1
        return int(self) < int(other)

    def __eq__(self, other: object) -> bool:
        Compared.num_comparisons += 1
        return int(self) == other

    __hash__ = int.__hash__


def order_of_admission(core: EngineCore) -> list[str]:
    """Request ids in the order in which they first ran."""
    return list(dict.fromkeys(name for ids in recorded(core).ids() for name in ids))


def test_policies_by_name() -> None:
    assert isinstance(make_policy("fcfs"), FirstComeFirstServed)
    assert isinstance(make_policy("priority"), PriorityWithBoundedWait)
    assert isinstance(make_policy("longest-prefix"), LongestPrefixFirst)
    with pytest.raises(
        ConfigError, match="scheduling_policy must be one of 'fcfs', 'priority', 'longest"
    ):
        make_policy("lifo")
    with pytest.raises(ConfigError, match=r"got \['fcfs'\]"):
        make_policy(["fcfs"])  # type: ignore[arg-type]


def test_lower_priority_values_come_first_and_arrival_decides_among_equals() -> None:
    core = small_core(policy=make_policy("priority"), max_num_seqs=1)
    for name, priority in [("a", 5), ("b", 0), ("c", -3), ("d", 0), ("e", 5)]:
        core.add_request(request(name, 3, priority=priority, max_tokens=1))
    drain(core)
    assert order_of_admission(core) == ["c", "b", "d", "a", "e"]


def test_priorities_do_not_matter_to_first_come_first_served() -> None:
    core = small_core(max_num_seqs=1)
    for name, priority in [("a", 5), ("b", 0), ("c", -3)]:
        core.add_request(request(name, 3, priority=priority, max_tokens=1))
    drain(core)
    assert order_of_admission(core) == ["a", "b", "c"]


def test_a_running_sequence_is_not_preempted_to_let_a_more_urgent_one_in() -> None:
    core = small_core(policy=make_policy("priority"), max_num_seqs=1)
    core.add_request(request("low", 3, priority=10, max_tokens=4))
    core.step()
    core.add_request(request("high", 3, priority=0, max_tokens=1))
    drain(core)
    assert recorded(core).ids() == [["low"]] * 4 + [["high"]]


def test_a_preempted_sequence_comes_before_new_ones_of_its_priority() -> None:
    policy = make_policy("priority")
    core = small_core(policy=policy, num_blocks=3, max_num_seqs=2, enable_prefix_caching=False)
    core.add_request(request("a", 4, priority=1, max_tokens=5))
    core.add_request(request("b", 4, priority=1, max_tokens=5))
    core.step()
    core.add_request(request("c", 4, priority=1, max_tokens=1))
    core.step()  # a takes the last block, b is preempted
    assert core.stats().num_preempted == 1
    drain(core)
    ended = recorded(core).ids()
    assert (
        ended.index(["b"]) < next(i for i, ids in enumerate(ended) if "c" in ids)
        or [
            "b",
            "c",
        ]
        in ended
    )


def test_nobody_is_overtaken_more_often_than_allowed() -> None:
    """Urgent requests keep coming; the one that waits is served after exactly three of them."""
    core = small_core(policy=PriorityWithBoundedWait(max_overtakes=3), max_num_seqs=1)
    core.add_request(request("patient", 3, priority=9, max_tokens=1))
    for i in range(10):
        core.add_request(request(f"urgent {i}", 3, priority=0, max_tokens=1))
    drain(core)
    assert order_of_admission(core).index("patient") == 3


def test_urgent_requests_stay_first_after_a_promotion() -> None:
    """Many wait long before the urgent ones come: one of them is let in for every three."""
    core = small_core(policy=PriorityWithBoundedWait(max_overtakes=3), max_num_seqs=1)
    for i in range(4):
        core.add_request(request(f"low {i}", 3, priority=9, max_tokens=1))
    for i in range(8):
        core.add_request(request(f"urgent {i}", 3, priority=0, max_tokens=1))
    drain(core)
    kinds = [name.split()[0] for name in order_of_admission(core)]
    urgent = ["urgent"] * 3
    assert kinds == [*urgent, "low", *urgent, "low", "urgent", "urgent", "low", "low"]


def test_a_promoted_sequence_is_not_the_victim_of_later_urgent_ones() -> None:
    core = small_core(policy=PriorityWithBoundedWait(max_overtakes=1), num_blocks=3, max_num_seqs=2)
    core.add_request(request("urgent 0", 8, priority=0, max_tokens=1))
    core.add_request(request("patient", 8, priority=9, max_tokens=5))
    core.step()  # the first leaves again; it has overtaken nobody, since it came first
    core.add_request(request("urgent 1", 12, priority=0, max_tokens=1))
    core.step()  # overtakes: the patient one is promoted
    assert core.scheduler.policy.peek() is not None
    core.add_request(request("urgent 2", 4, priority=0, max_tokens=4))
    drain(core)
    preempted = {s.request.core.request_id for plan in recorded(core).plans for s in plan.preempted}
    assert "patient" not in preempted


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in range(1, 5))]
)
def test_everybody_is_served_within_the_bound(seed: int) -> None:
    """The documented bound: (k + 1) * (max_overtakes + 1) admissions, k older ones waiting."""
    random, bound = Random(seed), 4
    policy = PriorityWithBoundedWait(max_overtakes=bound)
    core = small_core(policy=policy, max_num_seqs=2, num_blocks=8)
    limit: dict[str, int] = {}
    admitted: list[str] = []
    for i in range(400):
        if random.random() < 0.6:
            name = f"{i}"
            limit[name] = len(admitted) + (len(policy) + len(core.scheduler.running) + 1) * (
                bound + 1
            )
            core.add_request(request(name, random.randint(1, 9), priority=random.randint(0, 3)))
        core.step()
        core.audit()
        admitted = order_of_admission(core)
    drain(core)
    admitted = order_of_admission(core)
    assert len(admitted) == len(limit)
    assert all(admitted.index(name) <= limit[name] for name in limit)


def test_to_take_a_request_out_costs_little_however_many_wait() -> None:
    policy = make_policy("priority")
    waiting = [
        Request(request(str(i), 2), arrival=i, max_tokens=1).sequences[0] for i in range(999)
    ]
    for i, sequence in enumerate(waiting):
        sequence.order = (Compared(i), 0)
        policy.add(sequence)
    Compared.num_comparisons = 0
    policy.remove(waiting[500])
    assert Compared.num_comparisons < 100  # two bisections of ten halvings, two comparisons each
    assert len(policy) == 998


def test_requests_that_wait_are_bounded_in_number() -> None:
    core = small_core(max_num_seqs=1, max_num_queued_reqs=2)
    core.add_request(request("a", 3, max_tokens=4))
    core.step()
    core.add_request(request("b", 3, max_tokens=1))
    core.add_request(request("c", 3, max_tokens=1))
    with pytest.raises(QueueFullError, match="3 requests would wait, at most 2 may; 2 requests"):
        core.add_request(request("d", 3, max_tokens=1))
    drain(core)
    core.add_request(request("d", 3, max_tokens=1))
    drain(core)
    assert order_of_admission(core) == ["a", "b", "c", "d"]


def test_prompt_tokens_that_wait_are_bounded() -> None:
    core = small_core(max_num_queued_tokens=10)
    core.add_request(request("a", 12, max_tokens=1))  # an empty queue takes any request
    with pytest.raises(QueueFullError, match="17 prompt tokens would wait, at most 10 may"):
        core.add_request(request("b", 5, max_tokens=1))
    core.step()
    core.add_request(request("b", 5, max_tokens=1))
    core.add_request(request("c", 5, max_tokens=1))
    assert core.abort("b")
    core.add_request(request("d", 5, max_tokens=1))
    drain(core)
    assert order_of_admission(core) == ["a", "c", "d"]


def test_a_refused_request_leaves_nothing_behind() -> None:
    core = small_core(max_num_seqs=1, max_num_queued_reqs=1)
    core.add_request(request("a", 3, max_tokens=1))
    with pytest.raises(QueueFullError):
        core.add_request(request("b", 3, max_tokens=1))
    assert not core.holds("b")
    core.audit()


def test_preempted_sequences_do_not_count_as_queued() -> None:
    core = small_core(
        num_blocks=3, max_num_seqs=2, max_num_queued_reqs=1, enable_prefix_caching=False
    )
    core.add_request(request("a", 4, max_tokens=5))
    core.step()
    core.add_request(request("b", 4, max_tokens=5))
    core.step()
    core.step()
    assert core.stats().num_preempted == 1
    core.add_request(request("c", 4, max_tokens=1))
    drain(core)


def test_a_long_prompt_leaves_room_in_every_step() -> None:
    core = small_core(max_num_batched_tokens=8, long_prefill_token_threshold=3)
    core.add_request(request("long", 9, max_tokens=1))
    core.add_request(request("short", 2, max_tokens=2))
    drain(core)
    assert recorded(core).steps == [
        [("long", 0, 0, 3, 0), ("short", 0, 0, 2, 1)],
        [("long", 0, 3, 3, 0), ("short", 0, 2, 1, 1)],
        [("long", 0, 6, 3, 1)],
    ]


@pytest.mark.parametrize("priority", [1.5, "high", None, True, 2**63])
def test_a_priority_is_an_integer(priority: object) -> None:
    core = small_core()
    with pytest.raises(InvalidParameterError, match="priority must be an integer in"):
        core.add_request(request("a", 3, priority=priority))  # type: ignore[arg-type]
    core.add_request(request("a", 3, max_tokens=1))
    drain(core)
