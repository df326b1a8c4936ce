"""Models whose prefixes are evicted to the host and loaded again give what they give without.

Blocks that are loaded take the place of blocks that the same step saves.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupaged.config import PREFIX_CACHES
from cupaged.engine.core import EngineCore
from cupaged.ops.numpy_ops import NumpyOps
from cupaged.outputs import TokenLogprobs
from cupaged.request import CoreRequest
from cupaged.sampling_params import SamplingParams
from tests.fast_runtime import fast_ops
from tests.forced import LoadedModel
from tests.tiny_models import TINIER, write_hf_folder

LIMITS: dict[str, Any] = {
    "block_size": 8, "max_model_len": 96, "max_num_seqs": 4, "max_num_batched_tokens": 64,
    "watermark": 0.0,
}  # fmt: skip
ROUNDS = "xyxxyx"  # which of two prompts is asked for; one of them fills the pool
Told = list[tuple[list[int], list[TokenLogprobs]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf_folder(tmp_path_factory.mktemp("models") / "tinier", TINIER)


def ask(core: EngineCore) -> tuple[Told, list[int]]:
    """What each round gives, and the tokens that it found."""
    told, found = [], []
    for number, prompt in enumerate(ROUNDS):
        ids = np.random.default_rng(ord(prompt)).integers(3, 509, 35).tolist()
        params = SamplingParams(temperature=0.9, logprobs=2, ignore_eos=True, max_tokens=5)
        core.add_request(CoreRequest(str(number), tuple(ids), params, seed=ord(prompt)))
        tokens: list[int] = []
        logprobs: list[TokenLogprobs] = []
        while core.has_unfinished_requests:
            for output in core.step():
                tokens += output.new_token_ids
                logprobs += output.logprobs or []
            core.audit()
        told.append((tokens, logprobs))
        found.append(output.num_cached_tokens)
    return told, found


def check_found(core: EngineCore, found: list[int]) -> None:
    """35 tokens have 4 full blocks of 8; with 4 tokens of the answer the pool's 5 are in use."""
    assert found == [0, 0, 32, 32, 32, 32]
    stats = core.stats()
    assert (stats.num_kept_host_blocks, stats.blocks_offloaded_total) == (8, 8)
    assert stats.blocks_loaded_total == 4 * 3  # one of the four found its prefix on the device


@pytest.mark.parametrize("kind", PREFIX_CACHES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_emulated_loaded_prefixes_have_the_same_bits(
    folder: Path, dtype: str, kind: str
) -> None:
    model = LoadedModel(folder, fast_ops(dtype))
    limits = {**LIMITS, "num_blocks": 5}
    expected, _ = ask(model.core(enable_prefix_caching=False, **limits))
    core = model.core(num_host_blocks=9, prefix_cache=kind, max_steps_in_flight=2, **limits)
    told, found = ask(core)
    check_found(core, found)
    assert told == expected


def test_on_cpu_loaded_prefixes_have_the_same_tokens(folder: Path) -> None:
    model = LoadedModel(folder, NumpyOps())
    limits = {**LIMITS, "num_blocks": 5}
    expected, _ = ask(model.core(enable_prefix_caching=False, **limits))
    core = model.core(num_host_blocks=9, **limits)
    told, found = ask(core)
    check_found(core, found)
    assert [tokens for tokens, _ in told] == [tokens for tokens, _ in expected]
