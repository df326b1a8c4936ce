"""How much of its prompts an engine finds in its cache, by the size of the pool, and at best.

The real engine core serves a recorded trace whose prompts are named by blocks of 512 tokens. One
token of the simulation stands for such a block, and the block size is 1: the same blocks are found
as with single tokens and blocks of 512. In both a prompt of L tokens has ceil(L / 512) blocks, and
its last one is always computed: it is partly filled, or holds the token that must be left to
compute. Answers take the blocks that they would fill.

The engine is saturated: `NUM_WAITING` requests wait at any time, in the order of the trace, so that
the figures depend on no model of time.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from bench.traces import PREFIX_BLOCK_TOKENS, BlockedRequest
from cupaged.config import EngineConfig
from cupaged.engine.core import EngineCore
from cupaged.engine.runner import NullRunner
from cupaged.engine.scheduling_policy import make_policy
from cupaged.request import CoreRequest
from cupaged.sampling_params import SamplingParams

NUM_WAITING = 256
MAX_NUM_SEQS = 16
MAX_NUM_BATCHED_BLOCKS = 16  # 8,192 tokens a step
# How prefixes are found, and in which order requests are served.
STRATEGIES = {
    "hash": ("hash", "fcfs"),
    "radix": ("radix", "fcfs"),
    "radix longest-prefix": ("radix", "longest-prefix"),
}


def engine_config(
    trace: Sequence[BlockedRequest], num_blocks: int, prefix_cache: str
) -> EngineConfig:
    """An engine of blocks of one token, which stands for 512."""
    largest = 1 + max(max(request.block_ids) for request in trace)
    longest = max(_num_blocks(request) for request in trace)
    return EngineConfig(
        vocab_size=largest + 1,  # and one for answers
        num_blocks=num_blocks,
        block_size=1,
        max_model_len=longest + 1,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_NUM_BATCHED_BLOCKS,
        prefix_cache=prefix_cache,
    )


def hit_rate(trace: Sequence[BlockedRequest], num_blocks: int, strategy: str) -> float:
    """Percentage of the prompts' blocks that the engine finds; `strategy` is in `STRATEGIES`."""
    prefix_cache, policy = STRATEGIES[strategy]
    config = engine_config(trace, num_blocks, prefix_cache)
    core = EngineCore(
        config,
        NullRunner(config.vocab_size - 1),  # a token that is in no prompt
        policy=make_policy(policy),
    )
    coming = iter(enumerate(trace))
    while True:
        while core.scheduler.num_queued_reqs < NUM_WAITING and (entry := next(coming, None)):
            i, request = entry
            # The last token is drawn, but its KV is never written.
            max_tokens = _num_blocks(request) - len(request.block_ids) + 1
            params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, detokenize=False)
            core.add_request(CoreRequest(str(i), request.block_ids, params))
        if not core.has_unfinished_requests:
            break
        core.step()
    stats = core.stats()
    return 100 * stats.prefix_cache_hits_total / stats.prefix_cache_queries_total


def best_hit_rate_in_order(trace: Iterable[BlockedRequest], num_blocks: int) -> float:
    """A bound on every cache of that size that serves in the order of the trace, in percent.

    It is Belady's: of the blocks in the cache that is given up which is needed last (IBM Systems
    Journal 5(2), 1966). Requests come one at a time, and blocks need not stay in the pool while
    their request runs.
    """
    references = [
        (block, i == len(request.block_ids) - 1)
        for request in trace
        for i, block in enumerate(request.block_ids)
    ]
    never = len(references)
    next_use = [never] * never
    seen: dict[int, int] = {}
    for time in range(never - 1, -1, -1):
        block, is_last = references[time]
        if block in seen:
            next_use[time] = seen[block]
        # The last block of a prompt is computed anyway: it is no use to have kept it until then.
        seen[block] = never if is_last else time
    kept: dict[int, int] = {}  # block: next use
    latest: list[tuple[int, int]] = []  # (-next use, block), some of them past
    hits = 0
    for time, (block, _) in enumerate(references):
        hits += kept.pop(block, None) == time
        if next_use[time] == never:
            continue
        kept[block] = next_use[time]
        heapq.heappush(latest, (-next_use[time], block))
        while len(kept) > num_blocks:
            use, victim = heapq.heappop(latest)
            if kept.get(victim) == -use:
                del kept[victim]
    return 100 * hits / never


def best_hit_rate(trace: Iterable[BlockedRequest]) -> float:
    """A bound for any order and any size, in percent: every block is computed once.

    Last blocks of prompts are computed each time.
    """
    total = hits = 0
    known: set[int] = set()
    for request in trace:
        total += len(request.block_ids)
        hits += len(known.intersection(request.block_ids[:-1]))
        known.update(request.block_ids)
    return 100 * hits / total


def _num_blocks(request: BlockedRequest) -> int:
    """Blocks of prompt and answer."""
    return -(-(request.input_tokens + request.output_tokens) // PREFIX_BLOCK_TOKENS)
