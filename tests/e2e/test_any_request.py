"""Random requests, six at a time: each is refused with an error of ours or answered correctly."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from cupaged.engine.engine import Engine
from cupaged.engine.token_alternatives import bad_words_token_ids
from cupaged.errors import CupagedError, EngineError
from cupaged.outputs import CompletionOutput, RequestOutput, TokenAlternatives
from cupaged.sampling_params import SamplingParams
from tests.forced import LoadedModel
from tests.tiny_models import BOS_ID, EOS_ID, TinyLlama, write_hf_folder

SMALL = TinyLlama(
    name="small",
    hidden_size=16,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    intermediate_size=16,
    num_layers=1,
    tied=True,
)
VOCAB_SIZE, MAX_MODEL_LEN, NUM_BLOCKS, BLOCK_SIZE = SMALL.vocab_size, 56, 9, 8
MAX_NUM_SEQS, MAX_LOGPROBS, AT_A_TIME = 5, 20, 6
EOS_IDS = (EOS_ID, BOS_ID)
NAN, INF = math.nan, math.inf


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return LoadedModel(write_hf_folder(tmp_path_factory.mktemp("models") / "small", SMALL))


# ---- what is asked -------------------------------------------------------------------------------

FEW = (EOS_ID, 40, 41, 42, 300)  # so that lists meet: F, G, H and " T"
WORDS = ("F", "G", "FG", "GG", "HGF", "GHG", " T", " the", "block table", "é", "\n", "<|im_end|>")
ODD: tuple[Any, ...] = (
    NAN, INF, -1, 2, 21, 10**9, 2**64, 10**400, 1.5, True, "x", "", b"x", None, [], {}, object(),
)  # fmt: skip
ODD_IDS = (
    [-1], [VOCAB_SIZE], [5, 10**9], [NAN], [1.5], [True], ["x"], [None], [[1]], [2**31], [10**400],
)  # fmt: skip
ODD_BIASES = (
    {-1: 1.0}, {3: 1, VOCAB_SIZE: 1}, {10**9: 1}, {3: NAN}, {3: 101.0}, {"3": 1.0}, {3: None},
)  # fmt: skip
ODD_TEXTS = ([""], ["a", ""], [5], [None], ["\ud800"], ["x"] * 65, "\ud800", [b"x"])
ODD_PROMPTS: tuple[Any, ...] = (
    None, 5, 1.5, b"x", "", [], [-1], [VOCAB_SIZE], [10**9], [1.5], [NAN], [True], ["x"], [[1]],
    {}, {"text": "x"}, {"prompt": 5}, {"prompt_token_ids": None}, "\ud800", [5] * 56, [5] * 999,
)  # fmt: skip


@dataclass
class Asked:
    """A request as somebody might write it."""

    prompt: Any
    changes: dict[str, Any]
    params: SamplingParams | None = field(default=None, init=False)


def ids_from(rng: random.Random, most: int, least: int = 0) -> list[int]:
    """Token ids, half of them from a few."""
    few = (rng.random() < 0.5 for _ in range(rng.randint(least, most)))
    return [rng.choice(FEW) if chosen else rng.randrange(VOCAB_SIZE) for chosen in few]


def texts_from(rng: random.Random) -> list[str]:
    """Texts that a model of these few tokens may well say, and any other."""
    known = (rng.random() < 0.8 for _ in range(rng.randint(0, 3)))
    return [rng.choice(WORDS) if said else chr(rng.randrange(32, 0x500)) * 2 for said in known]


def prompt_from(rng: random.Random) -> Any:
    kind = rng.randrange(4)
    if kind == 0:
        return "".join(chr(rng.randrange(32, 0x3000)) for _ in range(rng.randint(1, 8)))
    if kind == 1:
        return rng.choice(["The memory of a process", "FGH", {"prompt": "\n\n é"}])
    ids = ids_from(rng, 20, least=1)
    return ids if kind == 2 else {"prompt_token_ids": ids}


VALUES: dict[str, Callable[[random.Random], Any]] = {
    "n": lambda rng: rng.randint(1, 3),
    "presence_penalty": lambda rng: rng.uniform(-2, 2),
    "frequency_penalty": lambda rng: rng.uniform(-2, 2),
    "repetition_penalty": lambda rng: rng.choice([0.5, 1.0, 1.3, 2.0, 1e-300, 1e300]),
    "temperature": lambda rng: rng.choice([0, 0.0, 1e-9, 0.3, 1.0, 5.0, 1e300]),
    "top_p": lambda rng: rng.choice([0, 1e-9, 0.3, 0.9, 1.0]),
    "top_k": lambda rng: rng.choice([-1, 0, 1, 5, VOCAB_SIZE, 10**12]),
    "min_p": lambda rng: rng.choice([0, 1e-6, 0.1, 1.0]),
    "seed": lambda rng: rng.choice([-1, 0, 2**64 - 1, rng.getrandbits(64)]),
    "stop": texts_from,
    "stop_token_ids": lambda rng: ids_from(rng, 4),
    "ignore_eos": lambda rng: rng.random() < 0.5,
    "max_tokens": lambda rng: rng.choice([None, *range(1, 10)]),
    "min_tokens": lambda rng: rng.randint(0, 4),
    "logprobs": lambda rng: rng.choice([None, 0, 1, 3, MAX_LOGPROBS]),
    "prompt_logprobs": lambda rng: rng.choice([None, 0, 2, MAX_LOGPROBS]),
    "detokenize": lambda rng: rng.random() < 0.8,
    "skip_special_tokens": lambda rng: rng.random() < 0.5,
    "include_stop_str_in_output": lambda rng: rng.random() < 0.5,
    "logit_bias": lambda rng: {token: rng.uniform(-100, 100) for token in ids_from(rng, 4)},
    "allowed_token_ids": lambda rng: rng.choice([None, ids_from(rng, 5, least=2)]),
    "bad_words": texts_from,
    "trace_decode_token_ids": lambda rng: ids_from(rng, 4),
}


def request_from(rng: random.Random) -> Asked:
    """Mostly of valid values, which may not fit together; a third has something odd."""
    names = rng.sample([*VALUES], rng.randint(0, 12))
    changes = {"max_tokens": rng.randint(1, 8)} | {name: VALUES[name](rng) for name in names}
    prompt = prompt_from(rng)
    what = rng.randrange(24)
    if what < 2:
        prompt = rng.choice(ODD_PROMPTS)
    elif what < 4:
        name = rng.choice(["stop_token_ids", "allowed_token_ids", "trace_decode_token_ids"])
        changes[name] = rng.choice(ODD_IDS)
    elif what < 5:
        changes["logit_bias"] = rng.choice(ODD_BIASES)
    elif what < 6:
        changes[rng.choice(["stop", "bad_words"])] = rng.choice(ODD_TEXTS)
    elif what < 8:
        changes[rng.choice(SamplingParams.field_names())] = rng.choice(ODD)
    return Asked(prompt, changes)


# ---- what may come back --------------------------------------------------------------------------


def check_error(error: CupagedError) -> None:
    assert not isinstance(error, EngineError)
    assert 10 < len(str(error)) < 600


def check_alternatives(told: TokenAlternatives, token: int, count: int) -> None:
    assert next(iter(told)) == token
    assert max(1, count) <= len(told) <= 1 + count
    for each, entry in told.items():
        assert 0 <= each < VOCAB_SIZE
        assert entry.logprob <= 1e-6 and entry.rank is not None and entry.rank >= 1
        assert isinstance(entry.decoded_token, str)
    assert sorted(e.rank or 0 for e in [*told.values()][1:])[-1:] <= [count]


def check_tokens(
    engine: Engine, params: SamplingParams, sample: CompletionOutput, room: int
) -> None:
    """Length, end, and every rule, at each token that was not told in advance."""
    tokens, trace = sample.token_ids, list(params.trace_decode_token_ids or ())
    most = room if params.max_tokens is None else min(params.max_tokens, room)
    words = bad_words_token_ids(engine.tokenizer, params.bad_words or ())
    ending = {*params.stop_ids, *(() if params.ignore_eos else EOS_IDS)}
    assert all(0 <= token < VOCAB_SIZE for token in tokens) and len(tokens) <= most
    assert tokens[: len(trace)] == trace[: len(tokens)]
    for i, token in enumerate(tokens[len(trace) :], len(trace)):
        assert params.allowed_token_ids is None or token in params.allowed_token_ids
        assert i >= params.min_tokens or token not in ending
        for *begin, last in words:
            assert token != last or tokens[max(0, i - len(begin)) : i] != begin
    assert not any(token in ending for token in tokens[params.min_tokens : -1])
    if sample.finish_reason == "length":
        assert len(tokens) == most
    elif sample.finish_reason == "stop":
        assert len(tokens) >= params.min_tokens
        if isinstance(sample.stop_reason, str):
            assert sample.stop_reason in params.stop_strings
        else:
            assert tokens[-1] in ending
            assert sample.stop_reason in (None, tokens[-1])
    else:
        # Nothing was left to draw: only words of several tokens can do that so late.
        assert sample.finish_reason == "error"
        assert params.allowed_token_ids and any(len(word) > 1 for word in words)


def check_output(engine: Engine, params: SamplingParams, output: RequestOutput) -> None:
    prompt = output.prompt_token_ids
    assert output.finished and len(output.outputs) == params.n
    if params.prompt_logprobs is None:
        assert output.prompt_logprobs is None
    else:
        told = output.prompt_logprobs
        assert told is not None and len(told) == len(prompt) and told[0] is None
        for position, token in zip(told[1:], prompt[1:], strict=True):
            assert position is not None
            check_alternatives(position, token, params.prompt_logprobs)
    room = min(MAX_MODEL_LEN, NUM_BLOCKS * BLOCK_SIZE + 1) - len(prompt)
    for index, sample in enumerate(output.outputs):
        assert sample.index == index
        check_tokens(engine, params, sample, room)
        if params.logprobs is None:
            assert sample.logprobs is None and sample.cumulative_logprob is None
        else:
            assert sample.logprobs is not None and sample.cumulative_logprob is not None
            assert sample.cumulative_logprob <= 1e-5
            for drawn, token in zip(sample.logprobs, sample.token_ids, strict=True):
                check_alternatives(drawn, token, params.logprobs)
        if not params.detokenize:
            assert sample.text == ""
        if params.stop_strings and not (params.min_tokens or params.include_stop_str_in_output):
            assert not any(stop in sample.text for stop in params.stop_strings)


def serve(model: LoadedModel, requests: Sequence[Asked]) -> tuple[int, int]:
    """Queue all of them, step until all have come; returns how many were served and preempted."""
    core = model.core(
        num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_model_len=MAX_MODEL_LEN, watermark=0.0,
        max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=24, max_logprobs=MAX_LOGPROBS,
    )  # fmt: skip
    engine = Engine(core, model.files.tokenizer, eos_token_ids=EOS_IDS)
    for i, request in enumerate(requests):
        try:
            request.params = SamplingParams(**request.changes)
            engine.add_request(str(i), request.prompt, request.params)
        except CupagedError as error:
            check_error(error)
            request.params = None
    finished: dict[str, RequestOutput] = {}
    for _ in range(600):
        if not engine.has_unfinished_requests:
            break
        finished |= {o.request_id: o for o in engine.step() if o.finished}
        core.audit()
    served = {str(i): r.params for i, r in enumerate(requests) if r.params is not None}
    assert finished.keys() == served.keys()
    for request_id, params in served.items():
        assert params is not None
        check_output(engine, params, finished[request_id])
    stats = core.stats()
    assert not core.has_unfinished_requests
    assert (stats.num_used_blocks, stats.num_running, stats.num_waiting) == (0, 0, 0)
    assert sum(stats.finished_total.values()) == sum(p.n for p in served.values() if p is not None)
    return len(served), stats.num_preemptions_total


def serve_many(model: LoadedModel, num_requests: int) -> None:
    """Derandomised, so it is known that most are served and that some are preempted."""
    counts = [0, 0, 0]

    @settings(
        max_examples=-(-num_requests // AT_A_TIME),
        deadline=None,
        derandomize=True,
        database=None,
    )
    @given(seed=st.integers(0, 2**64 - 1))
    def check(seed: int) -> None:
        rng = random.Random(seed)
        requests = [request_from(rng) for _ in range(AT_A_TIME)]
        note("\n".join(map(repr, requests)))
        served, preempted = serve(model, requests)
        counts[0] += len(requests)
        counts[1] += served
        counts[2] += preempted

    check()
    assert counts[0] >= num_requests
    assert 0.4 < counts[1] / counts[0] < 0.8
    assert counts[2] > num_requests / 100


def test_600_requests(model: LoadedModel) -> None:
    serve_many(model, 600)


@pytest.mark.slow
def test_10000_requests(model: LoadedModel) -> None:
    serve_many(model, 10_000)
