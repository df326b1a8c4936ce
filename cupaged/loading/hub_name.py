"""How a model on the hub is written: `owner/name`, with a revision and a GGUF file if wanted.

Owns the grammar and what is refused. It looks at the local disk only to tell a path from a name,
and never calls out.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from cupaged.errors import ConfigError, ModelNotFoundError

__all__ = ["DEFAULT_REVISION", "NAME_FORMS", "HubName", "parse_model_name"]

DEFAULT_REVISION = "main"
NAME_FORMS = "owner/name, owner/name@revision or owner/name:Q4_K_M"

_PARTS = re.compile(r"(?P<repo>[^@:]*)(@(?P<revision>[^:]*))?(:(?P<file_pattern>.*))?", re.DOTALL)
_REPO_PART = re.compile(r"(?!.*(--|\.\.))[A-Za-z0-9_]([\w.-]{0,94}\w)?", re.ASCII)
_REVISION = re.compile(r"(?!.*(\.\.|//))[A-Za-z0-9_]([\w.+/-]*[\w+-])?", re.ASCII)
_QUANTISATION = re.compile(
    r"(UD-)?((I?Q|TQ)\d\w*|B?F\d+|FP\d+|MXFP\d\w*)", re.ASCII | re.IGNORECASE
)
_GGUF_NAME = re.compile(r"(?!.*(\.\.|//))[^/\\:][^\\:]*\.gguf", re.IGNORECASE)
_PATH_STARTS = ("/", ".", "~", "\\")
_FILE_ENDS = (".gguf", ".safetensors", ".json", ".bin")


@dataclass(frozen=True, slots=True)
class HubName:
    """A model on the hub.

    repo: `owner/name`.
    revision: a branch, a tag or a commit.
    file_pattern: which GGUF file of the repository: the tag of its quantisation (`Q4_K_M`), or its
        exact name. None for the safetensors and what belongs to them.
    """

    repo: str
    revision: str = DEFAULT_REVISION
    file_pattern: str | None = None

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision != DEFAULT_REVISION else ""
        return f"{self.repo}{revision}{f':{self.file_pattern}' if self.file_pattern else ''}"


def parse_model_name(name: str) -> HubName:
    """Take `owner/name`, with `@revision`, `:tag` or both behind it, apart.

    The tag of a quantisation is found whatever its case; `owner/name:file.gguf` names a file.

    Raises:
        ModelNotFoundError: the text reads like a path, and nothing lies there.
        ConfigError: it exists here, which makes it a path, or a part of it is malformed.
    """
    if os.path.exists(os.path.expanduser(name)):
        raise ConfigError("model name", name, "a name on the hub; this is a file or folder here")
    match = _PARTS.fullmatch(name)
    assert match is not None  # every text has these parts
    repo, revision, file_pattern = match["repo"], match["revision"], match["file_pattern"]
    if repo.count("/") != 1 or repo.startswith(_PATH_STARTS) or repo.endswith(_FILE_ENDS):
        raise ModelNotFoundError(
            f"model {name!r:.200}: no such file or folder. Give a folder with config.json and "
            f"safetensors, a .gguf file, or a name on the hub: {NAME_FORMS}"
        )
    if not all(_REPO_PART.fullmatch(part) for part in repo.split("/")) or repo.endswith(".git"):
        allowed = (
            f"{NAME_FORMS}, where owner and name are up to 96 letters, digits, '-', '_' and '.', "
            "without '--' and '..'"
        )
        raise ConfigError("model name", name, allowed)
    if revision is not None and not _REVISION.fullmatch(revision):
        raise ConfigError("model name", name, "owner/name@ and a branch, a tag or a commit")
    if file_pattern is not None:
        known = _QUANTISATION.fullmatch(file_pattern) or _GGUF_NAME.fullmatch(file_pattern)
        if not known:
            allowed = "owner/name: and a quantisation such as Q4_K_M, or the name of a .gguf file"
            raise ConfigError("model name", name, allowed)
    return HubName(repo, revision or DEFAULT_REVISION, file_pattern)
