"""The configuration of a model, without its weights: of a folder, a GGUF file, a hub name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from cupaged.errors import CheckpointError, ModelNotFoundError

_CONFIG = "config.json"


def read_shape(model: str | None) -> tuple[str, dict[str, Any]]:
    """A name to show, and the configuration in the form of a `config.json`.

    Raises:
        ModelError, NotSupportedError: there is none, or it cannot be read.
    """
    from cupaged.loading.gguf import GGUFFile
    from cupaged.loading.gguf_config import hf_config_from_gguf
    from cupaged.loading.model_files import find_model

    if model is None or os.path.exists(os.path.expanduser(model)):
        path = find_model(model)
    else:
        path = _from_hub(model)
    if path.suffix == ".gguf" and path.is_file():
        with GGUFFile(path) as file:
            return path.stem, hf_config_from_gguf(file)
    if path.is_dir():
        path = path / _CONFIG
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelNotFoundError(f"{path}: no such file; an estimate needs one") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, holds {type(value).__name__}")
    return model or path.parent.name, value


def _from_hub(model: str) -> Path:
    """What the cache holds of a name, else only its config.json."""
    from huggingface_hub import HfApi, constants, hf_hub_download, try_to_load_from_cache

    from cupaged.loading.hub import cached_model, parse_model_name
    from cupaged.loading.hub_errors import check_token, hub_errors

    name = parse_model_name(model)
    cached = cached_model(name)
    if cached is not None:
        return cached
    if name.file_pattern is not None:
        raise ModelNotFoundError(
            f"{name}: not in the cache; run `cupaged pull {name}`, or give {name.repo} for an "
            f"estimate from {_CONFIG}"
        )
    config = try_to_load_from_cache(name.repo, _CONFIG, revision=name.revision)
    if isinstance(config, str):
        return Path(config)
    with hub_errors(name, _CONFIG):
        check_token()
        timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
        # Unlike the download, this fails at once where nobody answers.
        HfApi().model_info(name.repo, revision=name.revision, timeout=timeout)
        return Path(hf_hub_download(name.repo, _CONFIG, revision=name.revision))
