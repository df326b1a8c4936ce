"""A process of the server as far as metrics go: `python -m tests.server.metrics_child FOLDER NAME`.

It makes the same fixed observations each time, says "done" and waits to be ended.
"""

from __future__ import annotations

import sys

from cupaged.outputs import EngineStats, RequestMetrics
from cupaged.server.metrics import EngineMetrics, FrontEndMetrics, store_in

TIMES = RequestMetrics(
    arrival_time=10.0,
    first_scheduled_time=10.5,
    first_token_time=11.0,
    finished_time=13.0,
    num_preemptions=1,
)
STATS = EngineStats(
    num_running=3,
    num_waiting=4,
    num_preempted=1,
    num_preemptions_total=6,
    num_blocks=200,
    num_used_blocks=50,
    num_shared_blocks=0,
    kv_utilisation=1.0,
    num_steps=2,
    prompt_tokens_total=40,
    generation_tokens_total=7,
    num_queued_tokens=77,
    num_swapped=1,
    num_host_blocks=80,
    num_used_host_blocks=20,
    num_swap_preemptions_total=5,
    blocks_swapped_out_total=30,
    blocks_swapped_in_total=10,
    num_kept_host_blocks=9,
    blocks_offloaded_total=40,
    blocks_loaded_total=20,
)


def front_end() -> None:
    """One stream that ends, one that is cancelled, one that stays open, one call that is refused.

    The clock moves on by 0.25 s at each look.
    """
    now = [0.0]

    def clock() -> float:
        now[0] += 0.25
        return now[0]

    metrics = FrontEndMetrics("tiny", clock=clock)
    ends = metrics.received(stream=True, num_bytes=100)
    ends.num_prompt_tokens = 5
    ends.wrote(20)
    ends.wrote(30)
    ends.finished("length", num_tokens=9, times=TIMES, num_bytes=7)
    ends.failed("CANCELLED")  # as in a `finally`: it does not count
    cancelled = metrics.received(stream=True)
    cancelled.failed("CANCELLED")
    metrics.received(stream=True)
    metrics.received(stream=False).failed("RESOURCE_EXHAUSTED", "QUEUE_FULL")


def engine() -> None:
    """Two steps, and the state after them."""
    metrics = EngineMetrics("tiny", block_size=16, num_blocks=200)
    metrics.step(0.02, num_computed=40, num_generated=4)
    metrics.step(0.03, num_computed=3, num_generated=3)
    metrics.update(STATS)


if __name__ == "__main__":
    store_in(sys.argv[1], sys.argv[2])
    engine() if sys.argv[2] == "engine" else front_end()
    print("done", flush=True)
    sys.stdin.read()
