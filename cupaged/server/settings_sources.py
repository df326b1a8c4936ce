"""Where settings come from: defaults, then a TOML file, then the environment, then flags.

Every key is known by name and has a type; an unknown one is refused with the nearest known one, and
every error says which file, variable or flag it is about. Secrets are no settings: they come from
files, or from the environment of the process that needs them.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple, cast

from cupaged.errors import ConfigError, NotSupportedError
from cupaged.json_values import size_in_bytes
from cupaged.server.settings import API_KEY_VARIABLE, QUEUE_DEFAULTS, ServeSettings

PREFIX = "CUPAGED_"
CONFIG = "config"
SECRETS = ("api_key", "api_keys", "token", "hf_token")
# Fields of EngineArgs and their types; `model` is a setting of its own. A test compares.
ENGINE_KEYS: Mapping[str, str] = {
    "tokenizer": "str",
    "device": "str",
    "dtype": "str",
    "seed": "int",
    "max_model_len": "int",
    "block_size": "int",
    "num_gpu_blocks_override": "int",
    "kv_cache_memory_bytes": "bytes",
    "gpu_memory_utilization": "float",
    "max_num_seqs": "int",
    "max_num_batched_tokens": "int",
    "watermark": "float",
    "scheduling_policy": "str",
    "enable_prefix_caching": "bool",
    "swap_space": "float",
    "preemption_mode": "str",
    "prefix_cache": "str",
    "long_prefill_token_threshold": "int",
    "max_num_queued_reqs": "int",
    "max_num_queued_tokens": "int",
    "max_logprobs": "int",
    "threads": "int",
    "cpu_kernels": "str",
    "cpu_weight_dtype": "str",
    "generation_config": "str",
    "trace": "str",
    "kv_sanitizer": "bool",
}
_NOT_TO_BE_SET = ("engine", "has_api_key")
# Set by Kubernetes for services named "cupaged", "cupaged-metrics", ..., whatever we think of it.
_KUBERNETES = re.compile(
    r"CUPAGED_(.+_)?(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT_\d+_(TCP|UDP|SCTP)(_.+)?)"
)
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


class _Given(NamedTuple):
    """A value and where it stands, for errors."""

    value: Any
    place: str


def load_settings(
    flags: Mapping[str, Any], environment: Mapping[str, str] = os.environ
) -> ServeSettings:
    """The settings of all sources.

    Args:
        flags: values of the command line by their keys, of their types; "config" names the file.
        environment: of the process.

    Raises:
        ConfigError: an unknown key, or a value of the wrong type or out of range.
        NotSupportedError: a key that the field knows and this version does not build.
    """
    from_environment = dict(_from_environment(environment))
    config = flags.get(CONFIG) or from_environment.pop(CONFIG, _Given(None, "")).value
    given = dict(_from_file(Path(config).expanduser())) if config else {}
    given |= from_environment
    given |= {k: _Given(v, f"--{k.replace('_', '-')}") for k, v in flags.items() if k != CONFIG}
    engine = {**QUEUE_DEFAULTS, **{k: g.value for k, g in given.items() if k in ENGINE_KEYS}}
    own = {k: g.value for k, g in given.items() if k not in ENGINE_KEYS}
    has_api_key = bool(environment.get(API_KEY_VARIABLE))
    try:
        return ServeSettings(**own, engine=engine, has_api_key=has_api_key)
    except ConfigError as error:
        place = given[error.name].place if error.name in given else error.name
        raise ConfigError(place, error.value, error.allowed) from None


def setting_keys() -> dict[str, str]:
    """Every key and its type: int, float, bool, str, names or bytes."""
    types = {
        f.name: str(f.type).removesuffix(" | None").replace("tuple[str, ...]", "names")
        for f in fields(ServeSettings)
        if f.name not in _NOT_TO_BE_SET
    }
    return {**types, "max_message_bytes": "bytes", **ENGINE_KEYS}


def _from_file(path: Path) -> Iterator[tuple[str, _Given]]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            CONFIG, str(path), f"a file that can be read ({error.strerror})"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(CONFIG, str(path), f"a TOML file ({error})") from None
    keys = setting_keys()
    for written, value in content.items():
        key = written.replace("-", "_")
        place = f"{path}: {written}"
        if key not in keys:
            _refuse(place, key, value, path)
        yield key, _Given(_typed(place, value, keys[key]), place)


def _from_environment(environment: Mapping[str, str]) -> Iterator[tuple[str, _Given]]:
    """Variables that are ours. One that is like a known key, and none, is taken for a mistake."""
    keys = {**setting_keys(), CONFIG: "str"}
    for variable, text in environment.items():
        key = variable.removeprefix(PREFIX).lower()
        if not variable.startswith(PREFIX) or variable == API_KEY_VARIABLE:
            continue
        if key not in keys or _is_of_kubernetes(variable, text):
            near = difflib.get_close_matches(key, keys, 1, 0.75)
            if near and key not in keys and not _is_of_kubernetes(variable, text):
                allowed = f"a known setting; perhaps {PREFIX}{near[0].upper()} is meant"
                raise ConfigError(variable, text, allowed)
            continue
        yield key, _Given(_parsed(variable, text, keys[key]), variable)


def _is_of_kubernetes(variable: str, text: str) -> bool:
    is_url = variable.endswith("_PORT") and "://" in text  # a number may be a setting
    return is_url or _KUBERNETES.fullmatch(variable) is not None


def _refuse(place: str, key: str, value: object, path: Path) -> None:
    from cupaged.engine_args import NOT_BUILT  # costs an import, and only a mistake needs it

    if key in SECRETS:
        raise ConfigError(
            place, "...", f"left out: a secret is not written here but into a file that "
            f"api_key_file names, or into {API_KEY_VARIABLE}"
        )  # fmt: skip
    if key in NOT_BUILT:
        raise NotSupportedError(f"{path}: {key}={value!r} is not supported in this version")
    known = [*setting_keys()]
    near = difflib.get_close_matches(key, known, 1)
    hint = f"perhaps {near[0]!r}" if near else f"one of {', '.join(known)}"
    raise ConfigError(f"{path}: key", key, f"a known setting; {hint}")


def _typed(name: str, value: Any, kind: str) -> Any:
    """A value of a TOML file."""
    if kind == "names":
        names = [value] if isinstance(value, str) else value
        if isinstance(names, list) and all(isinstance(n, str) for n in names):
            return tuple(names)
        raise ConfigError(name, value, "a text or a list of texts")
    if kind == "bytes" and isinstance(value, str):
        return _parsed(name, value, kind)
    types: dict[str, tuple[type | tuple[type, ...], str]] = {
        "int": (int, "an integer"),
        "bytes": (int, "an integer, or a text like '512MiB'"),
        "float": ((int, float), "a number"),
        "bool": (bool, "true or false"),
        "str": (str, "a text"),
    }
    expected, allowed = types[kind]
    if not isinstance(value, expected) or (kind != "bool" and isinstance(value, bool)):
        raise ConfigError(name, value, allowed)
    return float(cast(float, value)) if kind == "float" else value


def _parsed(name: str, text: str, kind: str) -> Any:
    """A value of the environment."""
    if kind == "str":
        return text
    if kind == "names":
        return tuple(part.strip() for part in text.split(","))
    if kind == "bool":
        if text.lower() in _TRUE + _FALSE:
            return text.lower() in _TRUE
        raise ConfigError(name, text, f"one of {', '.join(_TRUE + _FALSE)}")
    readers: dict[str, tuple[Callable[[str], Any], str]] = {
        "int": (int, "an integer"),
        "float": (float, "a number"),
        "bytes": (size_in_bytes, "a number of bytes, or like 512MiB or 2GiB"),
    }
    read, allowed = readers[kind]
    try:
        return read(text)
    except ValueError:
        raise ConfigError(name, text, allowed) from None
