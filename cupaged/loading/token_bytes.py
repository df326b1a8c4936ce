"""The bytes of single tokens, which may be a part of a character."""

from __future__ import annotations

from cupaged.loading.tokenizer import Tokenizer

__all__ = ["TokenBytes"]

_REPLACEMENT = "\ufffd"


def _byte_level_alphabet() -> dict[str, int]:
    """How byte-level BPE writes bytes in its vocabulary: those without a shape are moved up."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in visible]
    written = {chr(byte): byte for byte in visible}
    return written | {chr(256 + i): byte for i, byte in enumerate(moved)}


class TokenBytes:
    """The bytes of a token by its id, each found once.

    They are the UTF-8 of the token decoded by itself; where that is no text, the token's own bytes.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {}
        self._alphabet = _byte_level_alphabet()

    def __getitem__(self, token_id: int) -> bytes:
        """b"" for an id that is not in the vocabulary."""
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._find(token_id)
        return found

    def _find(self, token_id: int) -> bytes:
        written = self._tokenizer.token_text(token_id) or ""
        if token_id in self._tokenizer.byte_fallback_ids:
            return bytes.fromhex(written[3:5])  # "<0xE4>"
        text = self._tokenizer.decode([token_id], skip_special_tokens=False)
        if _REPLACEMENT not in text:
            return text.encode()
        if all(char in self._alphabet for char in written):
            own = bytes(self._alphabet[char] for char in written)
            if own.decode(errors="replace") == text:
                return own
        return text.encode()
