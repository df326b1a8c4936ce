"""The files of a model's tokenizer, for those who tokenise elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterator

from cupaged.errors import TokenizerError
from cupaged.server.model_text import ModelText

_FIRST = "tokenizer.json"
_OTHERS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)


def tokenizer_files(text: ModelText) -> Iterator[tuple[str, bytes]]:
    """Names and contents, `tokenizer.json` first. Reads one file at a time.

    For a tokenizer out of a GGUF file, files are made that mean the same.

    Raises:
        TokenizerError: a file cannot be read.
    """
    tokenizer, folder = text.tokenizer, text.folder
    if folder is None:
        yield _FIRST, tokenizer.to_json().encode()
        config: dict[str, object] = dict(tokenizer.special_tokens)
        if tokenizer.chat_template is not None:
            config["chat_template"] = tokenizer.chat_template
        yield "tokenizer_config.json", json.dumps(config, ensure_ascii=False, indent=2).encode()
        return
    for name in (_FIRST, *_OTHERS):
        path = folder / name
        if name == _FIRST or path.is_file():
            try:
                content = path.read_bytes()
            except OSError as error:
                raise TokenizerError(f"{name} cannot be read: {error.strerror}") from None
            yield name, content
