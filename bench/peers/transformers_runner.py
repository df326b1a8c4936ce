"""transformers as a runner: `generate` with static batches, or its continuous batching.

A static batch takes requests in order of arrival, padded on the left, and ends with its longest
output; what a shorter one gets beyond its length is thrown away.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))

from bench.peers.runner import Options, Requests, serve

os.environ["HF_HUB_OFFLINE"] = "1"
START = time.perf_counter()

import torch  # noqa: E402
import transformers  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
)

IMPORT_S = time.perf_counter() - START
PAGE_TOKENS = 32
MAX_BATCH_TOKENS = 512
RESULT_SECONDS = 600  # a step takes a second or so


class Times:
    """A streamer that notes when each token came. `generate` shows it the prompt first."""

    def __init__(self) -> None:
        self._num_puts = 0
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        """A token, or the prompt."""
        if self._num_puts:
            self.times.append(time.perf_counter())
        self._num_puts += 1

    def end(self) -> None:
        """Nothing is left to do."""


class Transformers:
    """A model on torch."""

    def __init__(self, options: Options) -> None:
        torch.set_num_threads(options.threads)
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            options.model, dtype=getattr(torch, options.weights)
        ).eval()
        # No token ends an output.
        self._model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
        self._options = options

    def versions(self) -> dict[str, str]:
        """And which attention it chose."""
        return {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "attention": str(self._model.config._attn_implementation),
        }

    def generate(self, requests: Requests) -> list[list[int]]:
        """All at once, in the way that was asked for."""
        if self._options.way == "continuous":
            return self._continuous(requests)
        size = self._options.max_num_seqs
        groups = [requests[i : i + size] for i in range(0, len(requests), size)]
        return [output for group in groups for output in self._static(group)]

    def stream(self, prompt: list[int], num_tokens: int) -> tuple[list[int], list[float]]:
        """One request, by `generate`."""
        times = Times()
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            output = self._model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, streamer=times
            )
        return output[0, len(prompt) :].tolist(), times.times

    def _static(self, requests: Requests) -> list[list[int]]:
        longest = max(len(prompt) for prompt, _ in requests)
        ids = torch.zeros((len(requests), longest), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, (prompt, _) in enumerate(requests):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        most = max(num_tokens for _, num_tokens in requests)
        with torch.inference_mode():
            output = self._model.generate(ids, attention_mask=mask, max_new_tokens=most)
        return [
            output[row, longest : longest + num_tokens].tolist()
            for row, (_, num_tokens) in enumerate(requests)
        ]

    def _continuous(self, requests: Requests) -> list[list[int]]:
        pages = -(-self._options.max_model_len // PAGE_TOKENS) * self._options.max_num_seqs
        config = ContinuousBatchingConfig(
            page_size=PAGE_TOKENS, num_blocks=pages, max_batch_tokens=MAX_BATCH_TOKENS,
            max_requests_per_batch=self._options.max_num_seqs, allow_block_sharing=False,
        )  # fmt: skip
        outputs: dict[str, list[int]] = {}
        with self._model.continuous_batching_context_manager(
            continuous_batching_config=config, block=True, timeout=5
        ) as engine:
            for i, (prompt, num_tokens) in enumerate(requests):
                engine.add_request(
                    prompt, request_id=str(i), max_new_tokens=num_tokens, eos_token_id=-1
                )
            while len(outputs) < len(requests):
                result = engine.get_result(timeout=RESULT_SECONDS)
                if result is None or result.error is not None:
                    raise RuntimeError(f"continuous batching failed: {result and result.error}")
                if result.is_finished():
                    outputs[result.request_id] = list(result.generated_tokens)
        return [outputs[str(i)] for i in range(len(requests))]


if __name__ == "__main__":
    serve(Transformers, IMPORT_S)
