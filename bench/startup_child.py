"""The process that `startup.py` measures: load a model, generate one token, say when what was done.

Argument: the model, or "" for the default one. The parent's clock at the start is in the
environment.
"""

from __future__ import annotations

import json
import os
import sys
import time


def peak_mb() -> float:
    """Most resident memory so far. `getrusage` would count the parent's, from before the exec."""
    with open("/proc/self/status", encoding="ascii") as status:
        lines = [line for line in status if line.startswith("VmHWM:")]
    return float(lines[0].split()[1]) * 1.024e-3


START = float(os.environ["CUPAGED_BENCH_START"])
times = {"python_s": time.time() - START}

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from cupaged import LLM, SamplingParams  # noqa: E402

times["import_s"] = time.time() - START
LLM.__init__  # noqa: B018  (the class is imported when it is first touched)
before = peak_mb()
llm = LLM(sys.argv[1] or None, max_model_len=2048)
times["loaded_s"] = time.time() - START
times["peak_growth_mb"] = peak_mb() - before
params = SamplingParams(temperature=0.0, max_tokens=1)
output = llm.generate("The capital of France is", params, use_tqdm=False)[0]
assert output.outputs[0].text == " Paris", output
times["first_token_s"] = time.time() - START
print(json.dumps(times))
