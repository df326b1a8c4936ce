"""Runs traces on a tiny Llama: a request must give in any company what it gives alone.

On `numpy` the tokens are forced, and log probabilities agree to 1e-4. On `native`, the other form
of the `cpu` device, and on `emulated` some are forced and some drawn, and every bit is the same:
tokens, log probabilities, hidden states, logits, keys and values. All that `tests.fuzz.harness`
checks is checked here, too.

`python -m tests.fuzz.device_harness DEVICE SEED [COUNT]` replays traces and prints what each costs
and the first that fails, shrunk.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
import time
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import numpy as np

from cupaged.config import EngineConfig
from cupaged.engine.core import EngineCore
from cupaged.engine.runner import ModelRunner, Runner
from cupaged.ops.cuda_ops import CudaOps
from cupaged.ops.native_ops import NativeOps
from cupaged.outputs import CoreOutput, EngineStats, TokenLogprobs
from cupaged.request import CoreRequest, Sequence
from cupaged.sampling_params import SamplingParams
from tests.fast_runtime import FastRuntime
from tests.forced import LoadedModel
from tests.fuzz.harness import TraceRun, failure_of, report
from tests.fuzz.oracle import Answer, answer, most_tokens, refusal
from tests.fuzz.traces import Add, Trace, make_trace
from tests.recorded import Record, RecordingRunner, check_same
from tests.tiny_models import TINIER, write_hf_folder

DEVICES = ("numpy", "native", "emulated")
DTYPES = ("float32", "bfloat16", "float16")  # of emulated traces, in turns
MOST_LOGPROB_ERROR = 1e-4
NUM_LOGPROBS = 3
_MOST_RUNS = 60  # to shrink a trace
_MOST_STEPS = 200  # of a trace that is run
# Ways to draw, beside forced tokens.
_WAYS = (
    SamplingParams(temperature=0.9, top_p=0.9),
    SamplingParams(temperature=0),
    SamplingParams(temperature=1.3, top_k=7, repetition_penalty=1.3),
    SamplingParams(temperature=1, min_p=0.02, presence_penalty=0.5),
)


class FuzzedRunner(RecordingRunner):
    """Keeps records by request: what equal requests compute must be equal, however often."""

    def name_of(self, request: CoreRequest) -> Hashable:
        """The request itself, but for its id and all that does not change its numbers."""
        return _what_is_asked(request)

    def _record_of(self, sequence: Sequence) -> Record:
        """Beams come and go under one index: each has a record of its own."""
        if sequence.request.core.beams is None:
            return super()._record_of(sequence)
        return self.records.setdefault((sequence, sequence.index), Record())


@dataclass(frozen=True, slots=True)
class Device:
    """A device twice, as one has room for one engine only: for traces and for requests alone."""

    company: LoadedModel
    alone: LoadedModel
    is_exact: bool

    @staticmethod
    def make(name: str, dtype: str, folder: Path) -> Device:
        """Load the model of `folder` on one of `DEVICES`."""
        if name == "numpy":
            return Device(LoadedModel(folder), LoadedModel(folder), False)
        if name == "native":
            return Device(LoadedModel(folder, NativeOps()), LoadedModel(folder, NativeOps()), True)
        company, alone = (LoadedModel(folder, CudaOps(FastRuntime(), dtype)) for _ in range(2))
        return Device(company, alone, True)

    def runner(self, model: LoadedModel, config: EngineConfig) -> ModelRunner:
        """A runner with a KV pool of its own, which keeps what it computes where that is exact."""
        if self.is_exact:
            return FuzzedRunner(model, config)
        return ModelRunner(model.model, model.kv_cache_specs(config), model.ops, config)


@dataclass(slots=True)
class Alone:
    """What a request gave alone, by sample; `records` where every bit counts, but not of beams,
    which share an index."""

    answers: list[Answer]
    logprobs: list[list[TokenLogprobs]]
    prompt_logprobs: list[TokenLogprobs]
    records: dict[int, Record] = field(default_factory=dict)


def run_alone(device: Device, request: CoreRequest, config: EngineConfig) -> Alone:
    """Run a request in an engine of its own: no cache, no chunks, room for all its samples."""
    request, n = _what_is_asked(request), request.params.n
    most = most_tokens(request, config)
    params = replace(
        request.params, max_tokens=most, min_tokens=min(most, request.params.min_tokens)
    )
    if request.beams is not None:
        request = replace(request, beams=replace(request.beams, max_tokens=most))
        params = replace(request.params, max_tokens=most)
    per_sample = -(-(len(request.prompt_token_ids) + most) // config.block_size)
    roomy = replace(
        config, num_blocks=n * per_sample, num_host_blocks=0, max_num_batched_tokens=512,
        max_num_seqs=n, max_steps_in_flight=1, enable_prefix_caching=False,
        long_prefill_token_threshold=0,
    )  # fmt: skip
    runner = device.runner(device.alone, roomy)
    core = EngineCore(roomy, runner)
    core.add_request(replace(request, params=params))
    answers = [Answer([], "error", None) for _ in range(n)]
    logprobs: list[list[TokenLogprobs]] = [[] for _ in range(n)]
    told: list[TokenLogprobs] = []
    while core.has_unfinished_requests:
        for output in core.step():
            tokens = [*answers[output.index].token_ids, *output.new_token_ids]
            ending = (output.finish_reason or "error", output.stop_reason)
            answers[output.index] = Answer(tokens, *ending)
            logprobs[output.index] += output.logprobs or []
            told += output.prompt_logprobs
    alone = Alone(answers, logprobs, told)
    if isinstance(runner, FuzzedRunner) and request.beams is None:
        alone.records = {i: kept for (_, i), kept in runner.records.items()}
    return alone


class DeviceRun(TraceRun):
    """One engine on a device."""

    def __init__(self, device: Device, trace: Trace) -> None:
        self._device = device
        self._alone: dict[CoreRequest, Alone] = {}
        super().__init__(trace)

    def make_runner(self) -> Runner:
        """The device's."""
        self._model_runner = self._device.runner(self._device.company, self.config)
        return self._model_runner

    def answers_to(self, request: CoreRequest) -> list[Answer]:
        """What the request gives alone."""
        asked = _what_is_asked(request)
        if asked not in self._alone:
            self._alone[asked] = alone = run_alone(self._device, request, self.config)
            if request.params.trace_decode_token_ids:  # all samples give the same
                assert alone.answers == [answer(request, 0, self.config)] * request.params.n
        return self._alone[asked].answers

    def _take(self, output: CoreOutput) -> None:
        expected = self.unfinished.get(output.request_id)
        super()._take(output)
        assert expected is not None
        request, index, new = expected.request, output.index, len(output.new_token_ids)
        alone, end = self._alone[_what_is_asked(request)], len(expected.tokens[index])
        theirs = alone.logprobs[index][end - new : end]
        self._check_logprobs(f"{request} sample {index} to {end}", output.logprobs, theirs)
        if end == new and (output.prompt_logprobs or not index):
            ours, theirs = [*output.prompt_logprobs], alone.prompt_logprobs
            self._check_logprobs(f"the prompt of {request}", ours, theirs)
        if output.finish_reason is not None and alone.records:
            self._check_record(_what_is_asked(request), index)

    def _check_unfinished_beams(self, request: CoreRequest) -> None:
        """Different outputs; how they are ordered is tested with hashes."""
        outputs = self.core.best_so_far(request.request_id)
        assert len({(*output.new_token_ids,) for output in outputs}) == len(outputs)

    def _check_logprobs(
        self, where: str, ours: list[TokenLogprobs] | None, theirs: list[TokenLogprobs]
    ) -> None:
        if self._device.is_exact:
            assert ours == theirs, f"log probabilities of {where} differ: {ours} and {theirs}"
            return
        assert ours is not None
        for got, expected in zip(ours, theirs, strict=True):
            assert got.token_ids[0] == expected.token_ids[0]
            error = np.abs(np.subtract(got.logprobs, expected.logprobs)).max()
            assert error <= MOST_LOGPROB_ERROR, (
                f"log probabilities of {where} are off by {error:.1e}: {got} and {expected}"
            )

    def _check_record(self, asked: CoreRequest, index: int) -> None:
        """What was computed; positions that were found in the cache have keys and values only.

        A sample after the first has computed something of the prompt if it was preempted, and
        nothing at all if its first token ended it.
        """
        assert isinstance(self._model_runner, FuzzedRunner)
        got, alone = self._model_runner.records[asked, index], self._alone[asked].records
        first, own = alone[0], alone[index]
        if index and len(self._alone[asked].answers[index].token_ids) == 1:
            assert got.kv is None
            return
        hidden = {**first.hidden, **own.hidden} if index else own.hidden
        check_same(got, replace(own, hidden={at: hidden[at] for at in got.hidden}))


