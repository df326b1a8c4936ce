"""A tokenizer from the metadata of a GGUF file, without any other file.

Owns the meaning of the `tokenizer.ggml.*` keys: byte-level BPE (`gpt2`) and sentencepiece BPE with
byte fallback (`llama`), whose merges are derived from the scores of its pieces. It reads no file
and knows no chat.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md#tokenizer. Sentencepiece merges the
adjacent pair whose joined piece has the highest score, as in BPE (Sennrich et al. 2016) with the
scores in place of the merge list.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NoReturn

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, processors

from cupaged.errors import NotSupportedError, TokenizerError
from cupaged.loading.pre_tokenizers import PRE_TOKENIZERS

__all__ = ["GGUFVocabulary", "build_backend"]

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_SPACE = "\u2581"
# Splitting a piece in two takes time quadratic in its length; real ones have at most a few dozen.
_MAX_PIECE_CHARS = 1024
_SPECIAL_KEYS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}


class GGUFVocabulary:
    """The checked `tokenizer.ggml.*` entries that both kinds of tokenizer have.

    `tokens[i]` is the text of id i, `ids` its inverse, `kinds[i]` its type (1 to 6), and
    `special_tokens` maps `bos_token`, `eos_token`, `unk_token`, `pad_token` to texts, where given.
    Raises `TokenizerError` naming the key and the value.
    """

    def __init__(self, metadata: Mapping[str, object]) -> None:
        self._metadata = metadata
        self.tokens = self.strings("tokenizer.ggml.tokens")
        if not self.tokens:
            _fail("tokenizer.ggml.tokens", "is empty, must hold at least one token")
        self.ids = {token: index for index, token in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            index = next(i for i, token in enumerate(self.tokens) if self.ids[token] != i)
            token = self.tokens[index]
            _fail(
                "tokenizer.ggml.tokens",
                f"must be unique, but {_shown(token)} has the ids {index} and {self.ids[token]}",
            )
        self.kinds = self._read_kinds()
        self.special_tokens: dict[str, str] = {}
        for name, key in _SPECIAL_KEYS.items():
            token_id = self._token_id(key)
            if token_id is not None:
                self.special_tokens[name] = self.tokens[token_id]

    def has(self, key: str) -> bool:
        """Whether the file has `key`."""
        return key in self._metadata

    def strings(self, key: str) -> list[str]:
        """The list of strings at `key`."""
        value = self._required(key)
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            _fail(key, f"must be a list of strings, got {_shown(value)}")
        return value

    def numbers(self, key: str) -> list[float]:
        """The array of numbers at `key`, one for each token."""
        value = self._required(key)
        is_numeric = isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "iuf"
        if not is_numeric and not isinstance(value, list):
            _fail(key, f"must be an array of numbers, got {_shown(value)}")
        numbers: list[float] = np.asarray(value).tolist()
        if len(numbers) != len(self.tokens):
            _fail(key, f"has {len(numbers)} entries, must have one for each of {len(self.tokens)}")
        for index, number in enumerate(numbers):
            if not isinstance(number, int | float) or not math.isfinite(number):
                _fail(key, f"must hold finite numbers, entry {index} is {_shown(number)}")
        return numbers

    def flag(self, key: str, default: bool) -> bool:
        """The boolean at `key`, or `default` where the file does not have it."""
        value = self._metadata.get(key, default)
        if not isinstance(value, bool):
            _fail(key, f"must be true or false, got {_shown(value)}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """The string at `key`, or `default`."""
        value = self._required(key) if default is None else self._metadata.get(key, default)
        if not isinstance(value, str):
            _fail(key, f"must be a string, got {_shown(value)}")
        return value

    def _required(self, key: str) -> object:
        if key not in self._metadata:
            _fail(key, "is missing")
        return self._metadata[key]

    def _read_kinds(self) -> Sequence[float]:
        key = "tokenizer.ggml.token_type"
        if key not in self._metadata:
            return [_NORMAL] * len(self.tokens)
        kinds = self.numbers(key)
        if not set(kinds) <= set(range(_NORMAL, _BYTE + 1)):
            index = next(i for i, kind in enumerate(kinds) if kind not in range(1, 7))
            _fail(key, f"must hold types from 1 to 6, entry {index} is {kinds[index]}")
        return kinds

    def _token_id(self, key: str) -> int | None:
        value = self._metadata.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            _fail(key, f"must be a token id, got {_shown(value)}")
        if not 0 <= value < len(self.tokens):
            _fail(key, f"must be a token id from 0 to {len(self.tokens) - 1}, got {value}")
        return value


def build_backend(metadata: Mapping[str, object]) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """The `tokenizers.Tokenizer` that `metadata` describes, and its named special tokens.

    Args:
        metadata: all keys of the file: scalars, lists of strings, NumPy arrays of numbers.

    Raises:
        TokenizerError: a key is missing, of the wrong type, or disagrees with another one.
        NotSupportedError: a kind of tokenizer, or a pre-tokenizer, that is not built.
    """
    key = "tokenizer.ggml.model"
    model = metadata.get(key)
    if not isinstance(model, str):
        _fail(key, "is missing" if model is None else f"must be a string, got {_shown(model)}")
    if model == "gpt2":
        vocabulary = GGUFVocabulary(metadata)
        backend, adds_bos = _byte_level(vocabulary)
        escapes_spaces = False
    elif model == "llama":
        vocabulary = GGUFVocabulary(metadata)
        adds_space = vocabulary.flag("tokenizer.ggml.add_space_prefix", True)
        backend, adds_bos = _sentencepiece(vocabulary, adds_space), True
        escapes_spaces = not adds_space
    else:
        raise NotSupportedError(f"{key} is {_shown(model)}; supported: gpt2, llama")
    _add_tokens(backend, vocabulary, escapes_spaces)
    _add_post_processor(backend, vocabulary, adds_bos)
    return backend, vocabulary.special_tokens


def _byte_level(vocabulary: GGUFVocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    """Byte-level BPE, and whether it adds a BOS unless told otherwise."""
    key = "tokenizer.ggml.pre"
    name = vocabulary.text(key, "default")
    pre = PRE_TOKENIZERS.get(name)
    if pre is None:
        known = ", ".join(PRE_TOKENIZERS)
        raise NotSupportedError(f"{key} is {_shown(name)}; supported: {known}")
    merges = _listed_merges(vocabulary)
    model = models.BPE(vocab=vocabulary.ids, merges=merges, ignore_merges=pre.ignore_merges)
    backend = tokenizers.Tokenizer(model)
    if pre.normalize is not None:
        backend.normalizer = pre.normalize()
    backend.pre_tokenizer = pre.build()
    backend.decoder = decoders.ByteLevel()
    return backend, pre.adds_bos


def _listed_merges(vocabulary: GGUFVocabulary) -> list[tuple[str, str]]:
    key, ids = "tokenizer.ggml.merges", vocabulary.ids
    merges: list[tuple[str, str]] = []
    for index, merge in enumerate(vocabulary.strings(key)):
        left, space, right = merge.partition(" ")
        if not space or left not in ids or right not in ids or left + right not in ids:
            _fail(
                key,
                f"must hold two tokens whose join is a token, entry {index} is {_shown(merge)}",
            )
        merges.append((left, right))
    return merges


def _sentencepiece(vocabulary: GGUFVocabulary, adds_space: bool) -> tokenizers.Tokenizer:
    """Sentencepiece BPE: no pre-tokenizer, spaces become U+2581, unknown characters bytes."""
    model = models.BPE(
        vocab=vocabulary.ids,
        merges=_scored_merges(vocabulary),
        unk_token=vocabulary.special_tokens.get("unk_token"),
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(model)
    to_pieces: list[normalizers.Normalizer] = [normalizers.Replace(" ", _SPACE)]
    to_text = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if adds_space:
        to_pieces.insert(0, normalizers.Prepend(_SPACE))
        to_text.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(to_pieces)
    backend.decoder = decoders.Sequence(to_text)
    return backend


def _scored_merges(vocabulary: GGUFVocabulary) -> list[tuple[str, str]]:
    """Every way to join two pieces into a third, the third's score descending.

    Equal scores go by id, the splits of one piece by the length of the left half.
    """
    key = "tokenizer.ggml.scores"
    scores = vocabulary.numbers(key)
    pieces = {
        piece
        for piece, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True)
        if kind == _NORMAL
    }
    ranked = sorted(range(len(scores)), key=lambda index: -scores[index])
    merges: list[tuple[str, str]] = []
    for index in ranked:
        piece = vocabulary.tokens[index]
        if piece not in pieces:
            continue
        if len(piece) > _MAX_PIECE_CHARS:
            _fail(
                "tokenizer.ggml.tokens",
                f"entry {index} has {len(piece)} characters, must have at most {_MAX_PIECE_CHARS}",
            )
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in pieces and right in pieces:
                merges.append((left, right))
    return merges


def _add_tokens(
    backend: tokenizers.Tokenizer, vocabulary: GGUFVocabulary, escapes_spaces: bool
) -> None:
    """Control tokens and user-defined ones are found in the text before anything else.

    BOS and EOS count as control tokens whatever their type. The unknown and the padding token do
    not: files exist that name an ordinary token there. A user-defined token that holds U+2581
    stands for one with spaces, so it is looked for after spaces have become U+2581. Where a
    space is put before the text as well, that does not work and such a token is never used.
    """
    control, user_defined = [], []
    named = {vocabulary.special_tokens.get(name) for name in ("bos_token", "eos_token")}
    for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True):
        if kind in (_CONTROL, _UNKNOWN) or token in named:
            control.append(AddedToken(token, special=True, normalized=False))
        elif kind == _USER_DEFINED:
            normalized = escapes_spaces and _SPACE in token
            user_defined.append(AddedToken(token, special=False, normalized=normalized))
    backend.add_special_tokens(control)
    backend.add_tokens(user_defined)


def _add_post_processor(
    backend: tokenizers.Tokenizer, vocabulary: GGUFVocabulary, adds_bos: bool
) -> None:
    """BOS before and EOS behind the text, each where the file or the model's kind says so."""
    template, special = ["$A"], []
    for name, default in (("bos", adds_bos), ("eos", False)):
        key = f"tokenizer.ggml.add_{name}_token"
        if not vocabulary.flag(key, default):
            continue
        token = vocabulary.special_tokens.get(f"{name}_token")
        if token is None:
            if not vocabulary.has(key):
                continue
            _fail(key, f"is true, but tokenizer.ggml.{name}_token_id is missing")
        special.append((token, vocabulary.ids[token]))
        marker = f"{token}:0"
        template = [marker, *template] if name == "bos" else [*template, marker]
    if special:
        backend.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=special
        )


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _fail(key: str, problem: str) -> NoReturn:
    raise TokenizerError(f"GGUF tokenizer: {key} {problem}")
