"""Traces: an engine's limits and what is done to it, as plain data that can be drawn and shrunk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

from cupaged.config import PREFIX_CACHES, EngineConfig
from cupaged.engine.preemption import PreemptionCosts
from cupaged.request import CoreRequest
from cupaged.sampling_params import SamplingParams
from tests.fuzz.beam_oracle import draw_beams, num_blocks, with_beams
from tests.fuzz.oracle import answer, refusal

UNKNOWN_ID = "nobody"
_POLICIES = ("fcfs", "fcfs", "priority", "longest-prefix")
_VOCAB_SIZES = (997, 997, 997, 3)
_BEAM_SHARES = (0.0, 0.0, 0.3, 0.8)
_BLOCK_SIZES = (1, 2, 4, 8, 16)


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


@dataclass(frozen=True, slots=True)
class Reset:
    """Forget all cached prefixes."""


Operation = Add | Abort | Steps | Fail | Poison | Reset


@dataclass(frozen=True, slots=True)
class Trace:
    """`deferred` runs a step when it is collected, not when it is submitted; `policy` is a name.
    `swap_costs`: swap where that costs less; None for swapping whatever the host's blocks hold."""

    config: EngineConfig
    deferred: bool
    policy: str
    operations: tuple[Operation, ...]
    swap_costs: PreemptionCosts | None = None


def make_trace(
    random: Random,
    *,
    vocab_sizes: Sequence[int] = _VOCAB_SIZES,
    block_sizes: Sequence[int] = _BLOCK_SIZES,
    beam_shares: Sequence[float] = _BEAM_SHARES,
) -> Trace:
    """Draw a trace of every kind of use; most engines have some blocks of the host to swap to.

    Args:
        beam_shares: shares of the requests that are searched with beams, one of which is drawn.
    """
    trace = _make_cached_trace(random, vocab_sizes, block_sizes)
    num_host_blocks = random.choice((0, 2, 12, 60, 60, 60, 60))
    costs = random.choice((None, None, None, PreemptionCosts(0.0, 1.0, 0.5)))
    config = replace(trace.config, num_host_blocks=num_host_blocks)
    trace = replace(trace, config=config, swap_costs=costs)
    if config.enable_prefix_caching and num_host_blocks and random.random() < 0.45:
        trace = _with_turns(random, trace)
    beam_share = random.choice(beam_shares)
    trace = _with_beams(random, trace, beam_share) if beam_share else trace
    return _with_aborts(random, trace) if num_host_blocks and random.random() < 0.5 else trace


def _with_turns(random: Random, trace: Trace) -> Trace:
    """A few prompts take turns in a pool that does not hold them all, with several steps in flight:
    what one evicts is soon asked for again, perhaps before it has reached the host."""
    adds = [o for o in trace.operations if isinstance(o, Add)]
    longest = sorted(adds, key=lambda o: len(o.request.prompt_token_ids))[-4:]
    turns: list[Operation] = []
    for number in range(random.choice((4, 8, 16))):
        asked = random.choice(longest).request
        params = replace(asked.params, n=1, max_tokens=random.choice((1, 1, 2, 9)), min_tokens=0)
        asked = replace(asked, request_id=f"turn{number}", params=params)
        turns.append(Add(asked))
        if random.random() < 0.5:  # one more begins in the same step, or in the next one in flight
            twin = random.choice((asked, random.choice(longest).request))
            turns.append(Add(replace(twin, request_id=f"twin{number}", params=params)))
        turns.append(Steps(random.choice((1, 1, 1, 2, 4))))
        if random.random() < 0.15:
            turns.append(random.choice((Reset(), Abort(asked.request_id, None), Fail(False))))
    config = replace(
        trace.config,
        num_blocks=trace.config.num_blocks * random.choice((1, 2)) + random.choice((0, 1, 2)),
        max_steps_in_flight=random.choice((2, 3)),
        max_num_batched_tokens=random.choice((2, 4, 16, 64)),
    )
    return replace(trace, config=config, operations=(*trace.operations, *turns))


def _with_aborts(random: Random, trace: Trace) -> Trace:
    """Some more requests are aborted, at any time: perhaps while they are swapped out."""
    operations = list(trace.operations)
    for _ in range(6):
        at = random.randint(1, len(operations))
        earlier = [o.request for o in operations[:at] if isinstance(o, Add)]
        gone = random.choice(earlier).request_id
        operations[at:at] = [Steps(random.choice((1, 3))), Abort(gone, random.choice((None, 0, 1)))]
    return replace(trace, operations=tuple(operations))


