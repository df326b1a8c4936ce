"""A tiny model end to end: chat, and requests that are refused while the next one is served."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors

from cupaged.errors import (
    CapacityError,
    ChatTemplateError,
    CupagedError,
    InvalidParameterError,
    PromptError,
)
from cupaged.llm import LLM
from tests.e2e.tiny_llm import NUM_TOKENS, OTHER, PROMPT, check_idle, complete, params
from tests.tiny_models import (
    BOS_ID,
    CHAT_TEMPLATE,
    EOS_ID,
    SPECIAL_TOKENS,
    TINY,
    build_tokenizer,
    write_hf_folder,
)

BOS = SPECIAL_TOKENS[BOS_ID]


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


# ---- chat ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def with_bos(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """A tokenizer that puts BOS before every text, and a template that writes it as well."""
    path = write_hf_folder(tmp_path_factory.mktemp("models") / "bos", TINY)
    tokenizer = build_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, BOS_ID)]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return LLM(path, num_gpu_blocks_override=32, chat_template=template)


def test_chat_has_one_bos(with_bos: LLM) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    ids = with_bos.render_chat(messages)["prompt_token_ids"]
    assert ids[0] == BOS_ID and ids.count(BOS_ID) == 1
    (chatted,) = with_bos.chat(messages, params(), use_tqdm=False)
    (raw,) = with_bos.generate("Hello", params(), use_tqdm=False)
    assert chatted.prompt_token_ids == raw.prompt_token_ids == ids
    assert chatted.outputs[0].token_ids == raw.outputs[0].token_ids


def test_chat_renders_the_template_of_the_model(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    ids = llm.render_chat(messages)["prompt_token_ids"]
    text = f"{BOS}user\nHi{SPECIAL_TOKENS[EOS_ID]}\n{BOS}assistant\n"
    assert llm.get_tokenizer().decode(ids, skip_special_tokens=False) == text
    ids = llm.render_chat(messages, add_generation_prompt=False)["prompt_token_ids"]
    assert llm.get_tokenizer().decode(ids, skip_special_tokens=False) == text[: -len(BOS) - 10]
    one, two = llm.chat([messages, messages], params(max_tokens=4), use_tqdm=False)
    assert one.outputs[0].text == two.outputs[0].text


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ lipsum.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ x.y }}",
    ],
)
def test_a_poisoned_template_fails_cleanly(template: str, folder: Path) -> None:
    llm = LLM(folder, chat_template=template, num_gpu_blocks_override=32)
    with pytest.raises(ChatTemplateError):
        llm.chat([{"role": "user", "content": "Hi"}], use_tqdm=False)
    assert complete(llm).text
    check_idle(llm)


def test_without_a_template(folder: Path, tmp_path: Path) -> None:
    write_hf_folder(tmp_path, TINY)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config.pop("chat_template") == CHAT_TEMPLATE
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    llm = LLM(tmp_path, num_gpu_blocks_override=32)
    with pytest.raises(ChatTemplateError, match="has no chat template"):
        llm.chat([{"role": "user", "content": "Hi"}])


# ---- refused -------------------------------------------------------------------------------------


def test_an_empty_prompt(llm: LLM, with_bos: LLM) -> None:
    with pytest.raises(PromptError, match="at least one token"):
        complete(llm, "")
    (output,) = with_bos.generate("", params(), use_tqdm=False)
    assert output.prompt_token_ids == [BOS_ID] and len(output.outputs[0].token_ids) == NUM_TOKENS
    with pytest.raises(PromptError):
        with_bos.generate({"prompt_token_ids": []}, use_tqdm=False)
    with pytest.raises(PromptError, match="messages"):
        with_bos.chat([[]], use_tqdm=False)
    check_idle(with_bos)


BAD_PROMPTS: list[Any] = [
    5, None, b"text", 1.5, {"text": "x"}, {"prompt": 3}, {"prompt_token_ids": "abc"},
    {"prompt": "x", "prompt_token_ids": [5]}, {"prompt_token_ids": [5, 1.5]},
    {"prompt_token_ids": 5}, [True], [-1], [TINY.vocab_size], [5, 2**31], [5, 2**80],
    [[]], [[5, "x"]], [None], [["x"]],
    "\ud800", [5] * 128, [5] * 4000, "word " * 400, "x" * (128 * 1024 + 1),
]  # fmt: skip


@pytest.mark.parametrize("prompt", BAD_PROMPTS, ids=lambda prompt: repr(prompt)[:30])
def test_bad_prompts_are_refused_and_the_next_is_served(prompt: Any, llm: LLM) -> None:
    expected = complete(llm).text
    with pytest.raises(PromptError):
        complete(llm, prompt)
    check_idle(llm)
    with pytest.raises(PromptError):
        llm.generate([PROMPT, PROMPT, prompt], params(), use_tqdm=False)
    check_idle(llm)
    assert complete(llm).text == expected


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"n": 65}, InvalidParameterError),
        ({"stop_token_ids": [TINY.vocab_size], "min_tokens": 3}, InvalidParameterError),
        ({"max_tokens": 120}, CapacityError),
    ],
)
def test_parameters_that_do_not_fit_the_engine(
    changes: dict[str, Any], error: type[CupagedError], folder: Path
) -> None:
    llm = LLM(folder, num_gpu_blocks_override=4, max_model_len=256)  # 64 tokens in the pool
    with pytest.raises(error):
        llm.generate([PROMPT, PROMPT], [params(), params(**changes)], use_tqdm=False)
    check_idle(llm)
    assert complete(llm).text


def test_parameters_of_another_kind(llm: LLM) -> None:
    for bad in ([params()], [params()] * 3, [params(), {"n": 1}], [params(), None]):
        with pytest.raises(InvalidParameterError):
            llm.generate([PROMPT, OTHER], bad, use_tqdm=False)  # type: ignore[arg-type]
        check_idle(llm)


def test_no_prompts(llm: LLM) -> None:
    assert llm.generate([], use_tqdm=False) == []
    assert list(llm.stream([])) == []


def test_priorities_need_a_policy_that_looks_at_them(llm: LLM) -> None:
    with pytest.raises(InvalidParameterError, match="priority must be None unless"):
        llm.generate(["a", "b"], use_tqdm=False, priority=[1, 0])


def test_no_parameters_for_some_prompts_is_no_default(llm: LLM) -> None:
    with pytest.raises(InvalidParameterError, match="number of sampling_params"):
        llm.generate(["a"], [], use_tqdm=False)
