"""Which chat template is used: the model's own, a named one of its, a file, or a given source."""

from __future__ import annotations

from pathlib import Path

from cupaged.errors import ChatTemplateError
from cupaged.loading.tokenizer import Tokenizer

_MAX_FILE_BYTES = 1 << 20


def choose_template(asked: str | Path | None, tokenizer: Tokenizer) -> str | None:
    """The Jinja source, or None if the model has no template and none was asked for.

    Args:
        asked: None for the model's default; the name of one of its templates; a file; or Jinja
            source, which holds a brace.

    Raises:
        ChatTemplateError: no such name or file, or a file that cannot be read.
    """
    if asked is None:
        return tokenizer.chat_template
    name = str(asked)
    if name in tokenizer.named_templates:
        return tokenizer.named_templates[name]
    if "{" in name and not isinstance(asked, Path):
        return name
    try:
        with Path(name).expanduser().open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
        if len(content) > _MAX_FILE_BYTES:
            raise ChatTemplateError(f"chat template {name}: more than {_MAX_FILE_BYTES} bytes")
        return content.decode("utf-8")
    except FileNotFoundError:
        named = ", ".join(sorted(tokenizer.named_templates)) or "none"
        raise ChatTemplateError(
            f"chat template {name!r}: no such file, and no such name; "
            f"the model's named templates: {named}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ChatTemplateError(f"chat template {name}: cannot be read: {error}") from error
