"""Names, files and sources of chat templates."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from tokenizers.models import BPE

from cupaged.errors import ChatTemplateError
from cupaged.loading.template_choice import choose_template
from cupaged.loading.tokenizer import Tokenizer


@pytest.fixture
def tokenizer() -> Tokenizer:
    templates = {"default": "own {{ 1 }}", "tool_use": "tools {{ 2 }}"}
    return Tokenizer(tokenizers.Tokenizer(BPE({"a": 0}, [])), templates=templates)


def test_the_models_own(tokenizer: Tokenizer) -> None:
    assert choose_template(None, tokenizer) == "own {{ 1 }}"
    assert choose_template("tool_use", tokenizer) == "tools {{ 2 }}"


def test_a_source(tokenizer: Tokenizer) -> None:
    assert choose_template("{{ messages }}", tokenizer) == "{{ messages }}"


@pytest.mark.parametrize("kind", [str, Path])
def test_a_file(tokenizer: Tokenizer, tmp_path: Path, kind: type) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text("ü {{ 3 }}", encoding="utf-8")
    assert choose_template(kind(path), tokenizer) == "ü {{ 3 }}"


def test_a_file_that_is_not_there_names_the_templates(tokenizer: Tokenizer) -> None:
    with pytest.raises(ChatTemplateError, match=r"no such file.*named templates: tool_use"):
        choose_template("tools.jinja", tokenizer)


def test_files_that_cannot_be_read(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "binary.jinja").write_bytes(b"\xff\xfe\xff")
    (tmp_path / "large.jinja").write_bytes(b"x" * ((1 << 20) + 1))
    for name, message in (("binary", "cannot be read"), ("large", "more than 1048576 bytes")):
        with pytest.raises(ChatTemplateError, match=message):
            choose_template(tmp_path / f"{name}.jinja", tokenizer)
    with pytest.raises(ChatTemplateError, match="cannot be read"):
        choose_template(tmp_path, tokenizer)
