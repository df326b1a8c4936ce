"""Text to token ids and back.

Owns `Tokenizer`, and how one is read from a folder of Hugging Face files: which file decides what.
The algorithms are those of the `tokenizers` package; `gguf_tokenizer` builds one from a GGUF file.
It renders no chat and keeps no state between calls: streaming is `engine.detokenizer`'s business.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import tokenizers
from tokenizers import AddedToken

from cupaged.errors import NotSupportedError, PromptError, TokenizerError
from cupaged.loading.gguf_tokenizer import build_backend

__all__ = ["Tokenizer"]

_DEFAULT_TEMPLATE = "default"
_GGUF_TEMPLATE = "tokenizer.chat_template"
_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_REPLACEMENT = "\ufffd"
_SHORT_CHARS = 4096
_HEX_DIGITS = "0123456789ABCDEFabcdef"


class Tokenizer:
    """Encodes and decodes, and knows the special tokens and chat templates that came with it.

    Args:
        backend: the algorithm and the vocabulary.
        special_tokens: named special tokens, `bos_token` and so on, as chat templates see them.
        templates: chat templates by name; the one named `default` is `chat_template`.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] = MappingProxyType({}),
        templates: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        # A tokenizer file may carry the truncation and padding of its training.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens = dict(special_tokens)
        self.bos_token = special_tokens.get("bos_token")
        self.eos_token = special_tokens.get("eos_token")
        self.pad_token = special_tokens.get("pad_token")
        self.unk_token = special_tokens.get("unk_token")
        self.bos_token_id = self._id_of(self.bos_token)
        self.eos_token_id = self._id_of(self.eos_token)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self.vocab_size = max(backend.get_vocab_size(False), max(added, default=-1) + 1)
        """One more than the largest token id."""
        self.chat_template = templates.get(_DEFAULT_TEMPLATE)
        self.named_templates = {
            name: source for name, source in templates.items() if name != _DEFAULT_TEMPLATE
        }

    @classmethod
    def from_folder(cls, path: str | Path) -> Self:
        """Read `tokenizer.json` and what lies beside it.

        The post-processor in `tokenizer.json` alone decides whether a BOS is added: like
        transformers, `add_bos_token` in `tokenizer_config.json` is not looked at. Special tokens
        that the configuration names, and that are in the vocabulary, become special.

        Raises:
            TokenizerError: `tokenizer.json` is missing, or a file is damaged.
            NotSupportedError: there is only a format that needs converting first.
        """
        folder = Path(path)
        backend = _read_backend(folder)
        config = _read_json(folder / "tokenizer_config.json")
        named = dict(config)
        if "added_tokens_decoder" not in config:
            named |= _read_json(folder / "special_tokens_map.json")
        special_tokens = {
            key: text
            for key, value in named.items()
            if key.endswith("_token") and (text := _token_content(value)) is not None
        }
        _add_listed_tokens(backend, config, folder / "tokenizer_config.json")
        _mark_special(backend, [*special_tokens.values(), *_extra_special_tokens(named)])
        templates = _read_templates(folder, config)
        return cls(backend, special_tokens=special_tokens, templates=templates)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object]) -> Self:
        """Build the tokenizer that the metadata of a GGUF file describes.

        Args:
            metadata: all keys of the file: scalars, lists of strings, NumPy arrays of numbers.

        Raises:
            TokenizerError: a key is missing, of the wrong type, or disagrees with another one.
            NotSupportedError: a kind of tokenizer, or a pre-tokenizer, that is not built.
        """
        backend, special_tokens = build_backend(metadata)
        templates: dict[str, str] = {}
        for key, value in metadata.items():
            name = key.removeprefix(f"{_GGUF_TEMPLATE}.") if key != _GGUF_TEMPLATE else ""
            if name != key:
                if not isinstance(value, str):
                    raise TokenizerError(
                        f"GGUF tokenizer: {key} must be a string, got {value!r:.80}"
                    )
                templates[name or _DEFAULT_TEMPLATE] = value
        return cls(backend, special_tokens=special_tokens, templates=templates)

    def to_json(self) -> str:
        """The content of a `tokenizer.json`."""
        return str(self._backend.to_str())

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`.

        Args:
            text: special tokens written out in it are recognised.
            add_special_tokens: add what the tokenizer puts around a text, such as a BOS. False
                for a rendered chat, whose template has written them already.

        Raises:
            PromptError: `text` is no text, or holds a lone surrogate.
        """
        try:
            if len(text) > _SHORT_CHARS:
                encode = (
                    self._backend.encode_batch_fast
                )  # lets other threads run, `encode` does not
                return encode([text], add_special_tokens=add_special_tokens)[0].ids
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeEncodeError):
            raise PromptError("prompt", text, "text that UTF-8 can encode") from None

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`; ids that are not in the vocabulary add nothing.

        Bytes that are no valid UTF-8 become U+FFFD. Spaces are never cleaned up.
        """
        try:
            if len(ids) > _SHORT_CHARS:
                decode = self._backend.decode_batch
                return decode([ids], skip_special_tokens=skip_special_tokens)[0]
            return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        except (OverflowError, TypeError):
            raise PromptError("token ids", ids, "integers from 0 to 2**32 - 1") from None

    def token_text(self, token_id: int) -> str | None:
        """How the vocabulary itself writes token `token_id`; None if it has no such token."""
        return self._backend.id_to_token(token_id)

    @cached_property
    def whole_texts(self) -> Mapping[int, str | None]:
        """The texts of tokens that have the same text in any company, by id; None for the others.

        With byte-level BPE those are the tokens that are whole characters. Special tokens are among
        the others, as are all tokens of other decoders, which look at neighbours.
        """
        is_byte_level = isinstance(self._backend.decoder, tokenizers.decoders.ByteLevel)
        return _WholeTexts(self, is_byte_level)

    @cached_property
    def byte_fallback_ids(self) -> frozenset[int]:
        """Ids of the tokens `<0x00>` to `<0xFF>`, where the decoder joins them to characters.

        Empty for every other tokenizer, byte-level ones included.
        """
        probe = [self._backend.token_to_id(f"<0x{byte:02X}>") for byte in "\u4e00".encode()]
        ids = [index for index in probe if index is not None]
        if len(ids) != len(probe) or self.decode(ids, skip_special_tokens=False) != "\u4e00":
            return frozenset()
        spellings = (f"<0x{high}{low}>" for high in _HEX_DIGITS for low in _HEX_DIGITS)
        found = (self._backend.token_to_id(spelling) for spelling in spellings)
        return frozenset(index for index in found if index is not None)

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self._backend.token_to_id(token)


class _WholeTexts(dict[int, str | None]):
    """Finds a text when it is asked for the first time."""

    def __init__(self, tokenizer: Tokenizer, is_byte_level: bool) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._is_byte_level = is_byte_level

    def __missing__(self, token_id: int) -> str | None:
        found = None
        if self._is_byte_level and token_id not in self._tokenizer.special_ids:
            text = self._tokenizer.decode([token_id])
            found = text if text and _REPLACEMENT not in text else None
        self[token_id] = found
        return found


def _read_backend(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        for other in ("tokenizer.model", "vocab.json", "tekken.json"):
            if (folder / other).is_file():
                raise NotSupportedError(
                    f"{folder}: {other} without a tokenizer.json; write one with transformers: "
                    f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained(folder)"
                )
        raise TokenizerError(f"{folder}: no tokenizer.json")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises plain `Exception` for every kind of damage
        raise TokenizerError(f"{path}: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    """The object in the JSON file `path`; empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: must hold a JSON object, got {value!r:.80}")
    return value