def make_device_trace(seed: int, device: str) -> Trace:
    """The trace of a seed: its requests are those of the hash oracle, with its tokens forced.

    Only traces that meet a full pool or a cached prefix in a bearable number of steps are taken.
    Beams are searched only where bits are equal: others may be the best where numbers are close.
    """
    random = Random(seed)
    sizes = (8, 8, 16, 32) if device == "emulated" else (1, 2, 4, 8, 16)
    shares = (0.0,) if device == "numpy" else (0.0, 0.0, 0.4)
    while True:
        trace = make_trace(
            random, vocab_sizes=(TINIER.vocab_size,), block_sizes=sizes, beam_shares=shares
        )
        if _is_worth_its_time(trace):
            break
    drawn_share = 0.0 if device == "numpy" else 0.6
    scored_share = random.choice((0.0, 0.0, 0.3))
    operations = []
    for operation in trace.operations:
        if isinstance(operation, Add) and operation.request.beams is None:
            way = random.choice(_WAYS) if random.random() < drawn_share else None
            scored = random.choice((0, 2)) if random.random() < scored_share else None
            operation = Add(_on_device(operation.request, trace.config, way, scored))
        operations.append(operation)
    config = replace(trace.config, kv_sanitizer=True)
    return replace(trace, config=config, operations=tuple(operations))


