"""What comes back: plain dataclasses, with the names that vLLM users know.

`RequestOutput` and `CompletionOutput` are for people; `CoreOutput` is what the engine core gives,
token ids only, so that it can cross a process boundary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(slots=True)
class CoreOutput:
    """New tokens of one sequence after a step of the engine core.

    `stop_reason` is the stop token id that ended it, None for EOS and for every other reason.
    `num_preemptions` counts those of the whole request.
    """

    request_id: str
    index: int
    new_token_ids: list[int]
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times of one request, in seconds on the engine's clock."""

    arrival_time: float
    first_token_time: float | None
    finished_time: float | None
    num_preemptions: int

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token of any sample."""
        if self.first_token_time is None:
            return None
        return self.first_token_time - self.arrival_time


@dataclass(slots=True)
class CompletionOutput:
    """One sample of a request, as far as it has come.

    `text` is everything final so far and `delta` what this output added to it. `stop_reason` is the
    stop string or stop token id that ended the sample, None for EOS and for other reasons.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    delta: str = ""

    @property
    def finished(self) -> bool:
        """True when no more tokens will come."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A request and its samples, in order of their index."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    prompt_logprobs: None = None
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of the engine core between two steps.

    `kv_utilisation` is the share of the slots in used blocks that hold a token (1.0 when idle).
    """

    num_running: int
    num_waiting: int
    num_preempted: int
    num_preemptions_total: int
    num_blocks: int
    num_used_blocks: int
    num_shared_blocks: int
    kv_utilisation: float
    num_steps: int
    prompt_tokens_total: int
    generation_tokens_total: int
    finished_total: dict[str, int] = field(default_factory=dict)
