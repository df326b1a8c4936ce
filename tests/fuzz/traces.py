"""Traces: an engine's limits and what is done to it, as plain data that can be drawn and shrunk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from cupaged.config import EngineConfig
from cupaged.request import CoreRequest
from cupaged.sampling_params import SamplingParams
from tests.fuzz.oracle import answer

UNKNOWN_ID = "nobody"
_VOCAB_SIZES = (997, 997, 997, 3)


@dataclass(frozen=True, slots=True)
class Add:
    """Submit a request; the engine may have to refuse it."""

    request: CoreRequest


@dataclass(frozen=True, slots=True)
class Abort:
    """Abort a request or one sample of it, which may be unknown, finished or not forked yet."""

    request_id: str
    index: int | None


@dataclass(frozen=True, slots=True)
class Steps:
    """Make some steps."""

    count: int


@dataclass(frozen=True, slots=True)
class Fail:
    """The next step that is submitted, or the next that is collected, fails."""

    at_submit: bool


@dataclass(frozen=True, slots=True)
class Poison:
    """Every step with a request of that name fails from now on, at one of the two moments."""

    request_id: str
    at_submit: bool


Operation = Add | Abort | Steps | Fail | Poison


@dataclass(frozen=True, slots=True)
class Trace:
    """`deferred` runs a step when it is collected, not when it is submitted."""

    config: EngineConfig
    deferred: bool
    by_priority: bool
    operations: tuple[Operation, ...]


def make_trace(random: Random) -> Trace:
    """Draw a trace. Lengths cluster at the edges of blocks and pools at what just fits.

    Some traces are crowded: short prompts that come together and grow into each other. Some are
    pipelined: small steps, several in flight, and many aborts between them.
    """
    crowded, pipelined = random.random() < 0.4, random.random() < 0.4
    block_size = random.choice((1, 2, 4, 8, 16))
    vocab_size = random.choice(_VOCAB_SIZES)
    longest = block_size if crowded else random.choice((block_size, 2 * block_size + 1, 12, 30))
    outputs = (9, 14, 20) if crowded else (1, 2, 3, 5, 9, 14, 20)
    drafts = [
        _draw_request(random, f"r{i}", vocab_size, block_size, longest, outputs)
        for i in range(random.randint(2, 12))
    ]
    num_tokens = [len(r.prompt_token_ids) + (r.params.max_tokens or 1) - 1 for r in drafts]
    fitting = -(-max(num_tokens) // block_size)
    num_blocks = max(
        1, fitting + random.choice((0, 2, 5) if pipelined else (-1, 0, 0, 0, 1, 2, 40))
    )
    config = EngineConfig(
        vocab_size=vocab_size,
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=random.choice((1000, 1000, max(num_tokens), max(num_tokens) // 2 + 2)),
        max_num_seqs=random.choice((4, 8, 16) if crowded or pipelined else (1, 2, 3, 4, 8)),
        max_num_batched_tokens=random.choice((1, 1, 2, 5) if pipelined else (1, 3, 8, 16, 64)),
        watermark=random.choice((0.0, 0.0, 0.01, 0.3, 0.9)),
        long_prefill_token_threshold=random.choice((0, 0, 2, 7)),
        max_steps_in_flight=random.choice((2, 3, 3) if pipelined else (1, 1, 2, 3)),
    )
    prompts = _with_shared_prefixes(random, drafts)
    operations = _interleave(
        random,
        [_with_stops(random, r, config) for r in prompts],
        step_share=0.25 if crowded or pipelined else 0.55,
        num_late=random.randint(2, 12) if pipelined else 0,
        abort_share=random.choice((0.4, 0.7) if pipelined else (0.0, 0.0, 0.3)),
    )
    return Trace(config, random.random() < 0.4, random.random() < 0.25, tuple(operations))


def shrink(trace: Trace, fails: Callable[[Trace], bool], max_runs: int = 300) -> Trace:
    """Leave out operations as long as the trace still fails."""
    size, runs = len(trace.operations), 0
    while size:
        start = 0
        while start < len(trace.operations) and runs < max_runs:
            kept = trace.operations[:start] + trace.operations[start + size :]
            smaller, runs = replace(trace, operations=kept), runs + 1
            if fails(smaller):
                trace = smaller
            else:
                start += size
        size //= 2
    return trace


def _draw_request(
    random: Random,
    request_id: str,
    vocab_size: int,
    block_size: int,
    longest: int,
    outputs: tuple[int, ...],
) -> CoreRequest:
    edge = block_size * random.randint(1, 3) + random.randint(-1, 1)
    length = random.choice((edge, random.randint(1, longest)))
    prompt = [random.randrange(vocab_size) for _ in range(max(1, min(length, longest)))]
    params = SamplingParams(
        n=random.choice((1, 1, 1, 2, 3, 4)),
        max_tokens=random.choice(outputs),
        detokenize=False,
    )
    seed = random.choice((random.randrange(4), random.getrandbits(64)))
    return CoreRequest(request_id, tuple(prompt), params, (), seed, random.choice((0, 0, 1, -2)))


def _with_shared_prefixes(random: Random, requests: list[CoreRequest]) -> list[CoreRequest]:
    """Some prompts begin like the first; some ids are used twice, at once or one after another."""
    shared = []
    for request in requests:
        prompt = request.prompt_token_ids
        if random.random() < 0.3:
            prompt = (*requests[0].prompt_token_ids, *prompt)[: len(prompt)]
        twice = random.random() < 0.1
        request_id = random.choice(requests).request_id if twice else request.request_id
        shared.append(replace(request, prompt_token_ids=prompt, request_id=request_id))
    return shared


def _with_stops(random: Random, request: CoreRequest, config: EngineConfig) -> CoreRequest:
    """Stop and EOS ids that the request really draws, at any place."""
    if len(request.prompt_token_ids) >= config.max_model_len or random.random() < 0.4:
        return request
    free_run = answer(request, random.randrange(request.params.n), config).token_ids

    def drawn_ids() -> list[int]:
        return random.sample(free_run, random.choice((0, 1, min(2, len(free_run)))))

    stops, eos = drawn_ids(), drawn_ids()
    params = replace(
        request.params,
        stop_token_ids=stops,
        ignore_eos=random.random() < 0.3,
        min_tokens=random.choice((0, 0, random.randint(0, len(free_run)))),
        max_tokens=random.choice((request.params.max_tokens,) * 9 + (None,)),
    )
    if params.max_tokens is None and config.max_model_len > 200:  # it would run for long
        params = replace(params, max_tokens=request.params.max_tokens)
    return replace(request, params=params, eos_token_ids=tuple(eos))


def _interleave(
    random: Random,
    requests: list[CoreRequest],
    *,
    step_share: float,
    num_late: int,
    abort_share: float,
) -> list[Operation]:
    """All requests are added, with something between them, and something happens after them."""
    operations: list[Operation] = []
    fail_share = random.choice((0.0, 0.0, 0.4))
    for number, request in enumerate(requests, 1):
        operations.append(Add(request))
        while random.random() < step_share:
            operations += _moment(random, requests[:number], abort_share, fail_share)
    for _ in range(num_late):
        operations += _moment(random, requests, abort_share, fail_share)
    return operations


def _moment(
    random: Random, requests: list[CoreRequest], abort_share: float, fail_share: float
) -> list[Operation]:
    """Steps, perhaps an abort after which the client tries again, perhaps a failure."""
    operations: list[Operation] = [Steps(random.choice((1, 1, 1, 2, 3, 8)))]
    if random.random() < abort_share:
        gone = random.choice(requests)
        index = random.choice((None, None, None, 0, 1, 2, 3, 4, -1))
        unknown = random.random() < 0.05
        operations.append(Abort(UNKNOWN_ID if unknown else gone.request_id, index))
        if random.random() < 0.4:
            operations.append(Add(gone))
    if random.random() < fail_share:
        moment = random.random()
        at_submit, bad = moment < 0.5, requests[int(moment * 2**20) % len(requests)]
        is_lasting = 0.35 < moment < 0.65
        operations.append(Poison(bad.request_id, at_submit) if is_lasting else Fail(at_submit))
    return operations
