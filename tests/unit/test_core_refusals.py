"""What the engine core refuses at the door, and that the next request is served."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupaged.engine.core import EngineCore
from cupaged.errors import CapacityError, CupagedError, InvalidParameterError, PromptError
from cupaged.request import CoreRequest
from cupaged.sampling_params import SamplingParams
from tests.unit.small_core import VOCAB_SIZE, drain, request, small_core, tokens_of

VALID = CoreRequest("next", (1, 2, 3), SamplingParams(max_tokens=2))
HUGE = 10**5000


def served(core: EngineCore) -> bool:
    """Whether a valid request still gets its two tokens."""
    core.add_request(VALID)
    return len(tokens_of(drain(core), "next")) == 2


@pytest.mark.parametrize(
    ("change", "error", "name"),
    [
        ({"prompt_token_ids": ()}, PromptError, "prompt"),
        ({"prompt_token_ids": (3, VOCAB_SIZE)}, PromptError, "prompt_token_ids[1]"),
        ({"prompt_token_ids": (-1,)}, PromptError, "prompt_token_ids[0]"),
        ({"prompt_token_ids": (1, 2.0)}, PromptError, "prompt_token_ids"),
        ({"prompt_token_ids": (float("nan"),)}, PromptError, "prompt_token_ids"),
        ({"prompt_token_ids": ("1",)}, PromptError, "prompt_token_ids"),
        ({"prompt_token_ids": (HUGE,)}, PromptError, "prompt_token_ids"),
        ({"prompt_token_ids": (2**63,)}, PromptError, "prompt_token_ids"),
        ({"prompt_token_ids": ((1, 2), 3)}, PromptError, "prompt_token_ids"),
        ({"prompt_token_ids": None}, PromptError, "prompt_token_ids"),
        ({"prompt_token_ids": 5}, PromptError, "prompt_token_ids"),
        ({"prompt_token_ids": (1,) * 100}, PromptError, "prompt length in tokens"),
        ({"prompt_token_ids": (1,) * 40}, CapacityError, "max_tokens"),
        ({"prompt_token_ids": (1,) * 70}, CapacityError, "prompt length in tokens"),
        ({"seed": 2**64}, InvalidParameterError, "seed"),
        ({"seed": -1}, InvalidParameterError, "seed"),
        ({"seed": 1.5}, InvalidParameterError, "seed"),
        ({"seed": None}, InvalidParameterError, "seed"),
        ({"request_id": "taken"}, InvalidParameterError, "request_id"),
        ({"request_id": ["next"]}, InvalidParameterError, "request_id"),
        ({"params": None}, InvalidParameterError, "params"),
        ({"params": SamplingParams(n=5)}, InvalidParameterError, "n"),
        ({"params": SamplingParams(max_tokens=66)}, CapacityError, "max_tokens"),
        ({"eos_token_ids": (VOCAB_SIZE,)}, InvalidParameterError, "eos_token_ids[0]"),
        ({"eos_token_ids": (1, -1)}, InvalidParameterError, "eos_token_ids[1]"),
        (
            {"params": SamplingParams(stop_token_ids=[3, VOCAB_SIZE], min_tokens=3)},
            InvalidParameterError,
            "stop_token_ids[1]",
        ),
        (
            {"params": SamplingParams(stop_token_ids=[10**9])},
            InvalidParameterError,
            "stop_token_ids[0]",
        ),
        (
            {
                "params": SamplingParams(stop_token_ids=range(VOCAB_SIZE - 1), min_tokens=1),
                "eos_token_ids": (VOCAB_SIZE - 1,),
            },
            InvalidParameterError,
            "min_tokens",
        ),
        (
            {"params": SamplingParams(logit_bias={3: 1, VOCAB_SIZE: 1})},
            InvalidParameterError,
            "logit_bias key",
        ),
        (
            {"params": SamplingParams(allowed_token_ids=[10**9])},
            InvalidParameterError,
            "allowed_token_ids[0]",
        ),
        (
            {"params": SamplingParams(trace_decode_token_ids=[1, VOCAB_SIZE])},
            InvalidParameterError,
            "trace_decode_token_ids[1]",
        ),
        (
            {"bad_words_token_ids": ((1,), (2, VOCAB_SIZE))},
            InvalidParameterError,
            "bad_words_token_ids[1]",
        ),
        ({"bad_words_token_ids": ((-1,),)}, InvalidParameterError, "bad_words_token_ids[0]"),
        ({"bad_words_token_ids": ((1,), ())}, InvalidParameterError, "bad_words_token_ids"),
        (
            {"bad_words_token_ids": tuple((token,) for token in range(VOCAB_SIZE))},
            InvalidParameterError,
            "bad_words",
        ),
        (
            {
                "params": SamplingParams(stop_token_ids=range(20), min_tokens=1),
                "bad_words_token_ids": tuple((token,) for token in range(20, VOCAB_SIZE)),
            },
            InvalidParameterError,
            "bad_words",
        ),
        ({"params": SamplingParams(logprobs=21)}, InvalidParameterError, "logprobs"),
        ({"params": SamplingParams(logprobs=-1)}, InvalidParameterError, "logprobs"),
        ({"params": SamplingParams(prompt_logprobs=50)}, InvalidParameterError, "prompt_logprobs"),
        ({"priority": 1.5}, InvalidParameterError, "priority"),
    ],
)
def test_what_cannot_be_served_is_refused_at_once(
    change: dict[str, Any], error: type[CupagedError], name: str
) -> None:
    core = small_core(num_blocks=10, max_model_len=100)
    core.add_request(request("taken", 3, max_tokens=2))
    if change.get("prompt_token_ids") == (1,) * 70:
        core = small_core(num_blocks=10, max_model_len=1000)
    before = core.stats()
    with pytest.raises(error) as refused:
        core.add_request(replace(VALID, **change))
    assert getattr(refused.value, "name", None) == name
    assert core.stats() == before
    assert served(core)


def test_a_prompt_larger_than_the_pool_blocks_nobody() -> None:
    core = small_core(num_blocks=4)
    with pytest.raises(CapacityError, match="at most 16: the KV pool has 4 blocks of 4 tokens"):
        core.add_request(request("large", 40, max_tokens=1))
    core.add_request(request("small", 3, max_tokens=2))
    assert len(tokens_of(drain(core), "small")) == 2


def test_the_largest_request_that_fits_is_served_and_the_next_refused() -> None:
    core = small_core(num_blocks=4)
    with pytest.raises(CapacityError, match="at most 7 for a prompt of 10 tokens"):
        core.add_request(request("a", 10, max_tokens=8))
    core.add_request(request("a", 10, max_tokens=7))
    core.add_request(request("b", 16, max_tokens=1))
    outputs = drain(core)
    assert (len(tokens_of(outputs, "a")), len(tokens_of(outputs, "b"))) == (7, 1)


ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.sampled_from([10**400, -(10**400), 1j, object(), {}, [[1], 2]]),
    st.lists(st.one_of(st.integers(-2, VOCAB_SIZE), st.floats(), st.none()), max_size=4),
)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(
    field=st.sampled_from(["request_id", "prompt_token_ids", "params", "seed", "beams"]),
    value=ANYTHING,
)
def test_any_value_in_any_field_is_served_or_refused(field: str, value: object) -> None:
    core = small_core()
    changes: dict[str, Any] = {field: tuple(value) if isinstance(value, list) else value}
    try:
        core.add_request(replace(VALID, request_id="odd", **changes))
    except TypeError as error:  # of `replace`: the id is given twice
        assert field == "request_id", error
        try:
            core.add_request(replace(VALID, **changes))
        except InvalidParameterError:
            assert not isinstance(value, str)
    except (InvalidParameterError, PromptError):
        pass
    drain(core)
    assert served(core)
