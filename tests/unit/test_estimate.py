"""Memory by hand: the arithmetic of `cupaged.estimate` against sums done on paper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module

import pytest

from cupaged.errors import ConfigError
from cupaged.estimate import (
    GPUS,
    Limits,
    Shape,
    blocks_on_cpu,
    blocks_on_gpu,
    dtype_on,
    estimate,
    gpu_buffers,
    no_buffers,
    workspace_bytes,
)
from cupaged.ops import KVCacheSpec, StepLimits

GIB = 2**30

# A layer: q and o 4096 x 4096, k and v 1024 x 4096, gate, up and down 14336 x 4096, two norms.
LLAMA_3_8B_LAYER = 2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 14336 * 4096 + 2 * 4096
LLAMA_3_8B = Shape(
    num_parameters=2 * 128256 * 4096 + 32 * LLAMA_3_8B_LAYER + 4096,  # the head is not tied
    kv_elements_per_token=2 * 32 * 8 * 128,
    workspace_elements_per_token=3 * 4096 + 6144 + 4096 + 2 * 14336 + 14336,
    rotary_elements_per_position=128,
    hidden_size=4096,
    vocab_size=128256,
    num_q_heads=32,
    products=((128256, 4096), (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    kv_specs=(KVCacheSpec(0, 8, 128, 128, "float32", 1),),
)
SMOLLM2_LAYER = 2 * 576 * 576 + 2 * 192 * 576 + 3 * 1536 * 576 + 2 * 576
SMOLLM2_135M = Shape(
    num_parameters=49152 * 576 + 30 * SMOLLM2_LAYER + 576,  # tied: the embedding is the head
    kv_elements_per_token=2 * 30 * 3 * 64,
    workspace_elements_per_token=3 * 576 + 960 + 576 + 2 * 1536 + 1536,
    rotary_elements_per_position=64,
    hidden_size=576,
    vocab_size=49152,
    num_q_heads=9,
    products=((49152, 576), (960, 576), (576, 576), (3072, 576), (576, 1536)),
    kv_specs=(KVCacheSpec(0, 3, 64, 64, "float32", 1),),
)


def test_shapes_from_the_tables_of_the_family() -> None:
    family = import_module("cupaged.models").model_class("LlamaForCausalLM")
    from cupaged.config import ModelConfig

    common = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 8192}
    llama = ModelConfig.from_hf(
        common
        | {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336}
        | {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
    )
    smollm2 = ModelConfig.from_hf(
        common
        | {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536}
        | {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3}
        | {"tie_word_embeddings": True}
    )
    assert Shape.of(family, llama) == LLAMA_3_8B
    assert Shape.of(family, smollm2) == SMOLLM2_135M


def test_published_sizes() -> None:
    limits = Limits(max_model_len=8192)
    llama = estimate(
        LLAMA_3_8B, dtype="bfloat16", limits=limits, memory_bytes=0, blocks_in=blocks_on_gpu,
        buffer_bytes=gpu_buffers("bfloat16"),
    )  # fmt: skip
    assert llama.num_parameters == 8_030_261_248
    assert llama.weight_bytes == 16_060_522_496
    assert llama.kv_bytes_per_token == 131_072
    smollm2 = estimate(
        SMOLLM2_135M, dtype="float32", limits=limits, memory_bytes=0, blocks_in=blocks_on_cpu,
        buffer_bytes=no_buffers,
    )  # fmt: skip
    assert smollm2.num_parameters == 134_515_008
    assert smollm2.kv_bytes_per_token == 46_080


def test_workspace_by_hand() -> None:
    shape = Shape(
        num_parameters=1, kv_elements_per_token=1, workspace_elements_per_token=10,
        rotary_elements_per_position=2, hidden_size=3, vocab_size=100, num_q_heads=1,
        products=((100, 3),), kv_specs=(KVCacheSpec(0, 1, 2, 2, "float32", 1),),
    )  # fmt: skip
    limits = Limits(max_model_len=8, max_num_seqs=4, max_num_batched_tokens=6)
    # 6 tokens of 10 elements; 4 rows of 3 hidden states; 4 rows of 100 logits and a copy of them,
    # and 8 positions of 2 numbers, all of 4 bytes.
    assert workspace_bytes(shape, limits, 2, no_buffers) == (60 + 12) * 2 + 3200 + 64
    assert workspace_bytes(shape, limits, 4, no_buffers) == (60 + 12) * 4 + 3200 + 64
    # A step of 6 tokens has 6 rows of logits at most; all of 50 samples may be told about.
    more = replace(limits, max_num_seqs=50)
    assert workspace_bytes(shape, more, 4, no_buffers) == (60 + 18) * 4 + (6 + 50) * 400 + 64
    asked = []

    def buffers(limits: StepLimits, products: Sequence[tuple[int, int]]) -> int:
        asked.append((limits, products))
        return 5

    assert workspace_bytes(shape, limits, 4, buffers) == (60 + 12) * 4 + 3200 + 64 + 5
    ((largest, products),) = asked
    assert (largest.max_tokens, largest.max_seqs, largest.max_logits) == (6, 4, 4)
    assert (largest.max_context, largest.max_blocks_per_seq, largest.max_logprobs) == (8, 1, 20)
    assert (largest.num_q_heads, largest.vocab_size, products) == (1, 100, ((100, 3),))


def test_llama_3_8b_on_an_l4_by_hand() -> None:
    found = estimate(
        LLAMA_3_8B,
        dtype="bfloat16",
        limits=Limits(max_model_len=8192),
        memory_bytes=20 * GIB,
        blocks_in=blocks_on_gpu,
        buffer_bytes=gpu_buffers("bfloat16"),
    )
    # activations 512 * 65,536 * 2, hidden states 64 * 4,096 * 2, logits and a copy of them
    # 64 * 128,256 * 4 bytes each, and a RoPE table of 8,192 * 128 * 4 bytes
    steps = 67_108_864 + 524_288 + 2 * 32_833_536 + 4_194_304
    # the workspace of attention, which is capped; of products 8 chunks of 64 tiles of 64 x 64, and
    # 128 tickets; edits of 64 * 8,192 tokens, twice 12 bytes each, and half as much again
    own = (32 << 20) + 4 * (8 * 64 * 64 * 64 + 128) + 3 * 64 * 8192 * 12
    assert steps + own < found.workspace_bytes < steps + own + (1 << 20)
    left = 20 * GIB - 16_060_522_496 - found.workspace_bytes
    assert found.num_blocks == left // 2_097_152 == 2486
    assert found.pool_tokens == 39_776 and found.pool_bytes == 2486 * 2_097_152
    assert (found.num_requests, found.longest_tokens) == (4, 8192)  # 512 blocks a request


def test_requests_take_whole_blocks() -> None:
    shape = replace(SMOLLM2_135M, num_parameters=0, kv_elements_per_token=1, vocab_size=1)
    limits = Limits(max_model_len=17, max_num_seqs=1, max_num_batched_tokens=1)
    workspace = workspace_bytes(shape, limits, 4, no_buffers)
    for blocks, requests, longest in ((0, 0, 0), (1, 0, 16), (2, 1, 17), (3, 1, 17), (4, 2, 17)):
        found = estimate(
            shape,
            dtype="float32",
            limits=limits,
            memory_bytes=workspace + blocks * 64,
            blocks_in=blocks_on_gpu,
            buffer_bytes=no_buffers,
        )
        assert found.num_blocks == blocks
        assert (found.num_requests, found.longest_tokens) == (requests, longest)


def test_no_room_is_no_blocks() -> None:
    limits = Limits(max_model_len=64)
    assert blocks_on_gpu(-5, 1024, limits) == blocks_on_gpu(1023, 1024, limits) == 0
    assert blocks_on_cpu(-5, 1024, limits) == blocks_on_cpu(1024, 1024, limits) == 0


def test_the_cpu_pool_is_what_the_engine_takes() -> None:
    limits = Limits(max_model_len=100, max_num_seqs=3)  # 7 blocks a request
    assert blocks_on_cpu(10**9, 1000, limits) == 21
    assert blocks_on_cpu(10_000, 1000, limits) == 4  # 40 % of the memory


@pytest.mark.parametrize(
    ("gpu", "asked", "stored", "expected"),
    [
        (None, "auto", "bfloat16", "float32"),
        (None, "bfloat16", "", "bfloat16"),
        ("L4", "auto", "bfloat16", "bfloat16"),
        ("L4", "auto", "float16", "float16"),
        ("L4", "auto", "float32", "bfloat16"),
        ("L4", "auto", "None", "bfloat16"),
        ("L4", "float32", "bfloat16", "float32"),
        ("T4", "auto", "bfloat16", "float16"),
        ("T4", "float16", "bfloat16", "float16"),
    ],
)
def test_dtype(gpu: str | None, asked: str, stored: str, expected: str) -> None:
    assert dtype_on(None if gpu is None else GPUS[gpu], asked, stored) == expected


def test_dtypes_that_are_refused() -> None:
    with pytest.raises(ConfigError, match="has no bfloat16"):
        dtype_on(GPUS["T4"], "bfloat16", "")
    with pytest.raises(ConfigError, match="must be 'auto' or one of float32, float16, bfloat16"):
        dtype_on(None, "int8", "")


@pytest.mark.parametrize(
    "name", ["max_model_len", "block_size", "max_num_seqs", "max_num_batched_tokens"]
)
def test_limits_are_positive(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be an integer >= 1, got 0"):
        Limits(**{"max_model_len": 8, name: 0})


def test_gpus_have_the_memory_of_their_names() -> None:
    for name, gpu in GPUS.items():
        stated = name.rpartition("-")[2]
        if stated.isdigit():
            assert gpu.memory_bytes == int(stated) * GIB
