"""The requests that both schedulers get, and the limits they work under. Standard library only.

Lengths are uniform, with the means of ShareGPT (prompts of 161 tokens, outputs of 338; Kwon et al.,
SOSP 2023, Fig. 11); tokens are random, so that no prefix is ever found twice.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

NUM_REQUESTS = 10_000
VOCAB_SIZE = 50_000
BLOCK_SIZE = 16
MAX_MODEL_LEN = 2048
MAX_NUM_BATCHED_TOKENS = 8192  # more than the running sequences take, so that prompts fit beside
PROMPT_TOKENS, OUTPUT_TOKENS = (1, 321), (1, 675)


@dataclass(frozen=True, slots=True)
class Settings:
    """What differs between the schedulers that are compared."""

    num_running: int
    num_blocks: int = 60_000
    enable_prefix_caching: bool = True

    def as_json(self) -> dict[str, Any]:
        """The same as plain values."""
        return asdict(self)


def requests(num_requests: int = NUM_REQUESTS) -> Iterator[tuple[list[int], int]]:
    """Prompt and number of output tokens of each request; always the same."""
    random = Random(7)
    for _ in range(num_requests):
        length = random.randint(*PROMPT_TOKENS)
        yield random.choices(range(VOCAB_SIZE), k=length), random.randint(*OUTPUT_TOKENS)


@dataclass(frozen=True, slots=True)
class Window:
    """Some steps: processor seconds, sequences that were scheduled, and requests that ended.

    parts: the seconds by what they were spent on, where that was measured.
    """

    steps: int
    seconds: float
    scheduled: int
    finished: int
    parts: dict[str, float]


def settle() -> None:
    """What lives now is never looked at by the garbage collector again, as in servers."""
    gc.collect()
    gc.freeze()


def measure(steps: int, step: Callable[[], tuple[float, int, int, dict[str, float]]]) -> Window:
    """Make some steps; `step` gives seconds, scheduled sequences, ended requests, and parts."""
    seconds, scheduled, finished = 0.0, 0, 0
    parts: dict[str, float] = {}
    for _ in range(steps):
        spent, of_step, ended, by_part = step()
        seconds, scheduled, finished = seconds + spent, scheduled + of_step, finished + ended
        for name, value in by_part.items():
            parts[name] = parts.get(name, 0.0) + value
    return Window(steps, seconds, scheduled, finished, parts)
