"""The text half of serving: the same text and ends, however the core's outputs are put together."""

from __future__ import annotations

import random
from typing import Any

import pytest

from cupaged.engine.completion import Completion
from cupaged.engine.text_shell import TextRequest, TextShell
from cupaged.errors import ContextLengthError, InvalidParameterError, PromptError
from cupaged.loading.token_bytes import TokenBytes
from cupaged.loading.tokenizer import Tokenizer
from cupaged.outputs import CoreOutput, FinishReason, TokenLogprobs
from cupaged.sampling_params import SamplingParams
from tests.sample_tokenizers import smollm2, smollm2_byte_ids, spm

TEXT = "Naïve 東京 🚀 and some words, some of them twice."


def outputs_of(
    ids: list[int], reason: FinishReason | None, *, index: int = 0, logprobs: bool = False
) -> list[CoreOutput]:
    """One output a token."""
    made = [
        CoreOutput(
            "r",
            index,
            [token],
            logprobs=[TokenLogprobs([token], [-0.5 * i], [1])] if logprobs else None,
            first_scheduled_time=1.0,
        )
        for i, token in enumerate(ids)
    ]
    made[-1].finish_reason = reason
    return made


def grouped(outputs: list[CoreOutput], draw: random.Random) -> list[list[CoreOutput]]:
    """The same outputs in groups, as a slow reader would get them."""
    groups: list[list[CoreOutput]] = [[]]
    for output in outputs:
        groups[-1].append(output)
        if draw.random() < 0.4:
            groups.append([])
    return [group for group in groups if group]


def said(completion: Completion) -> tuple[Any, ...]:
    output = completion.output()
    return (
        output.text, output.token_ids, output.finish_reason, output.stop_reason,
        output.cumulative_logprob,
    )  # fmt: skip


@pytest.mark.parametrize("make", [smollm2, spm])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"stop": ["some"]},
        {"stop": ["some"], "include_stop_str_in_output": True},
        {"stop": ["some", "京"], "min_tokens": 9},
        {"logprobs": 0},
        {"logprobs": 0, "stop": ["words"]},
        {"n": 3, "stop": ["some"]},
        {"detokenize": False},
    ],
)
def test_outputs_in_groups_mean_the_same(make: Any, fields: dict[str, Any]) -> None:
    tokenizer: Tokenizer = make()
    params = SamplingParams(max_tokens=None, **fields)
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    draw = random.Random(5)
    for _ in range(20):
        samples = [
            outputs_of(ids[i:], "length", index=i, logprobs="logprobs" in fields)
            for i in range(params.n)
        ]
        turns = [i for i, sample in enumerate(samples) for _ in sample]
        draw.shuffle(turns)  # the samples are mixed, each keeps its own order
        queues = [iter(sample) for sample in samples]
        outputs = [next(queues[i]) for i in turns]
        single = TextRequest(tokenizer, "r", None, [1], params, 0.0)
        ended: list[tuple[int, FinishReason]] = []
        for output in outputs:
            reason = single.append(copied(output), 2.0)
            if reason is not None:
                ended.append((output.index, reason))
        together = TextRequest(tokenizer, "r", None, [1], params, 0.0)
        told: list[tuple[int, FinishReason]] = []

        def end(index: int, reason: FinishReason, to: Any = told) -> None:
            to.append((index, reason))

        for group in grouped(outputs, draw):
            together.append_all([copied(o) for o in group], 2.0, end)
        assert single.finished and together.finished
        for one, other in zip(single.completions, together.completions, strict=True):
            assert said(one) == said(other)
        # What the core has ended by itself need not be ended there.
        assert set(told) <= set(ended)


def copied(output: CoreOutput) -> CoreOutput:
    """`append_all` uses its outputs up."""
    logprobs = None if output.logprobs is None else [*output.logprobs]
    return CoreOutput(
        output.request_id, output.index, [*output.new_token_ids], logprobs=logprobs,
        first_scheduled_time=output.first_scheduled_time, finish_reason=output.finish_reason,
    )  # fmt: skip


