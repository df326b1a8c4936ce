"""What swapping and computing again cost on this device: a short measurement before the first
request, of which the choice between the two is made.

It writes to both KV pools, which hold nothing yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from cupaged.config import EngineConfig
from cupaged.engine.batch import Batch
from cupaged.engine.preemption import PreemptionCosts
from cupaged.engine.warm_up import largest_step, warm_up_batch
from cupaged.ops import KVCache, Ops

__all__ = ["measure_costs"]

_MAX_TOKENS = 64
_MAX_BLOCKS = 64
_REPEATS = 3


def measure_costs(
    ops: Ops,
    caches: Sequence[KVCache],
    host: Sequence[KVCache],
    config: EngineConfig,
    run: Callable[[Batch], object],
    clock: Callable[[], float],
) -> PreemptionCosts:
    """The least of a few times of each: blocks out and in, and one prompt.

    Args:
        host: the blocks of the host, one or more a layer.
        run: computes a step and waits for it.
        clock: seconds.
    """
    one_prompt = replace(config, max_num_seqs=1)
    num_tokens = min(_MAX_TOKENS, largest_step(one_prompt))
    none = np.zeros((0, 2), np.int32)
    prompt = replace(warm_up_batch(num_tokens, one_prompt), swap_out=none, swap_in=none)

    def least(action: Callable[[], object]) -> float:
        times = []
        for _ in range(_REPEATS):
            start = clock()
            action()
            times.append(clock() - start)
        return min(times)

    def swap(num_blocks: int) -> float:
        out = np.stack([anywhere[:num_blocks], np.arange(num_blocks)], 1).astype(np.int32)
        step = ops.begin_step(replace(prompt, swap_out=out, swap_in=out[:, ::-1]))

        def there_and_back() -> None:
            ops.swap_out(caches, host, step)
            ops.swap_in(caches, host, step)
            ops.download([]).wait()

        return least(there_and_back)

    anywhere = np.random.default_rng(0).permutation(config.num_blocks)
    most = min(_MAX_BLOCKS, config.num_blocks, config.num_host_blocks)
    one, many = swap(1), swap(most)
    per_block = max(0.0, many - one) / max(1, most - 1)
    return PreemptionCosts(
        per_swap=max(0.0, one - per_block),
        per_block=per_block,
        per_token=least(lambda: run(prompt)) / num_tokens,
    )
