"""Token ids to text, while they are generated.

Owns `IncrementalDetokenizer`: which part of the text is final, and at what cost. The text is that
of `Tokenizer.decode` for prompt and output together, so spaces at the seams come out as they would
in one piece. It knows nothing of stop strings or of requests.

Only the last ids are decoded again, never the whole output. That is exact because of two facts. A
UTF-8 decoder that starts within a character is wrong about that character only, so two decodings
agree from the end backwards. And sentencepiece's decoder looks at neighbours only inside a run of
byte tokens, and at the start of the text for one space.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cupaged.loading.tokenizer import Tokenizer

__all__ = ["IncrementalDetokenizer"]

_REPLACEMENT = "\ufffd"
# Each id in the window has at least one byte, so the last three hold any unfinished character. The
# others are a margin for decoders that look further back.
_CONTEXT_IDS = 8
_MAX_WINDOW_IDS = 24
_MAX_WHOLE_IDS = 96  # of a window that nothing decodes


class IncrementalDetokenizer:
    """The text of one sequence, piece by piece.

    With `full = tokenizer.decode(prompt + output)`, the pieces that `append` and `finish` return
    join to `full` without its longest common prefix with `tokenizer.decode(prompt)`. A piece never
    ends within a character: U+FFFD comes only where `full` has it.

    Held back until more is known: with byte-level BPE one U+FFFD at the end, which may be half a
    character; with byte fallback a run of byte tokens, which one wrong byte makes invalid as a
    whole. The cost of an id does not depend on how many came before.

    Args:
        tokenizer: decodes.
        prompt_token_ids: what stands before the output; may be empty.
        skip_special_tokens: leave special tokens out of the text.
    """

    __slots__ = (
        "_byte_ids", "_byte_run", "_hidden_ids", "_is_clean", "_is_text_old", "_max_window_ids",
        "_num_delivered", "_prompt_rest", "_skip_special_tokens", "_text", "_tokenizer",
        "_whole_texts", "_window",
    )  # fmt: skip

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._hidden_ids = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._byte_ids = tokenizer.byte_fallback_ids
        self._whole_texts = tokenizer.whole_texts
        self._window: list[int] = []  # the last ids, without an unfinished run of byte tokens
        self._byte_run: list[int] = []  # the unfinished run behind them
        self._max_window_ids = _MAX_WINDOW_IDS
        self._take(self._last_ids(prompt_token_ids))
        self._text = self._decode(self._window)
        self._num_delivered = self._num_final_chars()  # of `_text`
        shown = self._decode(self._window + self._byte_run)
        # What the prompt's own text ends with, beyond what is final.
        self._prompt_rest = shown[self._num_delivered :]
        self._shorten()
        self._is_clean = self._num_delivered == len(self._text) and not self._prompt_rest
        self._is_text_old = False  # `_text` is not of the window, all of whose text is delivered

    def append(self, token_ids: Sequence[int]) -> str:
        """Take the next ids of the output; returns the text that has become final, often ''."""
        if self._is_clean:  # what is whole by itself is final at once, without decoding
            texts, whole = self._whole_texts, ""
            for token_id in token_ids:
                text = texts[token_id]
                if text is None:
                    break
                whole += text
            else:
                window = self._window
                window += token_ids
                if len(window) > _MAX_WHOLE_IDS:
                    del window[:-_CONTEXT_IDS]
                self._is_text_old = True
                return whole
            self._renew_text()
        if not self._take(token_ids):
            return ""
        self._text = self._decode(self._window)
        piece = self._deliver(self._num_final_chars())
        self._shorten()
        self._is_clean = self._num_delivered == len(self._text) and not self._prompt_rest
        return piece

    def finish(self) -> str:
        """No more ids will come; returns the text held back. A second call returns ''."""
        if self._is_text_old:
            return ""  # nothing is held back
        self._window += self._byte_run
        self._byte_run = []
        self._text = self._decode(self._window)
        return self._deliver(len(self._text))

    def _renew_text(self) -> None:
        """Decode the end of the window, if tokens have passed by without that."""
        if self._is_text_old:
            del self._window[:-_CONTEXT_IDS]
            self._text = self._decode(self._window)
            self._num_delivered = len(self._text)
            self._is_text_old = False

    def _take(self, token_ids: Iterable[int]) -> bool:
        """Put ids that have text behind the window; returns whether the window has grown."""
        size = len(self._window)
        for token_id in token_ids:
            if token_id in self._byte_ids:
                self._byte_run.append(token_id)
            elif self._has_effect(token_id):
                self._window += self._byte_run
                self._window.append(token_id)
                self._byte_run = []
        return len(self._window) > size

    def _has_effect(self, token_id: int) -> bool:
        """False for ids outside the vocabulary, and for empty tokens that end no run of bytes."""
        if token_id in self._hidden_ids:
            return False
        text = self._tokenizer.token_text(token_id)
        return bool(text) or (text is not None and bool(self._byte_run))

    def _last_ids(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """The end of the prompt: any unfinished run of byte tokens, and context before it."""
        last: list[int] = []
        num_context_ids, in_run = 0, True
        for token_id in reversed(prompt_token_ids):
            text = self._tokenizer.token_text(token_id)
            if token_id in self._hidden_ids or text is None:
                continue
            last.append(token_id)
            in_run = in_run and token_id in self._byte_ids
            num_context_ids += bool(text) and not in_run
            if num_context_ids == _CONTEXT_IDS:
                break
        return last[::-1]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)

    def _num_final_chars(self) -> int:
        """How much of `_text` no later id can change."""
        unfinished = not self._byte_ids and self._text.endswith(_REPLACEMENT)
        return len(self._text) - unfinished

    def _deliver(self, num_chars: int) -> str:
        piece = self._text[self._num_delivered : num_chars]
        self._num_delivered = max(self._num_delivered, num_chars)
        if piece and self._prompt_rest:
            piece = piece[_common_length(piece, self._prompt_rest) :]
            self._prompt_rest = ""
        return piece

    def _shorten(self) -> None:
        """Drop ids from the front of a long window; what is not delivered stays the same."""
        if len(self._window) <= self._max_window_ids:
            return
        window = self._window[-_CONTEXT_IDS:]
        text = self._decode(window)
        num_delivered = len(text) - (len(self._text) - self._num_delivered)
        if num_delivered < 1:  # a decoder that gives most of its tokens no text
            self._max_window_ids = 2 * len(self._window)
            return
        self._window, self._text, self._num_delivered = window, text, num_delivered
        self._max_window_ids = _MAX_WINDOW_IDS


def _common_length(first: str, second: str) -> int:
    """The length of the longest common prefix."""
    pairs = zip(first, second, strict=False)
    return next(
        (index for index, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second))
    )
