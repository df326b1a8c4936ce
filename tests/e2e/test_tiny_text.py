"""A tiny model end to end, as text: where it stops, and how it is streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cupaged.errors import EngineError
from cupaged.llm import LLM
from tests.e2e.tiny_llm import NUM_TOKENS, OTHER, PROMPT, check_idle, complete, params
from tests.tiny_models import TINY, build_tokenizer, write_hf_folder


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


def pieces(llm: LLM) -> list[str]:
    """The text that each token of the answer to PROMPT adds."""
    outputs = [output.outputs[0] for output in llm.stream(PROMPT, params())]
    assert [len(output.token_ids) for output in outputs] == list(range(1, NUM_TOKENS + 1))
    return [output.delta for output in outputs]


# ---- stopping ------------------------------------------------------------------------------------


def test_stop_strings_within_and_across_tokens(llm: LLM) -> None:
    """The text is cut before the span, the tokens end with the one in which it is complete."""
    full, deltas = complete(llm), pieces(llm)
    ends = [len("".join(deltas[: i + 1])) for i in range(NUM_TOKENS)]
    spans = [(a, a + n) for a in range(0, len(full.text) - 9, 5) for n in (1, 2, 3, 9)]
    num_across = 0
    for stop in {full.text[a:b] for a, b in spans}:
        start = full.text.find(stop)
        last = next(i for i, end in enumerate(ends) if end >= start + len(stop))
        num_across += ends[last - 1] > start
        for kept, text in ((False, full.text[:start]), (True, full.text[: start + len(stop)])):
            output = complete(llm, stop=stop, include_stop_str_in_output=kept)
            assert output.text == text
            assert output.token_ids == full.token_ids[: last + 1]
            assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert num_across > 10


def test_several_stop_strings_the_first_in_the_text_wins(llm: LLM) -> None:
    full = complete(llm).text
    first, second = full[6:9], full[12:15]
    output = complete(llm, stop=[second, "never in the text", first])
    assert (output.text, output.stop_reason) == (full[: full.find(first)], first)


def test_a_stop_string_that_never_comes(llm: LLM) -> None:
    full = complete(llm)
    almost = full.text[-3:] + "never"  # what it begins with is held back to the end
    output = complete(llm, stop=almost)
    assert (output.text, output.finish_reason, output.stop_reason) == (full.text, "length", None)
    streamed = list(llm.stream(PROMPT, params(stop=almost)))
    assert "".join(output.outputs[0].delta for output in streamed) == full.text


def first_new_token(tokens: list[int], start: int) -> int:
    """The first place from `start` on whose token has not come before."""
    return next(i for i in range(start, len(tokens)) if tokens[i] not in tokens[:i])


def test_stop_token_ids(llm: LLM) -> None:
    full = complete(llm)
    at = first_new_token(full.token_ids, 5)
    token = full.token_ids[at]
    output = complete(llm, stop_token_ids=[token, 500])
    assert output.token_ids == full.token_ids[: at + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", token)
    assert output.text == complete(llm, max_tokens=at).text
    output = complete(llm, stop_token_ids=[token], min_tokens=at + 1)
    assert output.token_ids[:at] == full.token_ids[:at]
    assert output.token_ids[at] != token, "it is banned until min_tokens are there"
    assert complete(llm, stop_token_ids=[token], min_tokens=at).token_ids[at] == token


def test_every_eos_of_the_generation_config_stops(folder: Path, tmp_path: Path, llm: LLM) -> None:
    """The model's own EOS never comes; one that only the generation config names does."""
    full = complete(llm)
    at = first_new_token(full.token_ids, 5)
    token = full.token_ids[at]
    write_hf_folder(tmp_path, TINY)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, token, 600]}))
    other = LLM(tmp_path, num_gpu_blocks_override=32)
    output = complete(other, ignore_eos=False)
    assert output.token_ids == full.token_ids[: at + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", None)
    assert output.text == complete(llm, max_tokens=at).text
    assert complete(other).token_ids == full.token_ids
    output = complete(other, stop_token_ids=[token])
    assert (len(output.token_ids), output.stop_reason) == (at + 1, token)
    output = complete(other, ignore_eos=False, min_tokens=NUM_TOKENS)
    assert len(output.token_ids) == NUM_TOKENS and token not in output.token_ids
    check_idle(other)


def test_the_rest_of_the_context(llm: LLM) -> None:
    (output,) = llm.generate(PROMPT, params(max_tokens=None), use_tqdm=False)
    assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 128
    assert output.outputs[0].finish_reason == "length"


def test_without_detokenizing(llm: LLM) -> None:
    full, output = complete(llm), complete(llm, detokenize=False)
    assert (output.text, output.delta) == ("", "")
    assert output.token_ids == full.token_ids


def test_tokens_that_the_tokenizer_lacks_are_no_text(
    folder: Path, tmp_path: Path, llm: LLM
) -> None:
    """A head with more rows than the tokenizer has tokens."""
    build_tokenizer(300).save(str(tmp_path / "tokenizer.json"))
    ids = {"prompt_token_ids": [5, 6, 7]}
    other = LLM(folder, tokenizer=tmp_path, num_gpu_blocks_override=32)
    expected, output = complete(llm, ids), complete(other, ids)
    assert output.token_ids == expected.token_ids and max(output.token_ids) >= 300
    known = [token for token in output.token_ids if token < 300]
    assert output.text == other.get_tokenizer().decode(known)


# ---- streaming -----------------------------------------------------------------------------------


def test_deltas_join_to_the_text(llm: LLM) -> None:
    asked = [params(), params(n=3, temperature=1, seed=1), params(stop="e", max_tokens=40)]
    prompts = [PROMPT, OTHER, PROMPT]
    expected = llm.generate(prompts, asked, use_tqdm=False)
    texts: dict[tuple[str, int], str] = {}
    finished: dict[str, Any] = {}
    for output in llm.stream(prompts, asked):
        assert output.request_id not in finished
        for sample in output.outputs:
            key = output.request_id, sample.index
            texts[key] = texts.get(key, "") + sample.delta
            assert sample.text == texts[key]
        if output.finished:
            finished[output.request_id] = output
    ids = sorted(finished, key=int)
    for request_id, output in zip(ids, expected, strict=True):
        assert finished[request_id].prompt_token_ids == output.prompt_token_ids
        assert [s.text for s in output.outputs] == [
            texts[request_id, s.index] for s in output.outputs
        ]


def test_abort_in_the_middle_of_a_stream(llm: LLM) -> None:
    five, other = complete(llm, max_tokens=5), complete(llm, OTHER)
    last: dict[str, Any] = {}
    for output in llm.stream([PROMPT, OTHER], params()):
        last[output.request_id] = output
        first = min(last, key=int)
        if output.request_id == first and len(output.outputs[0].token_ids) == 5:
            llm.abort([first, "unknown"])
            llm.abort(first)
    aborted, whole = (last[key].outputs[0] for key in sorted(last, key=int))
    assert (aborted.finish_reason, aborted.token_ids) == ("abort", five.token_ids)
    assert aborted.text == five.text
    assert (whole.finish_reason, whole.text) == ("length", other.text)


def test_a_stream_that_is_given_up_is_aborted(llm: LLM) -> None:
    """Read in part, or not at all."""
    for num_read in (0, 1, 3):
        stream: Any = llm.stream([PROMPT, OTHER], params(n=2, temperature=1))
        for _ in range(num_read):
            next(stream)
        assert llm.engine.has_unfinished_requests
        stream.close()
        check_idle(llm)
    llm.stream(PROMPT, params())  # dropped at once
    check_idle(llm)


def test_generate_inside_a_stream(llm: LLM) -> None:
    full, other = complete(llm), complete(llm, OTHER)
    deltas = ""
    for i, output in enumerate(llm.stream(PROMPT, params())):
        deltas += output.outputs[0].delta
        if i in (0, 7):
            assert complete(llm, OTHER).text == other.text
    assert deltas == output.outputs[0].text == full.text


def test_a_failed_step_ends_what_it_took_part_in(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream, whose request was lost in a step that another call made, says so."""
    expected = complete(llm)
    stream = llm.stream(PROMPT, params())
    next(stream)

    def fail(*args: object) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.core._runner, "submit", fail)
        with pytest.raises(EngineError, match=r"step \d+ failed: no room"):
            complete(llm, OTHER)
    with pytest.raises(EngineError, match="was lost in a step that failed"):
        next(stream)
    check_idle(llm)
    assert complete(llm).text == expected.text
