"""The line of numbers that the engine process logs every ten seconds while it has work."""

from __future__ import annotations

import time
from collections.abc import Callable

from cupaged.outputs import EngineStats


class StatsLine:
    """Makes the line out of snapshots; says nothing while nothing happens.

    Args:
        interval_s: seconds between two lines.
        period_s: seconds between two snapshots while there is work.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        *,
        interval_s: float = 10.0,
        period_s: float = 1.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._interval_s = interval_s
        self._period_s = period_s
        self._clock = clock
        self._since = clock()  # when this interval began
        self._tokens = (0, 0)  # prompt and generation tokens by then
        self._last_seen = self._since
        self._last_tokens = self._tokens

    @property
    def is_due(self) -> bool:
        """True while there is something that no line has told yet: go on taking snapshots."""
        return self._last_tokens != self._tokens

    def observe(self, stats: EngineStats) -> str | None:
        """Take a snapshot; gives the line when an interval is over in which something happened.

        Call it every `period_s` seconds while there is work or `is_due`. After a rest without calls
        an interval begins one period before the first of them.
        """
        now = self._clock()
        tokens = (stats.prompt_tokens_total, stats.generation_tokens_total)
        if now - self._last_seen > self._interval_s and not self.is_due:
            self._since = max(self._since, now - self._period_s)
        self._last_seen, self._last_tokens = now, tokens
        seconds = now - self._since
        if seconds < self._interval_s:
            return None
        new = [after - before for after, before in zip(tokens, self._tokens, strict=True)]
        self._since, self._tokens = now, tokens
        waiting = stats.num_waiting + stats.num_preempted
        if not any(new) and not stats.num_running and not waiting:
            return None
        usage = stats.num_used_blocks / stats.num_blocks if stats.num_blocks else 0.0
        return (
            f"Avg prompt throughput: {new[0] / seconds:.1f} tokens/s, "
            f"Avg generation throughput: {new[1] / seconds:.1f} tokens/s, "
            f"Running: {stats.num_running} reqs, Waiting: {waiting} reqs, "
            f"KV cache usage: {usage:.1%}, Preemptions: {stats.num_preemptions_total}"
        )