def _token_content(value: object) -> str | None:
    """A token is written as its text or as an object with its text under `content`."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _extra_special_tokens(config: Mapping[str, Any]) -> list[str]:
    texts = []
    for key in ("additional_special_tokens", "extra_special_tokens"):
        value = config.get(key) or ()
        entries = value.values() if isinstance(value, Mapping) else value
        texts += [text for entry in entries if (text := _token_content(entry)) is not None]
    return texts


def _add_listed_tokens(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], path: Path
) -> None:
    """Add the tokens of `added_tokens_decoder` that `tokenizer.json` does not have."""
    key = "added_tokens_decoder"
    tokens: list[tuple[int, AddedToken]] = []
    try:
        for index, entry in config.get(key, {}).items():
            flags = {flag: entry[flag] for flag in _TOKEN_FLAGS if flag in entry}
            tokens.append((int(index), AddedToken(entry["content"], **flags)))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TokenizerError(f"{path}: {key} must map ids to tokens: {error!r}") from error
    tokens.sort(key=lambda pair: pair[0])
    known = backend.get_added_tokens_decoder()
    backend.add_tokens([token for index, token in tokens if index not in known])
    for index, token in tokens:
        found = backend.token_to_id(token.content)
        if found != index:
            raise TokenizerError(
                f"{path}: {key} gives {token.content!r:.80} the id {index}, "
                f"in tokenizer.json it has {found}"
            )


def _mark_special(backend: tokenizers.Tokenizer, texts: Sequence[str]) -> None:
    """Make tokens of the vocabulary special; others stay out, as the model has no row for them."""
    added = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    for text in texts:
        token = added.get(text)
        if token is None and backend.token_to_id(text) is not None:
            token = AddedToken(text, normalized=False)
        if token is not None and not token.special:
            token.special = True
            backend.add_special_tokens([token])


def _read_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name. A template in a file of its own wins over the configuration."""
    found = config.get("chat_template")
    config_path = folder / "tokenizer_config.json"
    own_json = folder / "chat_template.json"
    if own_json.is_file():
        found, config_path = _read_json(own_json).get("chat_template"), own_json
    try:
        if isinstance(found, list):
            templates = {entry["name"]: entry["template"] for entry in found}
        else:
            templates = {} if found is None else {_DEFAULT_TEMPLATE: found}
    except (KeyError, TypeError):
        templates = {"": None}
    for name, source in templates.items():
        if not (isinstance(name, str) and name and isinstance(source, str)):
            raise TokenizerError(
                f"{config_path}: chat_template must be a string or a list of objects with the "
                f"strings name and template, got {found!r:.80}"
            )
    files = {_DEFAULT_TEMPLATE: folder / "chat_template.jinja"}
    files |= {path.stem: path for path in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    own = {name: _read_text(path) for name, path in files.items() if path.is_file()}
    return own or templates


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path}: not valid UTF-8: {error}") from error
