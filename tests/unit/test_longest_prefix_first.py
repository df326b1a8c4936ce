"""The cache-aware order of the waiting queue, its bound on waiting, and what it costs."""

from __future__ import annotations

import pytest

from cupaged.config import PREFIX_CACHES
from cupaged.engine.core import EngineCore
from cupaged.engine.scheduling_policy import NUM_LOOKED_UP, LongestPrefixFirst
from cupaged.request import CoreRequest, Request, Sequence, SequenceStatus
from cupaged.sampling_params import SamplingParams
from tests.unit.small_core import drain, recorded, small_core


def asking(name: str, *prompt: int, max_tokens: int = 1) -> CoreRequest:
    """A request for few tokens."""
    return CoreRequest(name, prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True))


def order_of_admission(core: EngineCore) -> list[str]:
    """Request ids in the order in which they first ran."""
    return list(dict.fromkeys(name for ids in recorded(core).ids() for name in ids))


@pytest.mark.parametrize("kind", PREFIX_CACHES)
def test_the_longest_prefix_comes_first_and_arrival_decides_among_equals(kind: str) -> None:
    core = small_core(policy=LongestPrefixFirst(), max_num_seqs=1, prefix_cache=kind)
    core.add_request(asking("warm", *range(13)))
    drain(core)
    for name, prompt in [
        ("nothing", range(20, 33)),
        ("two", [*range(8), 40, 41, 42]),
        ("also two", [*range(8), 43, 44]),
        ("three", range(13)),
        ("one", [*range(5), 45]),
    ]:
        core.add_request(asking(name, *prompt))
    drain(core)
    assert order_of_admission(core) == ["warm", "three", "two", "also two", "one", "nothing"]


def test_what_has_come_into_the_cache_meanwhile_counts() -> None:
    core = small_core(policy=LongestPrefixFirst(), max_num_seqs=1)
    core.add_request(asking("first", *range(9)))
    core.add_request(asking("other", *range(20, 29)))
    core.add_request(asking("like the first", *range(9)))  # nothing is cached yet
    drain(core)
    assert order_of_admission(core) == ["first", "like the first", "other"]


def test_what_has_left_the_cache_meanwhile_does_not_count() -> None:
    core = small_core(policy=LongestPrefixFirst(), max_num_seqs=1)
    core.add_request(asking("warm", *range(9)))
    drain(core)
    core.add_request(asking("busy", 40, max_tokens=3))
    core.step()
    core.add_request(asking("other", *range(20, 29)))
    core.add_request(asking("like the first", *range(9)))
    core.reset_prefix_cache()
    drain(core)
    assert order_of_admission(core) == ["warm", "busy", "other", "like the first"]


def test_nobody_is_overtaken_more_often_than_allowed() -> None:
    core = small_core(policy=LongestPrefixFirst(max_overtakes=3), max_num_seqs=1)
    core.add_request(asking("warm", *range(9)))
    drain(core)
    core.add_request(asking("patient", *range(20, 29)))
    for i in range(8):
        core.add_request(asking(f"cached {i}", *range(9)))
    drain(core)
    assert order_of_admission(core).index("patient") == 1 + 3


def test_preempted_sequences_come_before_all_that_have_never_run() -> None:
    core = small_core(policy=LongestPrefixFirst(), num_blocks=5, max_num_seqs=2)
    core.add_request(asking("a", *range(7), max_tokens=6))
    core.add_request(asking("b", *range(20, 27), max_tokens=6))
    core.step()
    core.add_request(asking("like a", *range(7)))
    drain(core)
    assert core.stats().num_preemptions_total == 1
    admitted = [s.request.core.request_id for p in recorded(core).plans for s in p.admitted]
    assert admitted == ["a", "b", "b", "like a"]


@pytest.mark.parametrize("status", [SequenceStatus.PREEMPTED, SequenceStatus.SWAPPED])
def test_whoever_gave_way_comes_first_wherever_its_blocks_are(status: SequenceStatus) -> None:
    policy = LongestPrefixFirst()
    policy.use(FindingCache())  # type: ignore[arg-type]
    new, old = [
        Request(asking(str(i), *range(n)), arrival=i, max_tokens=1).sequences[0]
        for i, n in enumerate([9, 2])
    ]
    policy.add(new)
    old.status = status
    policy.add_preempted(old)
    assert policy.peek() is old


class FindingCache:
    """Finds a block for each token."""

    def find(self, sequence: Sequence) -> list[int]:
        """The tokens."""
        return sequence.token_ids


class CountingCache:
    """Finds nothing, and counts who asks."""

    def __init__(self) -> None:
        self.num_looks = 0

    def find(self, sequence: Sequence) -> list[int]:
        """No block."""
        self.num_looks += 1
        return []


@pytest.mark.parametrize("num_waiting", [1, 5, 1000])
def test_a_look_at_the_queue_costs_the_same_however_long_it_is(num_waiting: int) -> None:
    cache, policy = CountingCache(), LongestPrefixFirst()
    policy.use(cache)  # type: ignore[arg-type]
    for i in range(num_waiting):
        policy.add(Request(asking(str(i), 1, 2), arrival=i, max_tokens=1).sequences[0])
    assert cache.num_looks == num_waiting  # once when each came
    first = policy.peek()
    assert first is not None and first.order == (0, 0)
    assert cache.num_looks == num_waiting + min(num_waiting, NUM_LOOKED_UP) + 1
