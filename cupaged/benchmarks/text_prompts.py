"""Prompts as texts, for servers that take nothing else: the tokenizer on this side.

A server is told a text and makes token ids of it by itself, so made-up ids are turned into a text
that has as many tokens. Not every sequence of ids is what its own text is tokenised to; what comes
back is cut or filled up and turned into a text again, a few times, as vLLM's benchmark does, and
what is still too long loses characters. Tokens that are special, or parts of a character, are left
out from the beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

from cupaged.benchmarks.datasets import ModelFacts, Sample
from cupaged.errors import ConfigError
from cupaged.loading.tokenizer import Tokenizer

__all__ = ["TextPrompts"]

_TRIES = 10
_REPLACEMENT = "\ufffd"


class TextPrompts:
    """Counts and makes texts by the tokenizer of the model that is measured."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        ids = range(tokenizer.vocab_size)
        self._left_out = frozenset(i for i in ids if not self._is_text(i))
        self._texts = [i for i in ids if i not in self._left_out]

    @classmethod
    def load(cls, name: str) -> Self:
        """By the name of a model: a folder, a .gguf file, or one of the hub that lies here.

        Raises:
            ConfigError: it is not on this machine.
            CupagedError: its tokenizer cannot be read.
        """
        from cupaged.server.model_text import load_text, local_model

        path: Path | None = local_model(name)
        if path is None:
            allowed = "a folder, a .gguf file, or a model that `cupaged pull` has fetched"
            raise ConfigError("--tokenizer", name, allowed)
        return cls(load_text(path).tokenizer)

    def count(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text, without what a server puts around it."""
        return [len(self._ids(text)) for text in texts]

    def describe(self, model: ModelFacts) -> ModelFacts:
        """The same model with the vocabulary of the tokenizer; what is no text is special."""
        left_out = tuple(sorted(self._left_out))
        size = self._tokenizer.vocab_size
        return replace(model, vocab_size=size, special_token_ids=left_out)

    def as_text(self, sample: Sample) -> Sample:
        """A sample whose prompt is a text; `prompt_tokens` is what that text has."""
        ids = sample.prompt
        if isinstance(ids, str):
            return sample
        wanted = [self._texts[i % len(self._texts)] if i in self._left_out else i for i in ids]
        text = self._tokenizer.decode(wanted)
        for _ in range(_TRIES):
            found = self._ids(text)
            if len(found) == len(wanted):
                break
            text = self._tokenizer.decode(found[: len(wanted)] + wanted[len(found) :])
        while len(found := self._ids(text)) > len(wanted) and len(text) > 1:
            text = text[:-1]
        return replace(sample, prompt=text, prompt_tokens=len(found))

    def _is_text(self, token_id: int) -> bool:
        text = self._tokenizer.decode([token_id])  # nothing, if it is special
        return bool(text) and _REPLACEMENT not in text

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)