def _is_worth_its_time(trace: Trace) -> bool:
    """True if a request is preempted or finds a cached prefix, in a bearable number of steps."""
    hashed = TraceRun(replace(trace, config=replace(trace.config, kv_sanitizer=False)))
    hashed.run(trace.operations)
    stats = hashed.core.stats()
    is_rich = stats.num_preemptions_total or stats.prefix_cache_hits_total
    return bool(is_rich) and stats.num_steps <= _MOST_STEPS


def _on_device(
    request: CoreRequest, config: EngineConfig, way: SamplingParams | None, scored: int | None
) -> CoreRequest:
    """The request with log probabilities, and drawn in a way, or forced if that is None."""
    params = replace(request.params, logprobs=NUM_LOGPROBS, prompt_logprobs=scored)
    if way is not None:
        params = replace(
            way, logprobs=NUM_LOGPROBS, prompt_logprobs=scored, n=params.n,
            max_tokens=params.max_tokens, min_tokens=params.min_tokens,
            stop_token_ids=params.stop_token_ids, ignore_eos=params.ignore_eos,
        )  # fmt: skip
    elif refusal(request, config, held=False) is None:
        forced = answer(request, 0, config).token_ids
        params = replace(params, trace_decode_token_ids=forced)
    return replace(request, params=params)


def _what_is_asked(request: CoreRequest) -> CoreRequest:
    return replace(request, request_id="", priority=0, prefix_caching=None, cache_salt=None)


@functools.cache
def device_of(name: str, dtype: str) -> Device:
    """The device of a process, loaded once."""
    with tempfile.TemporaryDirectory() as folder:
        return Device.make(name, dtype, write_hf_folder(Path(folder) / "tinier", TINIER))


def run_of(name: str, seed: int) -> Callable[[Trace], DeviceRun]:
    """Runs a trace on the device for that seed."""
    dtype = DTYPES[seed % len(DTYPES)] if name == "emulated" else "float32"
    return functools.partial(DeviceRun, device_of(name, dtype))


def run_seed(name: str, seed: int, *, shrunk: bool = True) -> tuple[str | None, EngineStats]:
    """Run the trace of a seed; how it fails, and what was counted. Prints what it cost."""
    trace, run = make_device_trace(seed, name), run_of(name, seed)
    start = time.process_time()
    trace_run = run(trace)
    failure = failure_of(trace, lambda _: trace_run)
    stats, seconds = trace_run.core.stats(), time.process_time() - start
    print(
        f"{name} trace {seed}: {stats.num_steps} steps, {stats.num_preemptions_total} preemptions, "
        f"{stats.blocks_swapped_in_total} blocks swapped in, "
        f"{stats.prefix_cache_hits_total} tokens from the cache, {seconds:.2f} s: "
        f"{'failed' if failure else 'good'}"
    )
    if failure is not None and shrunk:
        replay = f"python -m tests.fuzz.device_harness {name} {seed}"
        failure = report(trace, replay, run, _MOST_RUNS)
    return failure, stats


def check_seeds(name: str, seeds: Iterable[int]) -> None:
    """Run the traces of some seeds, which must preempt, swap and find prefixes now and then."""
    counted = []
    for seed in seeds:
        failure, stats = run_seed(name, seed)
        assert failure is None, failure
        counted.append(stats)
    assert sum(stats.num_preemptions_total for stats in counted) > 0
    assert sum(stats.blocks_swapped_in_total for stats in counted) > 0
    assert sum(stats.prefix_cache_hits_total for stats in counted) > 0


def main() -> None:
    """Exit status 1 if a trace fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.device_harness")
    parser.add_argument("device", choices=DEVICES)
    parser.add_argument("seed", type=int)
    parser.add_argument("count", type=int, nargs="?", default=1)
    asked = parser.parse_args()
    for seed in range(asked.seed, asked.seed + asked.count):
        failure, _ = run_seed(asked.device, seed)
        if failure is not None:
            raise SystemExit(failure)


if __name__ == "__main__":
    main()
