"""How byte-level BPE cuts text before it merges, by the names GGUF files use.

Owns the table `PRE_TOKENIZERS`: the pattern of each family, and what else differs between them.
The patterns are those in the models' own `tokenizer.json` files. Byte-level BPE itself, and every
other key of a GGUF file, is `gguf_tokenizer`'s business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

__all__ = ["PRE_TOKENIZERS", "PreTokenizer"]

_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_PATTERN = _LLAMA3_PATTERN.replace("{1,3}", "")


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How one family of byte-level BPE cuts text before merging, and what goes with it.

    Args:
        build: makes the pre-tokenizer.
        ignore_merges: a cut that is in the vocabulary is a token, whatever the merges say.
        adds_bos: whether a BOS is added where the file does not say.
        normalize: makes the normalizer of the text before it is cut, if there is one.
    """

    build: Callable[[], pre_tokenizers.PreTokenizer]
    ignore_merges: bool = False
    adds_bos: bool = False
    normalize: Callable[[], normalizers.Normalizer] | None = None


def _by_pattern(pattern: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    return lambda: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _single_digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )


_GPT2 = PreTokenizer(lambda: pre_tokenizers.ByteLevel(add_prefix_space=False))
_LLAMA3 = PreTokenizer(_by_pattern(_LLAMA3_PATTERN), ignore_merges=True, adds_bos=True)

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": PreTokenizer(_by_pattern(_QWEN2_PATTERN), normalize=normalizers.NFC),
    "smollm": PreTokenizer(_single_digits),
}
"""The values of `tokenizer.ggml.pre` that are built; a file without the key has `default`."""