def test_taking_gives_everything_once() -> None:
    tokenizer = smollm2()
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    request = TextRequest(
        tokenizer, "r", None, [1], SamplingParams(max_tokens=None, logprobs=0), 0.0
    )
    [completion] = request.completions
    text = ""
    taken: list[int] = []
    told: list[TokenLogprobs] = []
    for output in outputs_of(ids, "length", logprobs=True):
        request.append(output, 2.0)
        assert completion.num_new_tokens == 1
        piece, token_ids, logprobs = completion.take()
        text, taken, told = text + piece, taken + token_ids, told + logprobs
    assert (text, taken) == (TEXT, ids)
    assert [position.token_ids for position in told] == [[token] for token in ids]
    assert completion.take() == ("", [], [])
    assert completion.num_tokens == len(ids)


def test_passing_tokens_on_is_appending_and_taking() -> None:
    for make in (smollm2, spm):
        tokenizer = make()
        ids = tokenizer.encode(TEXT, add_special_tokens=False)
        completion = Completion(0, tokenizer, [1], SamplingParams(max_tokens=None))
        assert completion.is_plain
        text = "".join(completion.pass_on([token]) for token in ids)
        completion.end("length")
        rest, token_ids, _ = completion.take()
        assert text + rest == TEXT.removeprefix(" ") or text + rest == " " + TEXT
        assert token_ids == [] and completion.num_tokens == len(ids)
    assert not Completion(0, tokenizer, [1], SamplingParams(stop=["x"])).is_plain
    assert not Completion(0, tokenizer, [1], SamplingParams(logprobs=1)).is_plain
    silent = Completion(0, tokenizer, [1], SamplingParams(detokenize=False))
    assert silent.is_plain and silent.pass_on([5, 6]) == ""
    assert silent.token_ids == [5, 6] and silent.take() == ("", [], [])


def test_prompts_and_seeds() -> None:
    tokenizer = smollm2()
    shell = TextShell(tokenizer, max_model_len=4, eos_token_ids=[2], seed=7)
    assert shell.encode({"prompt": "a"}) == shell.encode("a") == ("a", tokenizer.encode("a"))
    assert shell.encode({"prompt_token_ids": [3, 4]}) == shell.encode([3, 4]) == (None, [3, 4])
    with pytest.raises(ContextLengthError, match="prompt length in characters"):
        shell.encode("x" * 4097)
    for bad in ("", {"text": "x"}, [1.5], 7):
        with pytest.raises(PromptError):
            shell.encode(bad)  # type: ignore[arg-type]
    draws = random.Random(7)
    for request_id in ("a", "b"):
        made = shell.core_request(request_id, [1], SamplingParams(), 3)
        assert (made.request_id, made.priority, made.eos_token_ids) == (request_id, 3, (2,))
        assert made.seed == draws.getrandbits(64)
    assert shell.core_request("c", [1], SamplingParams(seed=5)).seed == 5
    with pytest.raises(InvalidParameterError, match="sampling_params"):
        shell.core_request("d", [1], None)  # type: ignore[arg-type]


# ---- bytes of tokens ---------------------------------------------------------------------------


def test_bytes_of_byte_level_tokens() -> None:
    tokenizer = smollm2()
    texts = TokenBytes(tokenizer)
    for byte, token in smollm2_byte_ids().items():
        assert texts[token] == bytes([byte])
    for text in ("東京", "🚀", " naïve", "\n\n"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(texts[token] for token in ids) == text.encode()
    assert texts[tokenizer.vocab_size + 5] == b""
    special = next(iter(tokenizer.special_ids))
    assert texts[special] == (tokenizer.token_text(special) or "").encode()


def test_bytes_of_byte_fallback_tokens() -> None:
    tokenizer = spm()
    texts = TokenBytes(tokenizer)
    found = {texts[token] for token in tokenizer.byte_fallback_ids}
    assert found == {bytes([byte]) for byte in range(256)}


# ---- texts that are whole ----------------------------------------------------------------------


def test_whole_texts_are_those_that_join() -> None:
    tokenizer = smollm2()
    whole = tokenizer.whole_texts
    draw = random.Random(3)
    for _ in range(200):
        ids = [draw.randrange(tokenizer.vocab_size) for _ in range(6)]
        texts = [whole[token] for token in ids]
        if None not in texts:
            assert "".join(map(str, texts)) == tokenizer.decode(ids)
    assert all(whole[token] is None for token in tokenizer.special_ids)
    assert whole[smollm2_byte_ids()[0xC3]] is None
    assert whole[tokenizer.vocab_size + 1] is None
    assert all(spm().whole_texts[token] is None for token in range(20))
