"""All that an engine computes for each request, kept to the last bit.

The engine runs as always. Its runner keeps, by sequence and position, hidden states, logits, and
the keys and values as they lie behind the block table; what is computed twice, or stays in a block
from step to step, must stay as it was.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from cupaged.config import EngineConfig
from cupaged.engine.batch import StepPlan
from cupaged.engine.core import EngineCore
from cupaged.engine.runner import ModelRunner, StepOutput
from cupaged.ops import StepContext
from cupaged.outputs import TokenLogprobs
from cupaged.request import CoreRequest
from cupaged.sampling_params import SamplingParams
from tests.forced import LoadedModel

Bits = NDArray[Any]  # unsigned integers


@dataclass
class Record:
    """What was computed for one sequence.

    hidden: [hidden_size] after the last norm, by position. logits: [vocab_size], by the position of
    the token before the draw. kv: [num_tokens, layers, 2, heads * head_dim], by position.
    """

    token_ids: list[int] = field(default_factory=list)
    hidden: dict[int, Bits] = field(default_factory=dict)
    logits: dict[int, Bits] = field(default_factory=dict)
    kv: Bits | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(frozen=True)
class Asked:
    """A request. The seed keys its draws."""

    prompt: Sequence[int]
    params: SamplingParams
    seed: int = 0


@dataclass
class Run:
    """What came of a run: records by (request, sample), sequences of each step, preemptions."""

    records: dict[tuple[int, int], Record]
    batch_sizes: list[int]
    step_tokens: list[int]
    num_preemptions: int


def record(model: LoadedModel, asked: Sequence[Asked], *, every: int = 0, **limits: Any) -> Run:
    """Run the requests to their ends.

    Args:
        every: steps between arrivals; 0 is all at once.
        limits: fields of `EngineConfig`.
    """
    config = model.config(**{"num_blocks": 64, "max_model_len": 512, **limits})
    runner = RecordingRunner(model, config)
    core = EngineCore(config, runner)
    waiting = [
        CoreRequest(str(i), tuple(a.prompt), a.params, seed=a.seed) for i, a in enumerate(asked)
    ]
    num_steps = 0
    while waiting or core.has_unfinished_requests:
        while waiting and (not every or num_steps % every == 0):
            core.add_request(waiting.pop(0))
            if every:
                break
        for output in core.step():
            kept = runner.records[output.request_id, output.index]
            kept.token_ids += output.new_token_ids
            kept.logprobs += output.logprobs or []
            assert output.finish_reason in (None, "length"), output.finish_reason
        num_steps += 1
    core.audit()
    return Run(
        {(int(str(i)), index): kept for (i, index), kept in runner.records.items()},
        runner.batch_sizes,
        runner.step_tokens,
        core.stats().num_preemptions_total,
    )


def check_same(got: Record, expected: Record) -> None:
    """Equal in every bit of what both computed; `got` may have drawn after fewer positions."""
    assert got.hidden.keys() == expected.hidden.keys()
    assert got.logits.keys() <= expected.logits.keys()
    for what, ours, theirs in (
        ("hidden states", got.hidden, expected.hidden),
        ("logits", got.logits, expected.logits),
    ):
        assert ours
        different = [at for at, row in ours.items() if not np.array_equal(row, theirs[at])]
        assert not different, f"{what} at positions {different} differ"
    assert got.kv is not None and expected.kv is not None
    assert got.kv.shape == expected.kv.shape
    different = np.unique(np.nonzero(got.kv != expected.kv)[0]).tolist()
    assert not different, f"keys or values at positions {different} differ"


class RecordingRunner(ModelRunner):
    """The runner of the engine, which keeps what it computes."""

    def __init__(self, model: LoadedModel, config: EngineConfig) -> None:
        self.records: dict[tuple[Hashable, int], Record] = {}
        self.batch_sizes: list[int] = []
        self.step_tokens: list[int] = []
        self._to_host = model.to_host
        self._watched = _WatchedModel(model)
        self._draw_with = model.ops
        self._plan = StepPlan(-1)
        self._plans: dict[int, StepPlan] = {}  # in flight
        super().__init__(
            cast(Any, self._watched),
            model.kv_cache_specs(config),
            model.ops,
            config,
            sampler=self._keep_logits_and_draw,
        )

    def submit(self, plan: StepPlan) -> int:
        """Compute the step, and keep what it computed."""
        self._plan = self._plans[plan.step_id] = plan
        self.batch_sizes.append(len(plan.scheduled))
        self.step_tokens.append(plan.num_tokens)
        handle = super().submit(plan)
        layers = [(_bits(self._to_host(c.k)), _bits(self._to_host(c.v))) for c in self._kv_caches]
        hidden, at = self._watched.hidden, 0
        for i, entry in enumerate(plan.scheduled):
            kept = self._record_of(entry.sequence)
            end = entry.start + entry.num_tokens
            for position in range(entry.start, end):
                _keep("hidden states", kept.hidden, position, hidden[at])
                at += 1
            kv = _read_kv(layers, plan.block_tables[0][i], end)
            if kept.kv is not None:
                both = min(len(kv), len(kept.kv))
                changed = np.unique(np.nonzero(kv[:both] != kept.kv[:both])[0]).tolist()
                assert not changed, f"keys or values at positions {changed} have changed"
            if kept.kv is None or len(kv) > len(kept.kv):
                kept.kv = kv
        return handle

    def collect(self, handle: int) -> StepOutput:
        """The same, with a record for each sample that is forked now."""
        output = super().collect(handle)
        for entry in self._plans.pop(handle).scheduled:
            name = self.name_of(entry.sequence.request.core)
            for index in range(entry.num_samples):
                self.records.setdefault((name, entry.sequence.index + index), Record())
        return output

    def name_of(self, request: CoreRequest) -> Hashable:
        """What records are kept by, beside the sample."""
        return request.request_id

    def _keep_logits_and_draw(self, logits: Any, step: StepContext) -> Any:
        rows = _bits(self._to_host(logits))
        drawing = [entry for entry in self._plan.scheduled if entry.num_samples]
        for entry, row in zip(drawing, rows, strict=True):
            kept = self._record_of(entry.sequence)
            _keep("logits", kept.logits, entry.start + entry.num_tokens - 1, row)
        return self._draw_with.sample(logits, step.sampling)

    def _record_of(self, sequence: Any) -> Record:
        key = (self.name_of(sequence.request.core), sequence.index)
        return self.records.setdefault(key, Record())


class _WatchedModel:
    """A model whose last hidden states stay."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._model = loaded.model
        self._to_host = loaded.to_host
        self.config = loaded.model.config
        self.compute_logits = loaded.model.compute_logits
        self.workspace_widths = loaded.model.workspace_widths
        self.hidden: Bits = np.zeros((0, 0), np.uint8)

    def forward(self, step: Any, kv_caches: Any, work: Any) -> Any:
        hidden = self._model.forward(step, kv_caches, work)
        self.hidden = _bits(self._to_host(hidden))
        return hidden


def _bits(array: NDArray[Any]) -> Bits:
    """The same memory as unsigned integers, so that every bit counts."""
    return array.view(np.dtype(f"u{array.dtype.itemsize}"))


def _keep(what: str, kept: dict[int, Bits], position: int, row: Bits) -> None:
    before = kept.setdefault(position, row)
    assert np.array_equal(before, row), f"{what} at position {position} came out otherwise again"


def _read_kv(layers: list[tuple[Bits, Bits]], table: NDArray[np.int32], end: int) -> Bits:
    """Keys and values of the first `end` positions, [end, layers, 2, heads * head_dim]."""
    block_size = layers[0][0].shape[2]
    position = np.arange(end)
    block, offset = table[position // block_size], position % block_size
    read = [[cache[block, :, offset].reshape(end, -1) for cache in layer] for layer in layers]
    return np.array(read).transpose(2, 0, 1, 3)
