"""A step on a device: one upload, one download, no wait before `collect`, no memory, no kernel.

The device does nothing until somebody waits for it, so that what the host does too early shows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupaged.engine.core import EngineCore
from cupaged.engine.runner import ModelRunner
from cupaged.engine.warm_up import largest_step, warm_up_batch
from cupaged.ops.cuda_ops import CudaOps
from cupaged.outputs import TokenLogprobs
from cupaged.request import CoreRequest
from cupaged.sampling_params import SamplingParams
from tests.deferred_runtime import DeferredRuntime
from tests.fast_runtime import fast_ops
from tests.forced import LoadedModel
from tests.tiny_models import TINIER, write_hf_folder

LIMITS: dict[str, Any] = {
    "kv_sanitizer": False,  # it reads and writes blocks beside the step
    "num_blocks": 24, "max_model_len": 96, "max_num_seqs": 4, "max_num_batched_tokens": 32,
    "watermark": 0.0,
}  # fmt: skip
Told = tuple[list[int], list[TokenLogprobs], list[TokenLogprobs]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf_folder(tmp_path_factory.mktemp("models") / "tinier", TINIER)


class Engine:
    """A tiny model on a device, and what was asked of the device in each step."""

    def __init__(self, folder: Path, **limits: Any) -> None:
        self.runtime = DeferredRuntime()
        self.ops = CudaOps(self.runtime, "bfloat16")
        self.core: EngineCore = LoadedModel(folder, self.ops).core(**{**LIMITS, **limits})
        self.runner: ModelRunner = self.core._runner  # type: ignore[assignment]
        self.steps: list[dict[str, int]] = []
        self.told: dict[tuple[str, int], Told] = {}
        self.in_flight: list[int] = []  # behind each submit
        submit, collect = self.runner.submit, self.runner.collect
        under_way: set[int] = set()

        def collected(handle: int) -> Any:
            under_way.discard(handle)
            return collect(handle)

        def counted(plan: Any) -> int:
            self.runtime.asked.clear()
            with self.runtime.forbidding("wait", "blocking copy", "empty"):
                handle = submit(plan)
            self.steps.append(dict(self.runtime.asked))
            under_way.add(handle)
            self.in_flight.append(len(under_way))
            return handle

        self.runner.submit, self.runner.collect = counted, collected  # type: ignore[method-assign]

    def run(self, *requests: CoreRequest) -> dict[tuple[str, int], Told]:
        for request in requests:
            self.core.add_request(request)
        while self.core.has_unfinished_requests:
            for output in self.core.step():
                key = output.request_id, output.index
                ids, logprobs, prompt = self.told.setdefault(key, ([], [], []))
                ids += output.new_token_ids
                logprobs += output.logprobs or []
                prompt += output.prompt_logprobs
        self.core.audit()
        return self.told

    def count(self, what: str) -> list[int]:
        return [step.get(what, 0) for step in self.steps]


def ask(name: str, length: int, **params: Any) -> CoreRequest:
    seed = sum(name.encode())
    prompt = np.random.default_rng(seed).integers(3, 509, length).tolist()
    fields = {"temperature": 0.9, "top_p": 0.9, "max_tokens": 6, "ignore_eos": True, **params}
    return CoreRequest(name, tuple(prompt), SamplingParams(**fields), seed=seed)


MIXED = [
    ask("plain", 5),
    ask("edited", 17, repetition_penalty=1.3, logit_bias={7: 2.0}, logprobs=3),
    ask("samples", 20, n=2, logprobs=0, allowed_token_ids=[5, 6, 7, 8]),
    ask("forced", 9, trace_decode_token_ids=[11, 12]),
]


def test_a_decode_step_is_one_upload_and_one_download(folder: Path) -> None:
    engine = Engine(folder)
    engine.run(ask("a", 3), ask("b", 7), ask("c", 4))
    assert engine.count("upload") == engine.count("download") == [1] * 6


def test_a_mixed_step_is_one_upload_and_one_download(folder: Path) -> None:
    """Prompts in chunks, forks and their copies of blocks, edits, reports, forced tokens."""
    engine = Engine(folder)
    told = engine.run(*MIXED)
    assert set(engine.count("upload")) == {1}
    assert set(engine.count("download")) == {1}
    assert told["forced", 0][0][:2] == [11, 12]
    assert len(told["edited", 0][1]) == 6


def test_reports_on_prompts_come_down_in_parts(folder: Path) -> None:
    """4 rows of logits at a time: 29 prompt tokens are told about in 8 parts, and then the draw."""
    engine = Engine(folder)
    told = engine.run(ask("a", 30, prompt_logprobs=2, max_tokens=2))
    assert engine.count("upload") == [1, 1]
    assert engine.count("download") == [8 + 1, 1]
    assert len(told["a", 0][2]) == 29


@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_steps_in_flight_do_not_touch_each_other(in_flight: int, folder: Path) -> None:
    """Requests are what they are on a device that does everything at once, one step at a time."""
    asked = [*MIXED, ask("prompt", 40, prompt_logprobs=3, logprobs=1)]
    limits: dict[str, Any] = {"max_num_batched_tokens": 8, "max_num_seqs": 5}
    engine = Engine(folder, max_steps_in_flight=in_flight, **limits)
    got = engine.run(*asked)
    assert max(engine.in_flight) == in_flight
    core = LoadedModel(folder, fast_ops("bfloat16")).core(**{**LIMITS, **limits})
    expected: dict[tuple[str, int], Told] = {}
    for request in asked:
        core.add_request(request)
    while core.has_unfinished_requests:
        for output in core.step():
            kept = expected.setdefault((output.request_id, output.index), ([], [], []))
            kept[0].extend(output.new_token_ids)
            kept[1].extend(output.logprobs or [])
            kept[2].extend(output.prompt_logprobs)
    assert got == expected


def test_a_step_that_failed_leaves_the_next_ones_right(folder: Path) -> None:
    """It fails behind its downloads of reports on the prompt."""
    engine = Engine(folder)
    expected = Engine(folder).run(ask("good", 12, logprobs=2))
    sample = engine.ops.sample
    failed: list[bool] = []

    def failing(logits: Any, sampling: Any) -> Any:
        if not failed:
            failed.append(True)
            raise ValueError("planted")
        return sample(logits, sampling)

    engine.ops.sample = failing  # type: ignore[method-assign]
    engine.core.add_request(ask("bad", 20, prompt_logprobs=2))
    with pytest.raises(Exception, match="planted"):
        engine.core.step()
    assert engine.run(ask("good", 12, logprobs=2)) == expected


# ---- warm-up -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_after_the_warm_up_no_step_takes_memory_or_loads_a_kernel(
    dtype: str, tmp_path: Path
) -> None:
    """Steps of every number of tokens, of all kinds; more than 128 tokens change the kernels."""
    folder = write_hf_folder(tmp_path / "tinier", TINIER)
    runtime = DeferredRuntime()
    model = LoadedModel(folder, CudaOps(runtime, dtype))
    limits = {**LIMITS, "max_num_batched_tokens": 150, "max_num_seqs": 70, "num_blocks": 40}
    core = model.core(**limits)
    runner: ModelRunner = core._runner  # type: ignore[assignment]
    with runtime.forbidding("empty", "empty_pinned", "blocking copy"):
        assert 2 <= runner.warm_up() <= 6  # in float32 there are two kinds of products
    runtime.asked.clear()
    with runtime.forbidding("empty", "empty_pinned", "blocking copy", "load_kernel"):
        for count in (*range(1, 20), 31, 32, 33, 63, 64, 65, 69, 70, 71, 127, 128, 129, 149, 150):
            runner._finish(0, runner._start(warm_up_batch(count, core.config)))
        for request in (*MIXED, ask("prompt", 40, prompt_logprobs=20)):
            core.add_request(request)
        while core.has_unfinished_requests:
            core.step()
    assert runtime.asked["launch"] > 500


def test_the_largest_step_is_what_the_sequences_hold(folder: Path) -> None:
    """A budget of 4096 tokens, two sequences of 40: every warm-up step is one that can come."""
    model = LoadedModel(folder, fast_ops("bfloat16"))
    config = model.config(max_num_seqs=2, max_model_len=40, max_num_batched_tokens=4096)
    assert largest_step(config) == 80
    for count in (1, 2, 3, 41, 79, 80):
        batch = warm_up_batch(count, config)
        assert batch.num_tokens == count == batch.query_start[-1]
        assert (np.diff(batch.query_start) == batch.context_len).all()
        assert batch.context_len.min() > 0 and batch.context_len.max() <= 40
        assert batch.positions.max() < 40
        slots = batch.groups[0].slot_mapping
        assert len(set(slots[slots >= 0])) == (slots >= 0).sum() > 0
