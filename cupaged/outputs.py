"""What comes back: plain dataclasses, with the names that vLLM users know.

`RequestOutput` and `CompletionOutput` are for people; `CoreOutput` is what the engine core gives,
token ids only, so that it can cross a process boundary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one position: of the token that stands there, then of the likeliest.

    ranks: 1 for the likeliest token; how many tokens are at least as likely.
    """

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


class CoreOutput(msgspec.Struct, gc=False):
    """New tokens of one sequence after a step of the engine core.

    `stop_reason` is the stop token id that ended it, None for EOS and for every other reason.
    `logprobs` has an entry a new token if the request asked, `prompt_logprobs` one for each prompt
    token but the first, in the first output only. `num_preemptions` counts those of the request,
    `num_cached_tokens` the tokens of its prompt that were not computed, since others had done so.

    There is one for each running sequence and step: a `msgspec.Struct` is made five times faster
    than a dataclass, and out of the garbage collector's sight (it is in no cycle).
    """

    request_id: str
    index: int
    new_token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    first_scheduled_time: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times of one request, in seconds on the engine's clock, and what it was spared.

    num_cached_tokens: tokens of the prompt whose KV was in the prefix cache, here or on the host.
    """

    arrival_time: float
    first_scheduled_time: float | None
    first_token_time: float | None
    finished_time: float | None
    num_preemptions: int
    num_cached_tokens: int = 0

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token of any sample."""
        return _between(self.arrival_time, self.first_token_time)

    @property
    def queue_time(self) -> float | None:
        """Seconds from arrival to the first step that computed a part of the prompt."""
        return _between(self.arrival_time, self.first_scheduled_time)

    @property
    def prefill_time(self) -> float | None:
        """Seconds from there to the first token."""
        return _between(self.first_scheduled_time, self.first_token_time)

    @property
    def decode_time(self) -> float | None:
        """Seconds from the first token to the end."""
        return _between(self.first_token_time, self.finished_time)


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token at some position: its log probability, its rank (1 is likeliest), its text."""

    logprob: float
    rank: int | None
    decoded_token: str | None


TokenAlternatives = dict[int, Logprob]  # the token that stands there first, then the likeliest


@dataclass(slots=True)
class CompletionOutput:
    """One sample of a request, as far as it has come.

    `text` is everything final so far and `delta` what this output added to it. `stop_reason` is the
    stop string or stop token id that ended the sample, None for EOS and for other reasons.
    `logprobs` has an entry a token, and `cumulative_logprob` is the sum over the drawn ones, if the
    request asked for them.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[TokenAlternatives] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    delta: str = ""

    @property
    def finished(self) -> bool:
        """True when no more tokens will come."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A request and its samples, in order of their index.

    `prompt_logprobs` has an entry a prompt token, None for the first, if the request asked for it.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    prompt_logprobs: list[TokenAlternatives | None] | None = None
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of the engine core between two steps.

    `kv_utilisation` is the share of the slots in used blocks that hold a token (1.0 when idle).
    `num_queued_tokens` counts the prompt tokens of requests that have never run;
    `prefix_cache_queries_total` those that were looked up in the prefix cache, and
    `prefix_cache_hits_total` those found there. `num_swapped` of the `num_preempted` sequences have
    their KV in the host's memory, in `num_used_host_blocks` of its `num_host_blocks`, and
    `num_swap_preemptions_total` of the preemptions put them there. `num_kept_host_blocks` others
    keep what was evicted from the prefix cache: `blocks_offloaded_total` were copied there, and
    `blocks_loaded_total` came back for a request.
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
    num_queued_tokens: int = 0
    prefix_cache_queries_total: int = 0
    prefix_cache_hits_total: int = 0
    num_swapped: int = 0
    num_host_blocks: int = 0
    num_used_host_blocks: int = 0
    num_swap_preemptions_total: int = 0
    blocks_swapped_out_total: int = 0
    blocks_swapped_in_total: int = 0
    num_kept_host_blocks: int = 0
    blocks_offloaded_total: int = 0
    blocks_loaded_total: int = 0
