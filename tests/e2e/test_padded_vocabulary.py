"""A head that is padded past the tokenizer, and whose padding has the largest logits of all."""

from __future__ import annotations

from pathlib import Path

from cupaged import LLM, SamplingParams
from tests.tiny_models import TINIER, build_tokenizer, write_hf_folder

NUM_TOKENS = 300  # in the tokenizer; the head has 509 rows
PADDING = range(NUM_TOKENS, TINIER.vocab_size)


def test_padding_is_drawn_without_an_error_and_has_no_text(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "padded", TINIER)
    build_tokenizer(NUM_TOKENS).save(str(folder / "tokenizer.json"))
    llm = LLM(folder, num_gpu_blocks_override=16)
    asked = [
        SamplingParams(temperature=0, max_tokens=5, logprobs=3, ignore_eos=True, logit_bias=bias)
        for bias in (dict.fromkeys(PADDING, 100.0), dict.fromkeys(range(NUM_TOKENS), 50.0))
    ]
    (padded,), (plain,) = (output.outputs for output in llm.generate(["Hello"] * 2, asked))
    assert len(padded.token_ids) == len(plain.token_ids) == 5
    assert all(token in PADDING for token in padded.token_ids)
    assert padded.text == ""
    assert padded.logprobs is not None
    drawn = zip(padded.logprobs, padded.token_ids, strict=True)
    assert {at[token].decoded_token for at, token in drawn} == {""}
    assert all(token < NUM_TOKENS for token in plain.token_ids)
    assert plain.text != ""
    assert llm.generate("Hello", asked[1])[0].outputs[0].token_ids == plain.token_ids
