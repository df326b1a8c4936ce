"""Runs traces with nothing to watch them but the KV sanitizer, and tells what it says.

`python -m tests.fuzz.sanitized SEED [COUNT]` prints the first complaint about the traces of COUNT
seeds from SEED on. No oracle, no audit: whatever else goes wrong ends the trace and is passed over.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from random import Random

from cupaged.engine.core import EngineCore
from cupaged.engine.hash_runner import HashRunner
from cupaged.engine.preemption import Cheaper
from cupaged.errors import BadValueError, KVSanitizerError
from tests.fuzz.traces import Abort, Add, Operation, Reset, Steps, Trace, make_trace

_MOST_STEPS = 2_000


def complaint_about(trace: Trace) -> str | None:
    """What the sanitizer says when the trace's requests, aborts and resets are played."""
    config = replace(trace.config, kv_sanitizer=True)
    core = EngineCore(
        config,
        HashRunner(
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            vocab_size=config.vocab_size,
            num_host_blocks=config.num_host_blocks,
        ),
        preemption=Cheaper(trace.swap_costs) if trace.swap_costs is not None else None,
    )
    try:
        for operation in trace.operations:
            _play(core, operation)
        for _ in range(_MOST_STEPS):
            if not core.has_unfinished_requests:
                break
            core.step()
    except KVSanitizerError as error:
        return str(error)
    except Exception:
        return None
    return None


def first_complaint(seeds: Iterable[int]) -> str | None:
    """About the first seed whose trace makes the sanitizer speak."""
    told = (complaint_about(make_trace(Random(seed), beam_shares=(0.0,))) for seed in seeds)
    return next((text for text in told if text is not None), None)


def _play(core: EngineCore, operation: Operation) -> None:
    match operation:
        case Add(request):
            with suppress(BadValueError):
                core.add_request(request)
        case Abort(request_id, index):
            core.abort(request_id, index)
        case Steps(count):
            for _ in range(count):
                core.step()
        case Reset():
            core.reset_prefix_cache()
        case _:
            pass  # failures belong to another runner


def main() -> None:
    """Exit status 1 if the sanitizer complains."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.sanitized")
    parser.add_argument("seed", type=int)
    parser.add_argument("count", type=int, nargs="?", default=1)
    arguments = parser.parse_args()
    text = first_complaint(range(arguments.seed, arguments.seed + arguments.count))
    if text is not None:
        raise SystemExit(text)


if __name__ == "__main__":
    main()
