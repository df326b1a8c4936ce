"""The runner that lets time pass: its formula by hand, and the engine core on its clock."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupaged.config import EngineConfig
from cupaged.engine.core import EngineCore
from cupaged.engine.simulated_runner import SimulatedClock, SimulatedRunner, StepCost
from cupaged.request import CoreRequest
from cupaged.sampling_params import SamplingParams

COST = StepCost(
    step_s=1.0,
    sequence_s=0.1,
    context_token_s=0.01,
    prefill_token_s=0.001,
    prefill_pair_s=0.0001,
    swapped_block_s=10.0,
)


def core(clock: SimulatedClock, **options: Any) -> EngineCore:
    sizes = {"vocab_size": 100, "num_blocks": 8, "block_size": 4, "max_model_len": 16}
    config = EngineConfig(**sizes | options)
    return EngineCore(config, SimulatedRunner(COST, clock, token_id=7), clock=clock)


def request(name: str, prompt: tuple[int, ...], max_tokens: int) -> CoreRequest:
    return CoreRequest(name, prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True))


@pytest.mark.parametrize(
    ("start", "num_new", "seconds"),
    [
        ([10], [1], 1 + 0.1 + 0.01 * 11),
        ([0], [4], 1 + 0.1 + 0.001 * 4 + 0.0001 * 16),
        ([4], [2], 1 + 0.1 + 0.001 * 2 + 0.0001 * (36 - 16)),
        ([10, 0, 2], [1, 4, 1], 1 + 0.3 + 0.01 * (11 + 3) + 0.001 * 4 + 0.0001 * 16),
    ],
)
def test_a_step_costs_the_sum_of_its_terms(
    start: list[int], num_new: list[int], seconds: float
) -> None:
    assert COST.seconds(np.array(start), np.array(num_new)) == pytest.approx(seconds)


def test_swapped_blocks_take_time() -> None:
    """Two requests that grow to 3 blocks, in a pool of 4: one leaves with 2, and comes back."""
    clock = SimulatedClock()
    options = {"num_blocks": 4, "num_host_blocks": 4, "watermark": 0.0}
    engine = core(clock, enable_prefix_caching=False, **options)
    for name in ("a", "b"):
        engine.add_request(request(name, (1, 2, 3, 4, 5), 8))
    last_s, slow_steps = 0.0, []
    while engine.has_unfinished_requests:
        engine.step()
        slow_steps.append(int((clock() - last_s) // 10))
        last_s = clock()
    assert sorted(slow_steps)[-3:] == [0, 2, 2]


def test_the_core_runs_on_simulated_time() -> None:
    clock = SimulatedClock()
    clock.advance_to(5.0)
    engine = core(clock)
    engine.add_request(request("a", (1, 2, 3, 4), 2))
    (first,) = engine.step()
    assert first.new_token_ids == [7]
    assert first.first_scheduled_time == 5.0
    assert clock() == pytest.approx(5 + 1 + 0.1 + 0.004 + 0.0016)
    (second,) = engine.step()
    assert second.finish_reason == "length"
    assert clock() == pytest.approx(6.1056 + 1 + 0.1 + 0.05)


def test_a_clock_does_not_go_back() -> None:
    clock = SimulatedClock()
    clock.advance_to(3.0)
    clock.advance_to(2.0)
    assert clock() == 3.0


def test_steps_in_flight_run_one_after_another() -> None:
    clock = SimulatedClock()
    engine = core(clock, max_steps_in_flight=2, max_num_batched_tokens=2)
    for name in ("a", "b"):  # a step each
        engine.add_request(request(name, (1, 2), 1))
    assert [o.request_id for o in engine.step()] == ["a"]
    assert clock() == pytest.approx(1 + 0.1 + 0.002 + 0.0004)
    assert [o.request_id for o in engine.step()] == ["b"]
    assert clock() == pytest.approx(2 * 1.1024)


def test_samples_each_draw_a_token() -> None:
    engine = core(SimulatedClock())
    params = SamplingParams(n=3, max_tokens=2, ignore_eos=True)
    engine.add_request(CoreRequest("a", (1, 2, 3), params))
    assert [(o.index, o.new_token_ids) for o in engine.step()] == [(i, [7]) for i in range(3)]