def _make_cached_trace(
    random: Random, vocab_sizes: Sequence[int], block_sizes: Sequence[int]
) -> Trace:
    """Draw a trace in which prompts come again, longer by what was answered, in all ways that
    caching knows: with salts, opted out, with resets; and now and then without a cache."""
    trace = make_plain_trace(random, vocab_sizes, block_sizes)
    if random.random() < 0.15:
        asking = [_without_cache(random, o) for o in trace.operations]
        return replace(trace, operations=tuple(asking))
    strategy = random.choice(PREFIX_CACHES)
    config = replace(trace.config, enable_prefix_caching=True, prefix_cache=strategy)
    operations = list(trace.operations)
    reset_share = random.choice((0.0, 0.0, 0.2))
    for number in range(random.choice((0, 3, 6, 9))):
        at = random.randint(1, len(operations))
        earlier = [o.request for o in operations[:at] if isinstance(o, Add)]
        again = _asked_again(random, random.choice(earlier), config, f"again{number}")
        if random.random() < 0.4:
            again = replace(again, request_id=random.choice(earlier).request_id)
        before = [Steps(random.choice((1, 4, 8)))] if random.random() < 0.5 else []
        after = [Reset()] if random.random() < reset_share else []
        operations[at:at] = [*before, Add(again), *after]
    if config.max_steps_in_flight > 1:
        for _ in range(random.choice((0, 6))):
            at = random.randint(1, len(operations))
            earlier = [o.request for o in operations[:at] if isinstance(o, Add)]
            gone = random.choice(earlier)
            moment = _moment(random, earlier, abort_share=0.7, fail_share=0.3)
            if random.random() < 0.5:
                moment = [Abort(gone.request_id, None), Add(gone), Fail(at_submit=False), Steps(2)]
            operations[at:at] = moment
    salts = random.choice(((None,), (None,), (None, "", "a"), ("a", "b")))
    out_share = random.choice((0.0, 0.0, 0.3))
    asking = [_with_caching(random, o, salts, out_share) for o in operations]
    return Trace(config, trace.deferred, trace.policy, tuple(asking))


def _without_cache(random: Random, operation: Operation) -> Operation:
    """Hardly anybody asks for a cache that is not there: that is refused."""
    if isinstance(operation, Add) and random.random() < 0.1:
        return Add(replace(operation.request, prefix_caching=random.random() < 0.5))
    return operation


def _asked_again(
    random: Random, request: CoreRequest, config: EngineConfig, request_id: str
) -> CoreRequest:
    """The same prompt, alone or with some of what was answered to it."""
    prompt = request.prompt_token_ids
    if refusal(request, config, held=False) is None and random.random() < 0.5:
        told = answer(request, 0, config).token_ids
        prompt += tuple(told[: random.randint(1, len(told))])
    return replace(request, request_id=request_id, prompt_token_ids=prompt)


def _with_caching(
    random: Random, operation: Operation, salts: tuple[str | None, ...], out_share: float
) -> Operation:
    if not isinstance(operation, Add):
        return operation
    wanted = False if random.random() < out_share else random.choice((None, None, True))
    salt = random.choice(salts)
    return Add(replace(operation.request, prefix_caching=wanted, cache_salt=salt))


def _with_beams(random: Random, trace: Trace, share: float) -> Trace:
    """Some requests are searched, in an engine that has hardly more room than the largest needs.

    Often they are alike, so that none has much more room than it needs; often steps are so small
    that beams of one request are in different ones; and beams that were preempted share nothing
    where nothing is cached.
    """
    config = trace.config
    length = random.choice((None, random.randint(1, 4 * config.block_size)))
    beams = None if length is None else draw_beams(random)
    caching = random.choice((None, False, False))

    def searched(request: CoreRequest) -> CoreRequest:
        if length is not None:
            prompt = (request.prompt_token_ids * length)[:length]
            request = replace(request, prompt_token_ids=prompt)
        request = with_beams(random, request, beams or draw_beams(random), config)
        return replace(request, prefix_caching=caching)

    asking = [
        Add(searched(o.request)) if isinstance(o, Add) and random.random() < share else o
        for o in trace.operations
    ]
    needs = [num_blocks(o.request, config) for o in asking if isinstance(o, Add)]
    config = replace(
        config,
        num_blocks=max(1, max(needs) + random.choice((-1, 0, 0, 0, 1, 3))),
        max_num_seqs=max(config.max_num_seqs, random.choice((1, 3, 5, 6))),
        max_num_batched_tokens=random.choice((2, 3, 4, config.max_num_batched_tokens)),
        watermark=random.choice((0.0, 0.3, 0.9)),
    )
    return replace(trace, config=config, operations=tuple(asking))


def make_plain_trace(
    random: Random,
    vocab_sizes: Sequence[int] = _VOCAB_SIZES,
    block_sizes: Sequence[int] = _BLOCK_SIZES,
) -> Trace:
    """Draw a trace of an engine without a prefix cache. Lengths cluster at the edges of blocks and
    pools at what just fits. One in four engines has the KV sanitizer.

    Some traces are crowded: short prompts that come together and grow into each other. Some are
    pipelined: small steps, several in flight, and many aborts between them.
    """
    crowded, pipelined = random.random() < 0.4, random.random() < 0.4
    block_size = random.choice(block_sizes)
    vocab_size = random.choice(vocab_sizes)
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
        enable_prefix_caching=False,
        kv_sanitizer=drafts[0].seed % 4 == 0,  # it takes a third of a trace's time
    )
    prompts = _with_shared_prefixes(random, drafts)
    operations = _interleave(
        random,
        [_with_stops(random, r, config) for r in prompts],
        step_share=0.25 if crowded or pipelined else 0.55,
        num_late=random.randint(2, 12) if pipelined else 0,
        abort_share=random.choice((0.4, 0.7) if pipelined else (0.0, 0.0, 0.3)),
    )
    return Trace(config, random.random() < 0.4, random.choice(_POLICIES), tuple(operations))


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
