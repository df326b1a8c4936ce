"""Words of CUDA that the emulator cannot run, each with the nearest that it can."""

from __future__ import annotations

import re
from collections.abc import Sequence

from cupaged.emulator.preprocessed import IDENTIFIER, Token

_ASM = (
    "the emulator cannot run inline assembly; put it behind #ifndef CUPAGED_EMULATED with C++ "
    "beside it, as the wrappers of cuda/ptx.cuh do"
)
_HEAP = "the emulator has no heap of the device; nearest: an array passed as an argument"
_TEXTURES = "the emulator has no textures and surfaces; nearest: a pointer, read by __ldg"
_ALWAYS = {
    **dict.fromkeys(("asm", "__asm", "__asm__"), _ASM),
    "<<<": "the emulator launches kernels from Python only; keep host code out of the file",
    "__cluster_dims__": "the emulator has no clusters; nearest: blocks that stand alone, in one "
    "launch or several",
    "__managed__": "the emulator has no __managed__ variables; nearest: a __device__ variable, or "
    "an array passed as an argument",
}
_TEXTURE = re.compile(
    r"(?:tex|surf)(?:[123]D|Cubemap)\w*\Z|cuda(?:Texture|Surface)Object_t\Z|cudaTextureType\w+\Z"
)
_HEAP_CALLS = frozenset({"malloc", "calloc", "realloc", "free"})
_BEFORE_CALLS = frozenset({"return", "else", "do"})


class UnsupportedWords:
    """Looks at the words of a file in order."""

    def __init__(self) -> None:
        self._own: set[str] = set()  # names that the file declares itself

    def reason(self, tokens: Sequence[Token], index: int) -> str | None:
        """Why the word at index cannot be run, if it cannot."""
        word = tokens[index].text
        if word in _ALWAYS:
            return _ALWAYS[word]
        before = tokens[index - 1].text if index else ""
        after = tokens[index + 1].text if index + 1 < len(tokens) else ""
        if word == "new":
            return _HEAP if before != "operator" and after != "(" else None
        if word == "delete":
            return _HEAP if before not in ("operator", "=") else None
        if word in ("texture", "surface"):
            return _TEXTURES if after == "<" else None
        is_call = word in _HEAP_CALLS
        if not is_call and not _TEXTURE.match(word):
            return None
        if after == "(" and IDENTIFIER.match(before) and before not in _BEFORE_CALLS:
            self._own.add(word)  # its declaration
        arrow = before == ">" and index > 1 and tokens[index - 2].text == "-"
        if word in self._own or before == "." or arrow or (is_call and after != "("):
            return None
        return _HEAP if is_call else _TEXTURES
