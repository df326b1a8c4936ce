"""cupaged as a runner: `LLM` in one process, without prefix caching."""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.peers.runner import Options, Requests, serve

START = time.perf_counter()

import cupaged  # noqa: E402
from cupaged import LLM, SamplingParams  # noqa: E402

LLM.__init__  # noqa: B018  (the class is imported when it is first touched)
IMPORT_S = time.perf_counter() - START


class Cupaged:
    """The engine, with its own choice of threads."""

    def __init__(self, options: Options) -> None:
        # "native" and not "auto": where the kernels were not built, that is an error here.
        self._llm = LLM(
            options.model, device="cpu", cpu_kernels="native",
            cpu_weight_dtype=options.weights, max_num_seqs=options.max_num_seqs,
            max_model_len=options.max_model_len, enable_prefix_caching=False,
        )  # fmt: skip

    def versions(self) -> dict[str, str]:
        """And what the kernels are made of."""
        from cupaged.ops import _native as native

        return {
            "cupaged": cupaged.__version__,
            "instructions": native.instructions(),
            "threads": str(native.num_threads()),
        }

    def generate(self, requests: Requests) -> list[list[int]]:
        """All at once."""
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
        params = [_params(num_tokens) for _, num_tokens in requests]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def stream(self, prompt: list[int], num_tokens: int) -> tuple[list[int], list[float]]:
        """One request, step by step."""
        ids: list[int] = []
        times = []
        for output in self._llm.stream({"prompt_token_ids": prompt}, _params(num_tokens)):
            times.append(time.perf_counter())
            ids = list(output.outputs[0].token_ids)
        return ids, times


def _params(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=num_tokens)


if __name__ == "__main__":
    serve(Cupaged, IMPORT_S)
