"""The text half of a model's files: tokenizer and chat template, without its weights."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from cupaged.errors import ModelNotFoundError
from cupaged.loading.chat_template import ChatTemplate
from cupaged.loading.gguf import GGUFFile
from cupaged.loading.hub import HubName, cached_model
from cupaged.loading.hub_name import parse_model_name
from cupaged.loading.model_files import DEFAULT_MODEL_PACKAGE, DEFAULT_MODEL_REPO, find_model
from cupaged.loading.template_choice import choose_template
from cupaged.loading.token_bytes import TokenBytes
from cupaged.loading.tokenizer import Tokenizer


@dataclass(frozen=True)
class ModelText:
    """What text is made of and made into.

    Args:
        tokenizer: of the model.
        template_source: Jinja source of the chat template, None if there is none.
        folder: with the files of the tokenizer; None where a GGUF file holds it.
    """

    tokenizer: Tokenizer
    template_source: str | None = None
    folder: Path | None = None

    @cached_property
    def template(self) -> ChatTemplate | None:
        """The chat template, compiled."""
        special_tokens: dict[str, Any] = dict(self.tokenizer.special_tokens)
        source = self.template_source
        return ChatTemplate(source, **special_tokens) if source else None

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """The bytes of single tokens."""
        return TokenBytes(self.tokenizer)


def local_model(model: str | None) -> Path | None:
    """The model's folder or file if it lies on this machine; no network is looked at.

    Raises:
        CupagedError: it is no name of a model.
    """
    if model is None:
        if importlib.util.find_spec(DEFAULT_MODEL_PACKAGE) is not None:
            return find_model(None)
        return cached_model(HubName(DEFAULT_MODEL_REPO))
    if os.path.exists(os.path.expanduser(model)):
        return find_model(model)
    return cached_model(parse_model_name(model))


def load_text(
    path: Path, *, tokenizer: str | None = None, chat_template: str | None = None
) -> ModelText:
    """Read tokenizer and chat template of a model.

    Args:
        path: its folder or .gguf file.
        tokenizer: a folder whose tokenizer replaces the model's own.
        chat_template: a file, the name of one of the model's templates, or Jinja source.

    Raises:
        ModelError: a file is missing or damaged, or the template does not compile.
        NotSupportedError: a kind of tokenizer that is not built.
    """
    folder: Path | None = None
    if tokenizer is not None:
        folder = Path(tokenizer).expanduser()
    elif path.is_dir():
        folder = path
    if folder is not None:
        made = Tokenizer.from_folder(folder)
    else:
        try:
            with GGUFFile(path) as file:
                made = Tokenizer.from_gguf(file.metadata)
        except OSError as error:
            raise ModelNotFoundError(f"{path}: {error.strerror}") from None
    text = ModelText(made, choose_template(chat_template, made), folder)
    _ = text.template  # compiles it, so that a bad one ends the start and not a request
    return text
