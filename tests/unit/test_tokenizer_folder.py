"""Tokenizers from a folder of Hugging Face files: which file decides what."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, models, pre_tokenizers, processors

from cupaged.errors import NotSupportedError, TokenizerError
from cupaged.loading.tokenizer import Tokenizer
from tests.sample_tokenizers import smollm2, smollm2_golden


def write_folder(
    folder: Path, config: object = None, *, post_processor: bool = False, **files: object
) -> Path:
    """A folder of a tokenizer of words; `files` maps names, `__` for the dot, to their content."""
    words = {"<s>": 0, "</s>": 1, "<unk>": 2, "a": 3, "b": 4, "<pad>": 5}
    backend = tokenizers.Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<s>"])
    if post_processor:
        backend.post_processor = processors.TemplateProcessing(
            single=["<s>:0", "$A"], special_tokens=[("<s>", 0)]
        )
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    backend.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for name, content in files.items():
        path = folder / name.replace("__", ".")
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


@pytest.mark.parametrize("post_processor", [False, True])
@pytest.mark.parametrize("add_bos_token", [None, False, True])
def test_the_post_processor_decides_on_bos(
    tmp_path: Path, post_processor: bool, add_bos_token: bool | None
) -> None:
    # As transformers 5.24 does it: it drops `add_bos_token` where there is a `tokenizer.json`.
    config: dict[str, object] = {"bos_token": "<s>"}
    config |= {} if add_bos_token is None else {"add_bos_token": add_bos_token}
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, config, post_processor=post_processor))
    assert tokenizer.encode("a b a") == ([0] if post_processor else []) + [3, 4, 3]
    assert tokenizer.encode("a b a", add_special_tokens=False) == [3, 4, 3]
    assert tokenizer.encode("") == ([0] if post_processor else [])
    assert (tokenizer.bos_token, tokenizer.bos_token_id) == ("<s>", 0)


def test_a_folder_without_configuration(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path))
    assert tokenizer.bos_token is None and tokenizer.bos_token_id is None
    assert tokenizer.chat_template is None
    assert tokenizer.special_ids == {0}
    assert tokenizer.vocab_size == 6


def test_named_tokens_become_special(tmp_path: Path) -> None:
    config = {
        "bos_token": {"content": "<s>", "lstrip": False},
        "eos_token": "</s>",
        "pad_token": "<not there>",
        "additional_special_tokens": ["b", {"content": "<pad>"}],
        "image_token": "<image>",
        "sep_token": None,
        "add_prefix_space": False,
    }
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, config))
    assert tokenizer.special_ids == {0, 1, 4, 5}
    assert tokenizer.decode([3, 1, 3, 4]) == "a a"
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("</s>", 1)
    assert (tokenizer.pad_token, tokenizer.vocab_size) == ("<not there>", 6)
    assert tokenizer.special_tokens["image_token"] == "<image>"


def test_special_tokens_map_counts_only_without_a_list_of_added_tokens(tmp_path: Path) -> None:
    special = {"eos_token": "</s>"}
    folder = write_folder(tmp_path, {"eos_token": "b"}, special_tokens_map__json=special)
    assert Tokenizer.from_folder(folder).eos_token == "</s>"
    config = {"eos_token": "b", "added_tokens_decoder": {}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer.from_folder(folder).eos_token == "b"


def test_added_tokens_of_the_configuration(tmp_path: Path) -> None:
    added = {"6": {"content": "<x>", "special": True}, "7": {"content": "<y>", "special": False}}
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, {"added_tokens_decoder": added}))
    assert tokenizer.encode("a<x> <y>") == [3, 6, 7]
    assert tokenizer.special_ids == {0, 6}
    assert tokenizer.vocab_size == 8


@pytest.mark.parametrize(
    ("files", "default", "named"),
    [
        ({"config": {"chat_template": "C"}}, "C", {}),
        (
            {
                "config": {
                    "chat_template": [
                        {"name": "default", "template": "C"},
                        {"name": "rag", "template": "R"},
                    ]
                }
            },
            "C",
            {"rag": "R"},
        ),
        ({"config": {"chat_template": "C"}, "chat_template__jinja": "J"}, "J", {}),
        (
            {"config": {"chat_template": "C"}, "chat_template__json": {"chat_template": "N"}},
            "N",
            {},
        ),
        (
            {"chat_template__json": {"chat_template": "N"}, "chat_template__jinja": "J"},
            "J",
            {},
        ),
    ],
)
def test_where_the_chat_template_comes_from(
    tmp_path: Path, files: dict[str, Any], default: str, named: dict[str, str]
) -> None:
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, **files))
    assert tokenizer.chat_template == default
    assert tokenizer.named_templates == named


def test_additional_chat_templates(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, {"chat_template": "C"}, chat_template__jinja="J")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("R")
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.chat_template, tokenizer.named_templates) == ("J", {"rag": "R"})


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("tokenizer.json", b"", []),
        ("tokenizer.json", b"{}", []),
        ("tokenizer.json", b"\xff\xfe", []),
        ("tokenizer_config.json", b"{", []),
        ("tokenizer_config.json", b"[1]", ["[1]"]),
        ("tokenizer_config.json", b"\xff", []),
        ("tokenizer_config.json", b"[" * 100_000, []),
        ("tokenizer_config.json", b'{"chat_template": 3}', ["chat_template", "3"]),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "x"}]}', ["chat_template"]),
        ("tokenizer_config.json", b'{"added_tokens_decoder": 3}', ["added_tokens_decoder"]),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"x": {}}}', ["added_tokens_decoder"]),
        (
            "tokenizer_config.json",
            b'{"added_tokens_decoder": {"9": {"content": "<x>"}}}',
            ["added_tokens_decoder", "'<x>'", "9", "6"],
        ),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"6": {}}}', ["content"]),
        ("special_tokens_map.json", b"nothing", []),
        ("chat_template.jinja", b"\xff", []),
        ("chat_template.json", b"3", []),
    ],
)
def test_damaged_files_are_named(
    tmp_path: Path, name: str, content: bytes, named: list[str]
) -> None:
    write_folder(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.from_folder(tmp_path)
    for part in [str(tmp_path / name), *named]:
        assert part in str(caught.value)


def test_what_lies_there_instead(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a")
    with pytest.raises(NotSupportedError, match=r"tokenizer\.model without .*save_pretrained"):
        Tokenizer.from_folder(tmp_path)


def test_a_saved_gguf_tokenizer_is_the_same_from_a_folder(tmp_path: Path) -> None:
    smollm2()._backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.special_ids == smollm2().special_ids
    for case in smollm2_golden()["tokenizer"]:
        assert tokenizer.encode(case["text"]) == case["ids"]


def test_an_added_token_stays_as_it_is_when_named(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    backend.add_tokens([AddedToken("</s>", lstrip=True, special=False)])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.special_ids == {1}
    assert tokenizer.encode("a   </s>") == [0, 1]  # the spaces still belong to the token
