"""Runners that compute nothing, to measure and test the service without a model's cost."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import chain

from cupaged.config import EngineConfig
from cupaged.engine.runner import NullRunner, StepOutput
from cupaged.loading.model_files import ModelFiles

_TEXT = "a"


class PacedRunner(NullRunner):
    """A null runner that makes a fixed number of steps a second, as a model would.

    Steps follow one another without a gap, though the loop around them takes time; the first one
    after a pause begins when it is submitted.

    Args:
        steps_per_s: > 0.
        clock: seconds, monotonic. sleep: waits that many seconds.
    """

    def __init__(
        self,
        token_id: int,
        steps_per_s: float,
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(token_id)
        self._seconds = 1.0 / steps_per_s
        self._clock = clock
        self._sleep = sleep
        self._end = clock()

    def collect(self, handle: int) -> StepOutput:
        """Wait for the end of the step."""
        now = self._clock()
        paused = now - self._end > self._seconds
        self._end = (now if paused else self._end) + self._seconds
        if self._end > now:
            self._sleep(self._end - now)
        return super().collect(handle)


def make_null_runner(
    files: ModelFiles, config: EngineConfig, steps_per_s: float | None
) -> NullRunner:
    """A runner that draws the same visible token for ever, which never ends a text."""
    wanted = files.tokenizer.encode(_TEXT, add_special_tokens=False)
    token = next(
        token
        for token in chain(wanted, range(config.vocab_size))
        if token not in files.eos_token_ids and token < config.vocab_size
    )
    return NullRunner(token) if steps_per_s is None else PacedRunner(token, steps_per_s)
