"""Faults of the prefix caches of other engines, by their numbers in the list of cases: none here.

Each holds for both kinds of cache.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from cupaged.config import PREFIX_CACHES
from cupaged.engine.block_names import NO_PARENT, hash_block
from cupaged.engine.core import EngineCore
from cupaged.engine.radix_cache import RadixCache
from cupaged.request import CoreRequest, Request
from cupaged.sampling_params import SamplingParams
from tests.unit.small_core import drain, recorded, request, small_core, tokens_of


def serve(core: EngineCore, core_request: CoreRequest) -> tuple[int, list[int]]:
    """Run a request to its end; the tokens that it found, and those that it gave."""
    core.add_request(core_request)
    outputs = drain(core)
    return outputs[-1].num_cached_tokens, tokens_of(outputs, core_request.request_id)


@pytest.mark.parametrize("kind", PREFIX_CACHES)
@pytest.mark.parametrize(("length", "found"), [(4, 0), (8, 4), (12, 8)])
def test_bm_01_a_prompt_of_whole_blocks_again(kind: str, length: int, found: int) -> None:
    """At least one token is computed, nothing stays in use, and the third time finds as much."""
    core = small_core(prefix_cache=kind)
    first, second, third = (serve(core, request("a", length, max_tokens=2)) for _ in range(3))
    assert (first[0], second[0], third[0]) == (0, found, found)
    assert first[1] == second[1] == third[1]
    assert all(entry[3] >= 1 for step in recorded(core).steps for entry in step)
    assert not core.block_manager.ref_counts.any()


@pytest.mark.parametrize("kind", PREFIX_CACHES)
@pytest.mark.parametrize("length", [3, 4, 5, 7, 8, 9])
def test_bm_03_log_probabilities_of_a_prompt_again(kind: str, length: int) -> None:
    """With a full cached block, too, all of the prompt is computed, and the answers are equal."""
    core = small_core(prefix_cache=kind)
    asked = request("a", length, max_tokens=2, prompt_logprobs=1)
    first, second = serve(core, asked), serve(core, asked)
    assert first == second and first[0] == 0


def test_bm_04_variants_of_a_model_do_not_meet_in_the_table() -> None:
    variants = ((("adapter", "a"),), (("adapter", "b"),), ())
    assert len({hash_block(NO_PARENT, b"tokens", extras) for extras in variants}) == 3


def test_bm_04_variants_of_a_model_do_not_meet_in_the_tree() -> None:
    cache = RadixCache(4)
    keys = set()
    for extras in ((("adapter", "a"),), (("adapter", "b"),), ()):
        asked = Request(request("a", 4), arrival=0, max_tokens=1)
        asked.cache_extras = extras
        keys.add(cache._key(asked.sequences[0], 0))
    assert len(keys) == 3


@pytest.mark.parametrize("kind", PREFIX_CACHES)
def test_bm_04_salts_do_not_meet(kind: str) -> None:
    core = small_core(prefix_cache=kind)
    asked = request("a", 9, max_tokens=1)
    salts = ("a", "b", None, "a", "b", None)
    found = [serve(core, replace(asked, cache_salt=salt))[0] for salt in salts]
    assert found == [0, 0, 0, 8, 8, 8]


@pytest.mark.parametrize("kind", PREFIX_CACHES)
def test_bm_06_after_new_weights_nothing_is_found(kind: str) -> None:
    """Nor is what began before them, and ends after."""
    core = small_core(prefix_cache=kind)
    asked = request("a", 9, max_tokens=6)
    assert [serve(core, asked)[0] for _ in range(2)] == [0, 8]
    core.add_request(replace(asked, request_id="old"))
    core.step()
    core.reset_prefix_cache()
    drain(core)
    assert [serve(core, asked)[0] for _ in range(2)] == [0, 8]


@pytest.mark.parametrize("kind", PREFIX_CACHES)
def test_bm_10_cached_blocks_are_not_in_use(kind: str) -> None:
    """200 prompts through a pool of 16 blocks; each leaves it free, and one more is served."""
    core = small_core(prefix_cache=kind, num_blocks=16)
    for i in range(201):
        prompt = (i // 40 + 1, *(i % 40 + j for j in range(8)))
        found, tokens = serve(core, CoreRequest(str(i), prompt, SamplingParams(max_tokens=3)))
        assert (found, len(tokens)) == (0, 3)
        stats = core.stats()
        assert stats.num_used_blocks == 0 and 0 <= stats.kv_utilisation <= 1
        assert core.block_manager.num_free_blocks == 16
