"""Models with a pool that is too small: swapped requests give what they give with enough room.

On `emulated` they are equal bit for bit, and the device is asked for nothing at a bad time.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupaged import LLM, SamplingParams
from cupaged.engine.core import EngineCore
from cupaged.engine.preemption import Cheaper, Recompute
from cupaged.engine.runner import ModelRunner
from cupaged.engine_args import EngineArgs
from cupaged.errors import CapacityError, ConfigError
from cupaged.ops.cuda_ops import CudaOps
from cupaged.ops.numpy_ops import NumpyOps
from cupaged.outputs import TokenLogprobs
from cupaged.request import CoreRequest
from tests.deferred_runtime import DeferredRuntime
from tests.fast_runtime import fast_ops
from tests.forced import LoadedModel
from tests.tiny_models import TINIER, write_hf_folder

LIMITS: dict[str, Any] = {
    "block_size": 8, "max_model_len": 96, "max_num_seqs": 6, "max_num_batched_tokens": 32,
    "watermark": 0.0, "enable_prefix_caching": False,
}  # fmt: skip
Told = dict[tuple[str, int], tuple[list[int], list[TokenLogprobs]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf_folder(tmp_path_factory.mktemp("models") / "tinier", TINIER)


def ask(name: str, length: int, **params: Any) -> CoreRequest:
    seed = sum(name.encode())
    prompt = np.random.default_rng(seed).integers(3, 509, length).tolist()
    fields = {"temperature": 0.9, "logprobs": 2, "ignore_eos": True, **params}
    return CoreRequest(name, tuple(prompt), SamplingParams(**fields), seed=seed)


ASKED = [
    ask("a", 15, max_tokens=30),
    ask("two", 12, n=2, max_tokens=24),
    ask("b", 17, max_tokens=20),
]


def run(core: EngineCore) -> Told:
    for request in ASKED:
        core.add_request(request)
    told: Told = {}
    while core.has_unfinished_requests:
        for output in core.step():
            tokens, logprobs = told.setdefault((output.request_id, output.index), ([], []))
            tokens += output.new_token_ids
            logprobs += output.logprobs or []
        core.audit()
    return told


def check_swapped(core: EngineCore) -> None:
    stats = core.stats()
    assert stats.num_swap_preemptions_total >= 2
    assert stats.blocks_swapped_in_total == stats.blocks_swapped_out_total >= 4
    assert stats.num_used_host_blocks == stats.num_used_blocks == 0


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_emulated_swapped_requests_have_the_same_bits(
    folder: Path, dtype: str, in_flight: int
) -> None:
    model = LoadedModel(folder, fast_ops(dtype))
    expected = run(model.core(num_blocks=40, **LIMITS))
    small = {**LIMITS, "num_blocks": 10, "max_steps_in_flight": in_flight}
    core = model.core(num_host_blocks=24, **small)
    assert run(core) == expected
    check_swapped(core)


def test_on_cpu_swapped_requests_have_the_same_tokens(folder: Path) -> None:
    model = LoadedModel(folder, NumpyOps())
    expected = run(model.core(num_blocks=40, **LIMITS))
    core = model.core(num_blocks=10, num_host_blocks=24, **LIMITS)
    got = run(core)
    check_swapped(core)
    assert {key: tokens for key, (tokens, _) in got.items()} == {
        key: tokens for key, (tokens, _) in expected.items()
    }


def test_a_late_device_swaps_in_order_and_only_steps_with_swaps_ask_for_more(folder: Path) -> None:
    """Steps wait for nothing and allocate nothing; without swaps each is one upload and one
    download."""
    runtime = DeferredRuntime()
    model = LoadedModel(folder, CudaOps(runtime, "bfloat16"))
    core = model.core(num_blocks=10, num_host_blocks=24, kv_sanitizer=False, **LIMITS)
    runner: ModelRunner = core._runner  # type: ignore[assignment]
    assert runner.warm_up() >= 1
    submit, copies = runner.submit, []

    def counted(plan: Any) -> int:
        runtime.asked.clear()
        with runtime.forbidding("wait", "blocking copy", "empty", "empty_pinned", "load_kernel"):
            handle = submit(plan)
        asked = runtime.asked["upload"], runtime.asked["download"]
        copies.append((bool(plan.swap_out), bool(plan.swap_in), *asked))
        return handle

    runner.submit = counted  # type: ignore[method-assign]
    expected = run(LoadedModel(folder, fast_ops("bfloat16")).core(num_blocks=40, **LIMITS))
    assert run(core) == expected
    check_swapped(core)
    assert {c[2:] for c in copies if not any(c[:2])} == {(1, 1)}
    assert all(c[2] == 2 and c[3] > 1 for c in copies if c[0])  # ids up, blocks down
    assert all(c[2] > 2 and c[3] == 1 for c in copies if c[1])


def test_the_costs_are_measured_with_the_clock_that_is_given(folder: Path) -> None:
    """A clock that counts its calls: every time measured is 1, a token 1 / 64."""
    model = LoadedModel(folder, NumpyOps())
    limits = {**LIMITS, "max_num_batched_tokens": 64, "kv_sanitizer": False}
    core = model.core(num_blocks=10, num_host_blocks=24, **limits)
    runner: ModelRunner = core._runner  # type: ignore[assignment]
    calls = iter(range(1000))
    costs = runner.measure_costs(lambda: float(next(calls)))
    assert (costs.per_swap, costs.per_block, costs.per_token) == (1.0, 0.0, 1 / 64)
    real = runner.measure_costs()
    assert real.per_token > 0
    assert real.per_swap + real.per_block > 0


def test_the_options(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """2 layers of one head of 64, keys and values, 16 tokens, float32: 16 KiB a block."""
    caplog.set_level(logging.INFO)
    options: dict[str, Any] = {
        "model": folder, "device": "cpu", "max_model_len": 96, "num_gpu_blocks_override": 6,
    }  # fmt: skip
    llm = LLM(**options, swap_space=1 / 1024, preemption_mode="swap")
    core = llm.engine.core
    assert core.config.num_host_blocks == 64
    assert "swap space 1 MiB = 64 blocks of the host" in caplog.text
    prompts = [[7, 8, 9, i] for i in range(5)]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    got = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
    assert core.stats().num_swap_preemptions_total > 0
    roomy = LLM(**{**options, "num_gpu_blocks_override": 100})
    assert got == [o.outputs[0].token_ids for o in roomy.generate(prompts, params, use_tqdm=False)]
    assert roomy.engine.core.config.num_host_blocks == 0


def test_auto_measures_and_recompute_takes_no_memory(folder: Path) -> None:
    options: dict[str, Any] = {"model": folder, "device": "cpu", "max_model_len": 96}
    built = EngineArgs(**options, swap_space=1 / 1024).build_core()
    strategy = built.core.swapping.strategy
    assert isinstance(strategy, Cheaper)
    assert strategy.costs.per_token > 0
    assert built.core.config.num_host_blocks == 64
    built = EngineArgs(**options, swap_space=1 / 1024, preemption_mode="recompute").build_core()
    assert isinstance(built.core.swapping.strategy, Recompute)
    assert built.core.config.num_host_blocks == 0


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"swap_space": -1}, ConfigError, "a number of GiB >= 0"),
        ({"swap_space": float("nan")}, ConfigError, "a number of GiB >= 0"),
        ({"swap_space": True}, ConfigError, "a number of GiB >= 0"),
        ({"swap_space": "4"}, ConfigError, "a number of GiB >= 0"),
        ({"swap_space": 4, "preemption_mode": "swop"}, ConfigError, "'auto', 'swap', 'recompute'"),
        ({"preemption_mode": "swap"}, ConfigError, "where swap_space is 0"),
        ({"swap_space": 500_000}, CapacityError, "free memory of the host"),
        (
            {"swap_space": 1e-6},
            CapacityError,
            r"least \d\S*e-\d+ GiB \(one KV block, \d+ ",
        ),
    ],
)
def test_what_is_refused(
    folder: Path, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words) as caught:
        EngineArgs(model=folder, device="cpu", max_model_len=96, **options).build_core()
    assert next(reversed(options)) in str(caught.value)
