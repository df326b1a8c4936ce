"""The same checks as on traces, on calls that hypothesis draws one by one and can shrink."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from cupaged.config import PREFIX_CACHES, EngineConfig
from cupaged.engine.scheduling_policy import POLICIES
from cupaged.request import CoreRequest
from cupaged.sampling_params import BeamSearchParams, SamplingParams
from tests.fuzz.harness import TraceRun
from tests.fuzz.traces import Trace

VOCAB_SIZE = 11
IDS = st.sampled_from("abcdef")
CONFIGS = st.builds(
    EngineConfig,
    vocab_size=st.just(VOCAB_SIZE),
    num_blocks=st.integers(1, 12),
    block_size=st.sampled_from([1, 2, 4, 8, 16]),
    max_model_len=st.sampled_from([1000, 12, 6]),
    max_num_seqs=st.integers(1, 6),
    max_num_batched_tokens=st.sampled_from([1, 2, 5, 64]),
    watermark=st.sampled_from([0.0, 0.2, 0.9]),
    max_steps_in_flight=st.integers(1, 3),
    enable_prefix_caching=st.sampled_from([True, True, False]),
    prefix_cache=st.sampled_from(PREFIX_CACHES),
)
TOKENS = st.integers(0, VOCAB_SIZE - 1)
PARAMS = st.builds(
    SamplingParams,
    n=st.integers(1, 4),
    max_tokens=st.integers(3, 9),
    min_tokens=st.sampled_from([0, 0, 3]),
    stop_token_ids=st.lists(TOKENS, max_size=2),
    ignore_eos=st.booleans(),
)
BEAMS = st.builds(
    BeamSearchParams,
    beam_width=st.integers(1, 4),
    max_tokens=st.integers(1, 6),
    length_penalty=st.sampled_from([0.0, 1.0, -1.0]),
    early_stopping=st.sampled_from([False, True, "never"]),
)


class PagingMachine(RuleBasedStateMachine):
    """An engine core, and a model of what it must do."""

    @initialize(config=CONFIGS, deferred=st.booleans(), policy=st.sampled_from([*POLICIES]))
    def start(self, config: EngineConfig, deferred: bool, policy: str) -> None:
        self.trace_run = TraceRun(Trace(config, deferred, policy, ()))

    @rule(
        request_id=IDS,
        prompt=st.lists(TOKENS, min_size=1, max_size=17).map(tuple),
        params=PARAMS,
        eos=st.lists(TOKENS, max_size=1).map(tuple),
        seed=st.integers(0, 5),
        caching=st.sampled_from([None, None, True, False]),
        salt=st.sampled_from([None, None, "", "a"]),
        beams=st.none() | BEAMS,
    )
    def add(
        self,
        request_id: str,
        prompt: tuple[int, ...],
        params: SamplingParams,
        eos: tuple[int, ...],
        seed: int,
        caching: bool | None,
        salt: str | None,
        beams: BeamSearchParams | None,
    ) -> None:
        if beams is not None:
            params = beams.sampling_params(eos)
        request = CoreRequest(request_id, prompt, params, eos, seed, beams=beams)
        self.trace_run.add(replace(request, prefix_caching=caching, cache_salt=salt))
        self.trace_run.check()

    @rule(request_id=IDS, index=st.none() | st.integers(-1, 4))
    def abort(self, request_id: str, index: int | None) -> None:
        self.trace_run.abort(request_id, index)
        self.trace_run.check()

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.trace_run.step()

    @rule()
    def reset(self) -> None:
        self.trace_run.reset()
        self.trace_run.check()

    @rule(at_submit=st.booleans())
    def fail(self, at_submit: bool) -> None:
        self.trace_run.runner.fail_next(at_submit=at_submit)

    @rule(request_id=IDS, at_submit=st.booleans())
    def poison(self, request_id: str, at_submit: bool) -> None:
        self.trace_run.runner.poison(request_id, at_submit=at_submit)

    def teardown(self) -> None:
        if hasattr(self, "trace_run"):
            self.trace_run.run([])


TestPagingMachine = PagingMachine.TestCase
TestPagingMachine.settings = settings(
    max_examples=100, stateful_step_count=25, deadline=None, derandomize=True, database=None
)
