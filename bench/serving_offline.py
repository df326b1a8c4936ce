"""The engine without a service, in a process of its own: what the service is compared with.

Arguments: "model" or "null" (nothing is computed), then options of `EngineArgs` in JSON. Each line
of standard input is a job in JSON: `prompts` (lists of token ids), `max_tokens`, and `at_once`,
whether the requests run together or one after the other. Each answer is a line: `wall_s`, `cpu_s`,
`tokens`, and `first_s`, the seconds that each request waited for its first token.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cupaged import SamplingParams
from cupaged.engine.engine import Engine
from cupaged.engine_args import EngineArgs
from cupaged.server.null_runner import make_null_runner


def build(kind: str, options: dict[str, Any]) -> Engine:
    """The engine as `LLM` has it."""
    args = EngineArgs.from_options(options)
    if kind == "model":
        return args.build()
    built = args.build_core_without_weights(partial(make_null_runner, steps_per_s=None))
    return Engine(built.core, built.files.tokenizer, eos_token_ids=built.files.eos_token_ids)


def run(engine: Engine, job: dict[str, Any]) -> dict[str, Any]:
    """One job."""
    params = [
        SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=n) for n in job["max_tokens"]
    ]
    work = list(zip(job["prompts"], params, strict=True))
    batches = [work] if job["at_once"] else [[pair] for pair in work]
    first: list[float] = []
    num_tokens = 0
    began, cpu = time.perf_counter(), time.process_time()
    for batch in batches:
        started = time.perf_counter()
        waiting = {str(i) for i in range(len(batch))}
        for i, (prompt, param) in enumerate(batch):
            engine.add_request(str(i), prompt, param)
        while engine.has_unfinished_requests:
            for output in engine.step():
                if output.request_id in waiting:
                    waiting.remove(output.request_id)
                    first.append(time.perf_counter() - started)
                if output.finished:
                    num_tokens += len(output.outputs[0].token_ids)
    wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    return {"wall_s": wall, "cpu_s": cpu, "tokens": num_tokens, "first_s": first}


def main() -> None:
    """A job a line."""
    engine = build(sys.argv[1], json.loads(sys.argv[2]))
    for line in sys.stdin:
        print(json.dumps(run(engine, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
