"""Every list of token ids that a request may bring: what is outside the vocabulary is refused by
name, and so is what is no number; the next request is served.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cupaged.errors import InvalidParameterError
from cupaged.llm import LLM
from tests.e2e.tiny_llm import NUM_TOKENS, OTHER, PROMPT, check_idle, complete, params
from tests.tiny_models import TINY, write_hf_folder

VOCAB_SIZE = TINY.vocab_size
NAN, INF = math.nan, math.inf
LISTS = ("stop_token_ids", "allowed_token_ids", "trace_decode_token_ids")


@pytest.fixture(scope="module")
def shared_llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    path = write_hf_folder(tmp_path_factory.mktemp("models") / "tiny", TINY)
    return LLM(path, num_gpu_blocks_override=32, max_model_len=128)


@pytest.fixture(scope="module")
def expected(shared_llm: LLM) -> list[int]:
    return complete(shared_llm).token_ids


@pytest.fixture
def llm(shared_llm: LLM, expected: list[int]) -> Iterator[LLM]:
    """Whatever a test did, nothing is left of it, and the next request is served as before."""
    yield shared_llm
    check_idle(shared_llm)
    assert complete(shared_llm).token_ids == expected


def refused(llm: LLM, **changes: Any) -> InvalidParameterError:
    """The error, which also spares the other requests of the call."""
    with pytest.raises(InvalidParameterError) as error:
        llm.generate([OTHER, PROMPT], [params(), params(**changes)], use_tqdm=False)
    check_idle(llm)
    return error.value


@pytest.mark.parametrize("token", [-1, VOCAB_SIZE, VOCAB_SIZE + 1, 10**9, 2**31, 2**32 + 5, 2**62])
@pytest.mark.parametrize("min_tokens", [0, 3])
def test_ids_outside_the_vocabulary(token: int, min_tokens: int, llm: LLM) -> None:
    """Alone, and behind ids that are fine. The error has parameter, value and allowed range."""
    allowed = f"in [0, {VOCAB_SIZE})" if token >= 0 else "in [0, "
    for name in LISTS:
        for before in ([], [5, 0, VOCAB_SIZE - 1]):
            error = refused(llm, **{name: [*before, token]}, min_tokens=min_tokens)
            assert (error.name, error.value) == (f"{name}[{len(before)}]", token)
            assert allowed in error.allowed
            assert str(error) == f"{error.name} must be {error.allowed}, got {token}"
    for bias in ({token: 5.0}, {3: 1.0, token: -1}):
        error = refused(llm, logit_bias=bias, min_tokens=min_tokens)
        assert (error.name, error.value) == ("logit_bias key", token)
        assert allowed in error.allowed


@pytest.mark.parametrize("token", [0, VOCAB_SIZE - 1])
def test_the_first_and_the_last_token_are_served(token: int, llm: LLM) -> None:
    output = complete(llm, allowed_token_ids=[token], detokenize=False)
    assert output.token_ids == [token] * NUM_TOKENS
    output = complete(llm, trace_decode_token_ids=[token], max_tokens=1)
    assert output.token_ids == [token]
    output = complete(llm, logit_bias={token: 100})
    assert output.token_ids == [token] * NUM_TOKENS
    output = complete(llm, logit_bias={token: 100}, stop_token_ids=[token], min_tokens=3)
    assert token not in output.token_ids[:3] and output.token_ids[3] == token
    assert (len(output.token_ids), output.stop_reason) == (4, token)


@pytest.mark.parametrize("bad", [NAN, INF, -INF, 1.5, 3.0, "3", None, True, [3], 10**400, b"3"])
def test_what_is_no_token_id(bad: Any, llm: LLM) -> None:
    for name in LISTS:
        assert refused(llm, **{name: [5, bad]}).name == f"{name}[1]"
    if not isinstance(bad, list):
        assert refused(llm, logit_bias={bad: 1.0}).name == "logit_bias key"
    if bad != 3.0 and bad != 1.5:
        assert refused(llm, logit_bias={3: bad}).name == "logit_bias[3]"


@pytest.mark.parametrize(
    "changes",
    [
        {"logit_bias": {0: INF}},
        {"logit_bias": {0: NAN}},
        {"logit_bias": {0: 100.5}},
        {"repetition_penalty": 0},
        {"repetition_penalty": INF},
        {"presence_penalty": NAN},
        {"frequency_penalty": 2.5},
        {"min_p": 1.5},
        {"allowed_token_ids": []},
        {"bad_words": [""]},
        {"bad_words": "word"},
        {"bad_words": ["\ud800"]},
        {"logprobs": -2},
        {"logprobs": 21},
        {"logprobs": -1},
        {"logprobs": 1_000_000},
        {"prompt_logprobs": 1_000_000},
        {"prompt_logprobs": -1},
        {"prompt_logprobs": 2.0},
        {"stop_token_ids": list(range(VOCAB_SIZE)), "min_tokens": 1},
        {"allowed_token_ids": [7, 8], "stop_token_ids": [8, 7, 9], "min_tokens": 1},
    ],
    ids=str,
)
def test_values_that_are_refused_before_anything_runs(changes: dict[str, Any], llm: LLM) -> None:
    error = refused(llm, **changes)
    assert any(error.name.startswith(name) for name in changes)
    assert len(str(error)) < 400


def test_how_many_logprobs_may_be_asked_for(tmp_path: Path, llm: LLM) -> None:
    """20 unless the engine says otherwise; all of them only where all of them are allowed."""
    assert complete(llm, logprobs=20, prompt_logprobs=20).logprobs is not None
    error = refused(llm, logprobs=21)
    assert (error.name, error.value, error.allowed) == ("logprobs", 21, "at most max_logprobs=20")
    path = write_hf_folder(tmp_path, TINY)
    for limit, accepted, bad in (
        (0, [0], [1, -1]),
        (VOCAB_SIZE - 1, [508], [509, -1]),
        (VOCAB_SIZE, [-1, 509], [510]),
        (10**6, [-1, 510, 10**6], [10**6 + 1]),
    ):
        other = LLM(path, num_gpu_blocks_override=8, max_model_len=64, max_logprobs=limit)
        for count in accepted:
            (first, *_) = complete(other, logprobs=count, max_tokens=1).logprobs or []
            assert len(first) == (VOCAB_SIZE if count == -1 else max(1, min(count, VOCAB_SIZE)))
        for count in bad:
            for name in ("logprobs", "prompt_logprobs"):
                assert refused(other, **{name: count}).name == name
