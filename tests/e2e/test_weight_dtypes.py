"""How weights lie in memory on `cpu`: as the file has them, in float32, rounded, or refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cupaged import LLM, SamplingParams
from cupaged.errors import ConfigError, NotSupportedError
from cupaged.loading.model_files import open_model
from cupaged.loading.weights import load_weights
from cupaged.ops.native_ops import NativeOps, NativeWeight
from tests.ops.cpu_kernels import INSTRUCTIONS, INTEGER_PRODUCTS, using
from tests.tiny_gguf import random_superblocks, write_gguf
from tests.tiny_models import TINY, write_hf_folder

BLOCKS = replace(TINY, name="blocks", hidden_size=256, intermediate_size=512, num_heads=4)
KEPT = ["Q8_0", "Q4_0", "Q4_1", "BF16"]
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=3)
PROMPTS = [{"prompt_token_ids": list(range(5, 5 + n))} for n in (1, 7, 40)]


def told(path: Path, **options: Any) -> list[Any]:
    """Tokens and log probabilities of a few prompts."""
    llm = LLM(path, device="cpu", max_model_len=64, **options)
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]


def weights_of(path: Path, asked: str = "auto") -> tuple[int, set[int]]:
    """Bytes of the packed weights, and their formats."""
    files = open_model(path)
    weights = load_weights(files.entries, files.reader, files.form, NativeOps(asked))
    files.reader.close()
    packed = [weight for weight in weights.values() if isinstance(weight, NativeWeight)]
    return sum(w.packed.nbytes for w in packed), {w.format for w in packed}


def assert_alike(told: list[Any], expected: list[Any]) -> None:
    """The same tokens, and log probabilities that differ by roundings only."""
    for (tokens, logprobs), (expected_tokens, expected_logprobs) in zip(
        told, expected, strict=True
    ):
        assert tokens == expected_tokens
        for ours, theirs in zip(logprobs, expected_logprobs, strict=True):
            assert set(ours) == set(theirs)
            assert all(abs(ours[t].logprob - theirs[t].logprob) < 1e-4 for t in ours)


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize("kind", KEPT)
def test_weights_as_the_file_has_them_give_what_float32_gives(
    kind: str, instructions: str, tmp_path: Path
) -> None:
    """In the memory that the file takes; to the last bit, unless products are of integers."""
    path = write_gguf(tmp_path / "tiny.gguf", BLOCKS, kind=kind)
    with using(instructions):
        expected = told(path, cpu_weight_dtype="float32")
        for asked in ("file", "auto"):
            result = told(path, cpu_weight_dtype=asked)
            assert_alike(result, expected)
            if kind == "BF16" or instructions not in INTEGER_PRODUCTS:
                assert result == expected
    in_floats, _ = weights_of(path, "float32")
    kept, formats = weights_of(path)
    bits = {"Q8_0": 8.5, "Q4_0": 5.0, "Q4_1": 5.0, "BF16": 16.0}[kind]
    assert len(formats) == 1 and kept == in_floats * bits / 32


def test_numpy_gives_the_same_text(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", BLOCKS, kind="Q4_1")
    native, by_numpy = told(path), told(path, cpu_kernels="numpy")
    assert [tokens for tokens, _ in native] == [tokens for tokens, _ in by_numpy]


@pytest.mark.parametrize(("asked", "bits"), [("bfloat16", 16.0), ("q8", 8.5)])
def test_rounded_weights(asked: str, bits: float, tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "model", BLOCKS)
    in_floats, _ = weights_of(folder, "float32")
    rounded, _ = weights_of(folder, asked)
    assert rounded == in_floats * bits / 32
    exact = told(folder)
    close = told(folder, cpu_weight_dtype=asked)
    first = [logprobs[0] for _, logprobs in exact], [logprobs[0] for _, logprobs in close]
    for ours, theirs in zip(*first, strict=True):
        assert ours != theirs
        shared = set(ours) & set(theirs)
        assert shared and all(abs(ours[t].logprob - theirs[t].logprob) < 0.3 for t in shared)


def test_other_types_are_float32_or_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "k.gguf", BLOCKS, kind="Q6_K", quantize=random_superblocks)
    _, formats = weights_of(path)
    assert formats == {0} and told(path) == told(path, cpu_weight_dtype="float32")
    with pytest.raises(
        NotSupportedError,
        match=r"'embed' is stored as Q6_K, which cannot be kept; one of F32, BF16, Q8_0, Q4_0, "
        r"Q4_1 can\. Use cpu_weight_dtype='auto'",
    ):
        LLM(path, device="cpu", cpu_weight_dtype="file")


def test_parts_of_different_types_are_float32_or_refused(tmp_path: Path) -> None:
    """Keys in 4 bits beside queries in 8: one weight of three parts."""
    kinds = {"blk.0.attn_k.weight": "Q4_1"}
    path = write_gguf(tmp_path / "mixed.gguf", BLOCKS, kind="Q8_0", kinds=kinds)
    _, formats = weights_of(path)
    assert formats == {0, 2}
    assert_alike(told(path), told(path, cpu_weight_dtype="float32"))
    with pytest.raises(NotSupportedError, match=r"'0\.qkv' is stored as Q4_1 and Q8_0"):
        LLM(path, device="cpu", cpu_weight_dtype="file")


def test_what_cannot_be(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "model", TINY)
    for name, value, allowed in (
        ("cpu_weight_dtype", "int3", "one of auto, float32, bfloat16, q8, file"),
        ("cpu_kernels", "fortran", "one of auto, native, numpy"),
    ):
        with pytest.raises(ConfigError, match=f"{name} must be {allowed}"):
            LLM(folder, device="cpu", **{name: value})
    with pytest.raises(NotSupportedError, match="cpu_weight_dtype='q8' is not supported by NumPy"):
        LLM(folder, device="cpu", cpu_kernels="numpy", cpu_weight_dtype="q8")
