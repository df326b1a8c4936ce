"""vLLM for CPUs as a runner: eager, float32, without prefix caching, all in this process."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))

from bench.peers.runner import Options, Requests, serve

os.environ |= {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1",
    # Otherwise it leaves a core to its scheduler, which here is in the same process.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}  # fmt: skip
START = time.perf_counter()

import torch  # noqa: E402
import vllm  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402

IMPORT_S = time.perf_counter() - START


class Vllm:
    """`LLM` for what comes at once, its engine's own steps for one request."""

    def __init__(self, options: Options) -> None:
        self._llm = LLM(
            model=options.model, skip_tokenizer_init=True, dtype=options.weights,
            enforce_eager=True, enable_prefix_caching=False, max_num_seqs=options.max_num_seqs,
            max_model_len=options.max_model_len,
        )  # fmt: skip
        self._num_streams = 0

    def versions(self) -> dict[str, str]:
        """And how many threads its products have."""
        threads = str(torch.get_num_threads())
        return {"vllm": vllm.__version__, "torch": torch.__version__, "threads": threads}

    def generate(self, requests: Requests) -> list[list[int]]:
        """All at once."""
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
        params = [_params(num_tokens) for _, num_tokens in requests]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def stream(self, prompt: list[int], num_tokens: int) -> tuple[list[int], list[float]]:
        """One request, step by step."""
        engine = self._llm.llm_engine
        self._num_streams += 1
        name = f"stream-{self._num_streams}"
        engine.add_request(name, {"prompt_token_ids": prompt}, _params(num_tokens))
        ids: list[int] = []
        times: list[float] = []
        while engine.has_unfinished_requests():
            for output in engine.step():
                ids = list(output.outputs[0].token_ids)
                times += [time.perf_counter()] * (len(ids) - len(times))
        return ids, times


def _params(num_tokens: int) -> Any:
    return SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=num_tokens, detokenize=False)


if __name__ == "__main__":
    serve(Vllm, IMPORT_S)
