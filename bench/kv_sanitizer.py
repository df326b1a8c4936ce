"""What the KV sanitizer costs a decode step on `cpu`.

One model in two engine cores, with the sanitizer and without, that make the same steps in turns, so
that both see the same machine. Prints milliseconds of CPU time a step, medians, and the ratio.

Run it with `python bench/kv_sanitizer.py [MODEL] [--sequences N] [--steps N]`.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from random import Random
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import report
from cupaged.config import EngineConfig
from cupaged.engine.core import EngineCore
from cupaged.engine.runner import ModelRunner
from cupaged.loading.model_files import load_model, open_model
from cupaged.ops.numpy_ops import NumpyOps
from cupaged.request import CoreRequest
from cupaged.sampling_params import SamplingParams

BLOCK_SIZE, PROMPT_TOKENS = 16, 128


def step_ms(core: EngineCore) -> float:
    """CPU time of one step, of all threads."""
    start = time.process_time()
    core.step()
    return 1e3 * (time.process_time() - start)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", help="default: the installed SmolLM2-135M-Instruct")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--steps", type=int, default=32)
    arguments = parser.parse_args()
    files, ops = open_model(arguments.model), NumpyOps()
    longest = PROMPT_TOKENS + arguments.steps + 2
    model = load_model(files, ops, max_model_len=longest)
    specs = files.model_class.kv_cache_specs(files.config, BLOCK_SIZE, "float32")
    cores = {}
    for is_on in (False, True):
        config = EngineConfig(
            vocab_size=files.config.vocab_size,
            num_blocks=arguments.sequences * -(-longest // BLOCK_SIZE),
            block_size=BLOCK_SIZE,
            max_model_len=longest,
            max_num_seqs=arguments.sequences,
            max_num_batched_tokens=arguments.sequences * PROMPT_TOKENS,
            watermark=0.0,
            kv_sanitizer=is_on,
        )
        core = cores[is_on] = EngineCore(config, ModelRunner(model, specs, ops, config))
        random = Random(0)
        for i in range(arguments.sequences):
            prompt = tuple(random.randrange(1000) for _ in range(PROMPT_TOKENS))
            params = SamplingParams(
                temperature=0, max_tokens=arguments.steps + 2, ignore_eos=True, detokenize=False
            )
            core.add_request(CoreRequest(str(i), prompt, params))
        core.step()  # all prompts
    times = [(step_ms(cores[False]), step_ms(cores[True])) for _ in range(arguments.steps)]
    off, on = (round(median(column), 2) for column in zip(*times, strict=True))
    results = {
        "num_sequences": arguments.sequences,
        "context_tokens": PROMPT_TOKENS,
        "off_cpu_ms_per_step": off,
        "on_cpu_ms_per_step": on,
        "on_over_off": round(on / off, 3),
    }
    for name, value in results.items():
        print(f"{name:22} {value}")
    print(f"written: {report.write('kv_sanitizer', results)}")


if __name__ == "__main__":
    main()
