"""Texts that must not be generated, end to end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupaged.engine.token_alternatives import bad_words_token_ids
from cupaged.errors import InvalidParameterError
from cupaged.llm import LLM
from cupaged.request import CoreRequest
from tests.e2e.logprob_oracle import CLOSE, ask, reference_logprobs, run
from tests.e2e.tiny_llm import NUM_TOKENS, PROMPT, check_idle, complete, params
from tests.forced import LoadedModel
from tests.tiny_models import TINY, write_hf_folder

IDS = np.random.default_rng(31).integers(3, 509, 12).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf_folder(tmp_path_factory.mktemp("models") / "tiny", TINY)


@pytest.fixture(scope="module")
def shared_llm(folder: Path) -> LLM:
    return LLM(folder, num_gpu_blocks_override=32, max_model_len=128)


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    """Whatever a test did, nothing is left of it."""
    yield shared_llm
    check_idle(shared_llm)


def held(words: Sequence[tuple[int, ...]], **how: Any) -> CoreRequest:
    """A greedy request that must not say the words."""
    return replace(ask("a", IDS, **how), bad_words_token_ids=tuple(words))


def banned_before(output: Sequence[int], words: Sequence[Sequence[int]]) -> list[set[int]]:
    """The tokens that each place of an output must not have."""
    found = []
    for i in range(len(output)):
        before = list(output[:i])
        endings = [(list(w[:-1]), w[-1]) for w in words]
        found.append({last for begin, last in endings if before[i - len(begin) :] == begin})
    return found


def check_greedy(prompt: Sequence[int], output: Sequence[int], words: Sequence[Any]) -> int:
    """Each token is the likeliest that is allowed; returns at how many places one was not."""
    rows = reference_logprobs("tiny", (*prompt, *output))[len(prompt) - 1 : -1].copy()
    num_avoided = 0
    banned = banned_before(output, words)
    for row, token, out in zip(rows, output, banned, strict=True):
        best = row.argmax()
        row[list(out)] = -np.inf
        assert token not in out and row[token] > row.max() - CLOSE
        num_avoided += row.argmax() != best
    return num_avoided


# ---- token sequences -----------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("limits", [{}, {"block_size": 4, "num_blocks": 10, "watermark": 0.0}])
def test_no_sequence_comes_and_all_else_is_free(
    length: int, limits: dict[str, Any], folder: Path
) -> None:
    """Ban what came, again and again, beside a request that may say all of it."""
    model = LoadedModel(folder)
    words: list[tuple[int, ...]] = []
    free = ask("free", IDS, max_tokens=20)
    usual = run(model.core(), free).tokens["free", 0]
    for place in (4, 9, 0, 13):
        found = run(model.core(**limits), held(words, max_tokens=20), free).tokens
        assert found["free", 0] == usual
        output = found["a", 0]
        assert len(output) == 20
        num_avoided = check_greedy(IDS, output, words)
        assert bool(num_avoided) == bool(words)
        words.append(tuple(output[place : place + length]))


def test_a_word_that_begins_another_one(folder: Path) -> None:
    """The shorter bans the longer; the longer alone leaves the shorter free."""
    model = LoadedModel(folder)
    usual = run(model.core(), ask("a", IDS, max_tokens=20)).tokens["a", 0]
    short, long = tuple(usual[3:5]), tuple(usual[3:6])
    outputs = []
    for words in ([short], [long], [short, long], [long, short]):
        output = run(model.core(), held(words, max_tokens=20)).tokens["a", 0]
        assert check_greedy(IDS, output, words) > 0
        outputs.append(output)
    assert outputs[0][:4] == outputs[1][:4] == usual[:4]
    assert outputs[0][4] != usual[4]
    assert outputs[1][4] == usual[4] and outputs[1][5] != usual[5]
    assert outputs[2] == outputs[3] == outputs[0]


def test_words_of_the_prompt_do_not_count(folder: Path) -> None:
    """A word that the prompt began and the output would end is not avoided, as in vLLM."""
    model = LoadedModel(folder)
    (first,) = run(model.core(), ask("a", IDS)).tokens["a", 0]
    assert run(model.core(), held([(IDS[-1], first)])).tokens["a", 0] == [first]


# ---- text ----------------------------------------------------------------------------------------


def test_words_by_their_text(llm: LLM) -> None:
    """Greedy: what each token is worth is known, so the answer is too."""
    tokenizer = llm.get_tokenizer()
    prompt = tokenizer.encode(PROMPT)
    usual = complete(llm)
    texts = [tokenizer.decode([token]) for token in usual.token_ids]
    words = [t for t in texts if t.strip() and "\ufffd" not in t][:6]
    for num in range(1, len(words) + 1):
        output = complete(llm, bad_words=words[:num])
        assert len(output.token_ids) == NUM_TOKENS
        spelled = bad_words_token_ids(tokenizer, words[:num])
        assert check_greedy(prompt, output.token_ids, spelled) > 0
        assert not {token for token in output.token_ids if (token,) in spelled}
    assert complete(llm).token_ids == usual.token_ids  # nothing of it is kept


def test_words_of_several_tokens_by_their_text(llm: LLM) -> None:
    """Two spans of the usual answer, avoided together; samples of a request each avoid them."""
    tokenizer = llm.get_tokenizer()
    prompt = tokenizer.encode(PROMPT)
    usual = complete(llm)
    spans = []
    for start in range(NUM_TOKENS - 3):
        text = tokenizer.decode(usual.token_ids[start : start + 3])
        if "\ufffd" not in text and text.strip() == text:
            spans.append(text)
    words = spans[:1] + spans[-1:]
    assert words and all(len(tokenizer.encode(word)) > 1 for word in words)
    output = complete(llm, bad_words=words)
    spelled = bad_words_token_ids(tokenizer, words)
    check_greedy(prompt, output.token_ids, spelled)
    sampled = params(n=3, temperature=1, seed=5, max_tokens=40, bad_words=words)
    (request,) = llm.generate(PROMPT, sampled, use_tqdm=False)
    for sample in request.outputs:
        banned = banned_before(sample.token_ids, spelled)
        assert not any(token in out for token, out in zip(sample.token_ids, banned, strict=True))


def test_words_that_leave_nothing_are_refused(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    (token,) = tokenizer.encode("a")
    with pytest.raises(InvalidParameterError, match=r"^bad_words must be"):
        complete(llm, bad_words=["a"], allowed_token_ids=[token])
    with pytest.raises(InvalidParameterError, match=r"^bad_words must be"):
        complete(
            llm, bad_words=["a"], allowed_token_ids=[token, 9], stop_token_ids=[9], min_tokens=1
        )
    assert len(complete(llm).token_ids) == NUM_TOKENS
