"""Log probabilities as people read them: token ids with their texts."""

from __future__ import annotations

from collections.abc import Sequence

from cupaged.errors import InvalidParameterError, PromptError
from cupaged.loading.tokenizer import Tokenizer
from cupaged.outputs import Logprob, TokenAlternatives, TokenLogprobs


def alternatives(tokenizer: Tokenizer, told: TokenLogprobs) -> TokenAlternatives:
    """The token that stands there first, then the likeliest ones; each token once."""
    found: TokenAlternatives = {}
    for token, logprob, rank in zip(told.token_ids, told.logprobs, told.ranks, strict=True):
        if token not in found:
            text = tokenizer.decode([token], skip_special_tokens=False)
            found[token] = Logprob(logprob, rank, text)
    return found


def bad_words_token_ids(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """The token sequences of each word: at the start of a text, and after a space.

    As in vLLM, the second is kept only if it begins with another token and is as long as the first:
    otherwise it bans what merely contains the word's pieces.

    Raises:
        InvalidParameterError: a word holds a lone surrogate.
    """
    sequences: list[tuple[int, ...]] = []
    for word in words:
        text = word.lstrip() or word
        try:
            bare = tuple(tokenizer.encode(text, add_special_tokens=False))
            spaced = tuple(tokenizer.encode(" " + text, add_special_tokens=False))
        except PromptError as error:
            raise InvalidParameterError("bad_words", word, error.allowed) from None
        sequences += [bare] if bare else []
        if spaced and bare and spaced[0] != bare[0] and len(spaced) == len(bare):
            sequences.append(spaced)
    return tuple(dict.fromkeys(sequences))
