"""A request and its sequences.

A request owns one sequence or several (its `n` samples). All of them begin as one: the prompt is
computed once, then `Sequence.fork` makes the others, which share its KV blocks. Nothing here knows
blocks, batches or text.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from cupaged.logits_rules import rules_of
from cupaged.outputs import FinishReason, TokenLogprobs
from cupaged.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class CoreRequest:
    """What the engine core takes: token ids and numbers, no text.

    Args:
        request_id: unique among the unfinished requests.
        prompt_token_ids: at least one id, each in [0, vocab_size).
        params: sampling and stopping; its stop strings are the text shell's business.
        eos_token_ids: ids that end a sequence unless `params.ignore_eos`.
        seed: 64-bit key of the random numbers; sample i of the request uses (seed, i).
        priority: lower is served earlier where the scheduling policy looks at it.
        bad_words_token_ids: sequences of ids that must not be generated.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    seed: int = 0
    priority: int = 0
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()


class SequenceStatus(enum.Enum):
    """Where a sequence is. Only RUNNING sequences hold KV blocks."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED = enum.auto()


class Request:
    """A request inside the core: its limits and its sequences."""

    __slots__ = (
        "arrival",
        "cancelled",
        "core",
        "ending_ids",
        "first_scheduled_time",
        "max_length",
        "max_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "prompt_logprobs",
        "rules",
        "sequences",
    )

    def __init__(self, core: CoreRequest, *, arrival: int, max_tokens: int) -> None:
        """`arrival` orders requests; `max_tokens` is already cut to what the context leaves."""
        self.core = core
        self.first_scheduled_time: float | None = None
        self.arrival = arrival
        self.max_tokens = max_tokens
        self.num_preemptions = 0
        self.num_prompt_tokens = len(core.prompt_token_ids)
        self.max_length = self.num_prompt_tokens + max_tokens
        eos_token_ids = () if core.params.ignore_eos else core.eos_token_ids
        self.ending_ids = frozenset((*core.params.stop_ids, *eos_token_ids))
        self.rules = rules_of(core.params, core.eos_token_ids, core.bad_words_token_ids)
        self.prompt_logprobs: list[TokenLogprobs] = []  # of prompt tokens 1, 2, ... so far
        first = Sequence(self, 0, list(core.prompt_token_ids))
        first.num_pending_samples = core.params.n
        self.sequences: list[Sequence] = [first]
        self.cancelled: dict[int, FinishReason] = {}  # samples that end as soon as they are forked

    @property
    def has_forked(self) -> bool:
        """True when every sample has a sequence of its own."""
        return self.sequences[0].num_pending_samples == 1

    @property
    def finished(self) -> bool:
        """True when every sample has ended."""
        return all(s.status is SequenceStatus.FINISHED for s in self.sequences)

    def unfinished(self) -> Iterator[Sequence]:
        """The sequences that have not ended."""
        return (s for s in self.sequences if s.status is not SequenceStatus.FINISHED)


class Sequence:
    """One line of tokens: the prompt and what was generated after it.

    `num_computed_tokens` of the `token_ids` have their KV in blocks. Prefill, chunked prefill,
    decode and recomputation differ only in how far that number is behind.
    """

    __slots__ = (
        "finish_reason",
        "in_flight",
        "index",
        "is_promoted",
        "num_computed_tokens",
        "num_overtakes",
        "num_pending_samples",
        "order",
        "request",
        "status",
        "stop_reason",
        "token_ids",
    )

    def __init__(self, request: Request, index: int, token_ids: list[int]) -> None:
        self.request = request
        self.index = index
        self.order = (request.arrival, index)  # unique; also the key of the block table
        self.token_ids = token_ids
        self.num_computed_tokens = 0
        self.num_pending_samples = 1  # more than one only before the first fork
        self.in_flight = False
        self.num_overtakes = 0  # admissions past it while it had waited longest
        self.is_promoted = False  # by a policy that bounds waiting
        self.status = SequenceStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.request.num_prompt_tokens

    def fork(self, index: int) -> Sequence:
        """A sibling with the same tokens; the caller makes it share the KV blocks."""
        child = Sequence(self.request, index, self.token_ids.copy())
        child.num_computed_tokens = self.num_computed_tokens
        child.status = self.status
        self.request.sequences.append(child)
        return child

    def finish(self, reason: FinishReason, stop_reason: int | None = None) -> None:
        """End the sequence; the caller frees its blocks."""
        self.status = SequenceStatus.FINISHED
        self.finish_reason = reason
        self.stop_reason = stop_reason
