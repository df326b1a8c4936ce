"""How busy the engine is, from its snapshots: what GetLoad and WatchLoad tell."""

from __future__ import annotations

import time
from collections.abc import Callable

from cupaged.config import EngineConfig
from cupaged.outputs import EngineStats
from cupaged.server.engine_client import EngineState
from cupaged.server.serving_state import Phase
from cupaged.v1 import model_pb2 as pb

_STATES: dict[Phase, pb.EngineState.ValueType] = {
    "loading": pb.ENGINE_STATE_LOADING,
    "ready": pb.ENGINE_STATE_READY,
    "draining": pb.ENGINE_STATE_DRAINING,
    "dead": pb.ENGINE_STATE_DEAD,
}


class LoadTracker:
    """Keeps the last snapshot, and the rates since the one before.

    Args:
        clock: seconds, monotonic.
        time_ns: nanoseconds since 1970.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        time_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._clock = clock
        self._time_ns = time_ns
        self._stats: EngineStats | None = None
        self._taken = 0.0
        self._taken_ns = time_ns()
        self._rates = (0.0, 0.0)  # prompt and generated tokens a second
        self._num_starts = 0

    def observe(self, stats: EngineStats) -> None:
        """Take a snapshot that has just come."""
        now, before = self._clock(), self._stats
        elapsed = now - self._taken
        # A restarted engine counts from nothing again.
        if before is not None and stats.num_steps >= before.num_steps and elapsed > 0:
            self._rates = (
                (stats.prompt_tokens_total - before.prompt_tokens_total) / elapsed,
                (stats.generation_tokens_total - before.generation_tokens_total) / elapsed,
            )
        else:
            self._rates = (0.0, 0.0)
        self._stats, self._taken, self._taken_ns = stats, now, self._time_ns()

    def engine_started(self) -> None:
        """An engine process has become ready that was not known before."""
        self._num_starts += 1

    def load(self, state: EngineState, config: EngineConfig | None) -> pb.Load:
        """As a message. While the engine has never told anything, all counts are zero."""
        load = pb.Load(
            state=_STATES[state.phase],
            state_reason=str(state.error() or ""),
            engine_restarts_total=max(0, self._num_starts - 1),
            prompt_tokens_per_second=self._rates[0],
            generation_tokens_per_second=self._rates[1],
        )
        load.snapshot_time.FromNanoseconds(self._taken_ns)
        if config is not None:
            load.max_num_seqs = config.max_num_seqs
            if config.max_num_queued_reqs is not None:
                load.max_num_queued_reqs = config.max_num_queued_reqs
            if config.max_num_queued_tokens is not None:
                load.max_num_queued_tokens = config.max_num_queued_tokens
        stats = self._stats
        if stats is not None:
            load.num_running = stats.num_running
            load.num_waiting = stats.num_waiting + stats.num_preempted
            load.num_preempted = stats.num_preempted
            load.num_queued_tokens = stats.num_queued_tokens
            load.num_kv_blocks = stats.num_blocks
            load.num_used_kv_blocks = stats.num_used_blocks
            load.num_shared_kv_blocks = stats.num_shared_blocks
            load.kv_cache_usage = stats.num_used_blocks / stats.num_blocks
            load.preemptions_total = stats.num_preemptions_total
            load.steps_total = stats.num_steps
            load.prompt_tokens_total = stats.prompt_tokens_total
            load.generation_tokens_total = stats.generation_tokens_total
            load.finished_total.update(stats.finished_total)
        return load
