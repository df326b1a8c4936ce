"""A request and its sequences.

A request owns one sequence or several (its `n` samples). All of them begin as one: the prompt is
computed once, then `Sequence.fork` makes the others, which share its KV blocks. Nothing here knows
blocks, batches or text.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cupaged.logits_rules import rules_of
from cupaged.outputs import FinishReason, TokenLogprobs
from cupaged.sampling_params import BeamSearchParams, SamplingParams

NEVER = sys.maxsize  # a number of tokens that no sequence reaches
Extra = tuple[str, str]  # kind and value of what KV depends on beside the tokens


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
        prefix_caching: False to find no cached prefix and to leave none; None for what the engine
            does, which True cannot change.
        cache_salt: prefixes are shared only among requests of equal salts; "" is none.
        beams: search the likeliest outputs instead of drawing some; `params` is then what
            `beams.sampling_params(eos_token_ids)` gives.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    seed: int = 0
    priority: int = 0
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    prefix_caching: bool | None = None
    cache_salt: str | None = None
    beams: BeamSearchParams | None = None


class SequenceStatus(enum.Enum):
    """Where a sequence is. Only RUNNING sequences hold KV blocks, and SWAPPED ones of the host.

    PARKED is a beam without blocks that waits for nothing but its siblings' candidates.
    """

    WAITING = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    SWAPPED = enum.auto()
    PARKED = enum.auto()
    FINISHED = enum.auto()


class Request:
    """A request inside the core: its limits and its sequences."""

    __slots__ = (
        "arrival",
        "cache_extras",
        "cancelled",
        "core",
        "ending_ids",
        "first_scheduled_time",
        "max_length",
        "max_tokens",
        "num_cached_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "prompt_logprobs",
        "rules",
        "sequences",
        "uses_prefix_cache",
    )

    def __init__(self, core: CoreRequest, *, arrival: int, max_tokens: int) -> None:
        """`arrival` orders requests; `max_tokens` is already cut to what the context leaves."""
        self.core = core
        self.first_scheduled_time: float | None = None
        self.arrival = arrival
        self.max_tokens = max_tokens
        self.num_cached_tokens = 0  # of the prompt, found when it was first scheduled
        self.num_preemptions = 0
        self.uses_prefix_cache = core.prefix_caching is not False
        self.cache_extras: tuple[Extra, ...] = (
            (("salt", core.cache_salt),) if core.cache_salt else ()
        )
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


class _Column:
    """A number of a sequence: in its record while it runs, else its own."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name, self._slot = name, f"_{name}"

    def __get__(self, sequence: Sequence, owner: type) -> int:
        record = sequence.record
        value = getattr(sequence, self._slot) if record is None else record[self._name]
        return int(value)

    def __set__(self, sequence: Sequence, value: int) -> None:
        if sequence.record is None:
            setattr(sequence, self._slot, value)
        else:
            sequence.record[self._name] = value


class Sequence:
    """One line of tokens: the prompt and what was generated after it.

    `num_computed_tokens` of the `token_ids` have their KV in blocks. Prefill, chunked prefill,
    decode and recomputation differ only in how far that number is behind.
    """

    __slots__ = (
        "_num_computed_tokens",
        "_num_pending_samples",
        "_store_at",
        "block_names",
        "finish_reason",
        "index",
        "is_promoted",
        "num_overtakes",
        "num_stored_blocks",
        "order",
        "packed_tokens",
        "record",
        "request",
        "row",
        "status",
        "stop_reason",
        "token_ids",
    )

    num_computed_tokens = _Column()
    num_pending_samples = _Column()
    store_at = _Column()

    def __init__(self, request: Request, index: int, token_ids: list[int]) -> None:
        self.request = request
        self.index = index
        self.order = (request.arrival, index)  # unique; also the key of the block table
        self.token_ids = token_ids
        self.row = -1  # of the tables, while it runs
        self.record: np.void | None = None  # its row of the `SequenceTable`, while it runs
        self.num_computed_tokens = 0
        self.num_pending_samples = 1  # more than one only before the first fork
        self.store_at = NEVER  # computed tokens with which its next block is stored for others
        self.num_stored_blocks: int | None = None  # of its first ones; None: it leaves nothing
        self.block_names: list[bytes] = []  # of its first full blocks, as far as they were needed
        self.packed_tokens = bytearray()  # its first ones as int32, as far as they were needed
        self.num_overtakes = 0  # admissions past it while it had waited longest
        self.is_promoted = False  # by a policy that bounds waiting
        self.status = SequenceStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | None = None

    @property
    def in_flight(self) -> bool:
        """True while a step computes some of its tokens."""
        return self.record is not None and bool(self.record["in_flight"])

    def detach(self) -> None:
        """It does not run any more, and keeps what its record says."""
        kept = (self.num_computed_tokens, self.num_pending_samples, self.store_at)
        self.row, self.record = -1, None
        self.num_computed_tokens, self.num_pending_samples, self.store_at = kept

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.request.num_prompt_tokens

    @property
    def num_skippable_tokens(self) -> int:
        """Tokens whose KV suffices: after them something is still to be told or drawn."""
        request = self.request
        told = len(request.prompt_logprobs)
        if request.core.params.prompt_logprobs is None or told == request.num_prompt_tokens - 1:
            return len(self.token_ids) - 1
        return told

    def append(self, token: int) -> None:
        """One more token."""
        self.token_ids.append(token)
        if self.record is not None:
            self.record["num_tokens"] += 1
            self.record["last_token"] = token

    def fork(self, index: int) -> Sequence:
        """A sibling with the same tokens; the caller makes it share the KV blocks."""
        child = Sequence(self.request, index, self.token_ids.copy())
        child.num_computed_tokens = self.num_computed_tokens
        child.block_names = self.block_names.copy()
        child.packed_tokens = self.packed_tokens.copy()
        child.store_at = self.store_at
        child.num_stored_blocks = self.num_stored_blocks
        child.status = self.status
        self.request.sequences.append(child)
        return child

    def finish(self, reason: FinishReason, stop_reason: int | None = None) -> None:
        """End the sequence; the caller frees its blocks."""
        self.status = SequenceStatus.FINISHED
        self.finish_reason = reason
        self.stop_reason = stop_reason
