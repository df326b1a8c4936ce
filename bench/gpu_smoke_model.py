"""A whole model on the device against the same one on `cpu`; part of `gpu_smoke`.

SmolLM2-135M-Instruct, greedy; in a dry run a tiny random model, which the tests make. In float32 a
token may differ only where the two likeliest on `cpu` are close, and from there on nothing is
compared. Requests must have the same tokens alone and together.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from bench.gpu_smoke_checks import Check, Checks, Device
from cupaged import LLM, SamplingParams
from cupaged.outputs import CompletionOutput
from tests.tiny_models import TINY, write_hf_folder

__all__ = ["model"]

PROMPTS = (
    "The capital of France is",
    "Write a haiku about pages of memory.",
    "def fibonacci(n):\n",
    "Once upon a time there was a block table that",
)
CLOSE = 1e-3  # between log probabilities of tokens that rounding may swap
TOLERANCE = 1e-3  # of a log probability, the sum of what 49152 logits are off


def model(device: Device) -> Checks:
    """On `cpu`, then on the device in its types."""
    device.runtime.memory_info()  # gives back what other sections left in the pool
    with tempfile.TemporaryDirectory() as folder:
        path = str(write_hf_folder(Path(folder), TINY)) if device.dry_run else None
        prompts: list[Any] = [
            {"prompt_token_ids": list(range(3, 9 + i))} if device.dry_run else text
            for i, text in enumerate(PROMPTS[: 2 if device.dry_run else 4])
        ]
        expected = _generate(path, "cpu", "float32", prompts, device.dry_run)[0]
        for dtype in ("float32",) if device.dry_run else ("float32", "bfloat16"):
            together, alone, seconds = _generate(path, device.name, dtype, prompts, device.dry_run)
            yield _compare(expected, together, dtype)
            differ = sum(a.token_ids != t.token_ids for a, t in zip(alone, together, strict=True))
            said = f"{len(alone)} requests, {differ} differ"
            yield Check(f"alone and together, {dtype}", said, not differ, {"differ": differ})
            count = sum(len(output.token_ids) for output in together)
            said = f"{count / seconds:.1f} tokens/s of {len(together)} requests"
            yield Check(f"generation, {dtype}", said, None, {"tokens_per_s": count / seconds})


Outputs = list[CompletionOutput]


def _generate(
    path: str | None, device: str, dtype: str, prompts: list[Any], dry_run: bool
) -> tuple[Outputs, Outputs, float]:
    """Outputs of all prompts at once, of each alone (not on `cpu`), seconds for those at once."""
    params = SamplingParams(
        temperature=0.0, max_tokens=4 if dry_run else 32, ignore_eos=True, logprobs=2
    )
    llm = LLM(
        path, device=device, dtype=dtype, max_model_len=64 if dry_run else 256, max_num_seqs=4,
        max_num_batched_tokens=16 if dry_run else 128, num_gpu_blocks_override=64,
    )  # fmt: skip

    def run(given: list[Any]) -> Outputs:
        return [o.outputs[0] for o in llm.generate(given, params, use_tqdm=False)]

    if device == "cpu":
        return run(prompts), [], 0.0
    alone = [run([prompt])[0] for prompt in prompts]
    start = time.perf_counter()
    together = run(prompts)
    return together, alone, time.perf_counter() - start


def _compare(expected: Outputs, got: Outputs, dtype: str) -> Check:
    """Up to the first token that differs. bfloat16 is only measured."""
    equal = total = 0
    error = 0.0
    unexplained = []
    for i, (wanted, output) in enumerate(zip(expected, got, strict=True)):
        total += len(wanted.token_ids)
        for position, (a, b) in enumerate(zip(wanted.token_ids, output.token_ids, strict=True)):
            if a != b:
                assert wanted.logprobs is not None
                first, second = sorted(
                    (told.logprob for told in wanted.logprobs[position].values()), reverse=True
                )[:2]
                if first - second > CLOSE:
                    unexplained.append(f"request {i} at {position}: {first - second:.3f} apart")
                break
            equal += 1
            assert wanted.logprobs is not None and output.logprobs is not None
            logprobs = wanted.logprobs[position][a].logprob, output.logprobs[position][a].logprob
            error = max(error, abs(logprobs[0] - logprobs[1]))
    said = f"{equal} of {total} tokens as on cpu, log probabilities off by {error:.1e}"
    passed = None
    if dtype == "float32":
        passed = not unexplained and error <= TOLERANCE
        said = "; ".join([said, *unexplained])
    return Check(f"tokens, {dtype}", said, passed, {"equal": equal, "of": total, "error": error})
