"""`cupaged bench latency` and `throughput`: the engine in this process, without a server."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cupaged.benchmarks.datasets import DatasetOptions, ModelFacts, Sample, samples_of
from cupaged.errors import ConfigError
from cupaged.sampling_params import SamplingParams

if TYPE_CHECKING:
    from cupaged.llm import LLM

__all__ = ["Latency", "facts_of", "latency_lines", "throughput", "throughput_lines"]

PERCENTILES = (10, 25, 50, 75, 90, 99)


@dataclass(frozen=True, slots=True)
class Latency:
    """How long a batch of equal requests takes, from its start to its last token.

    Args:
        input_len, output_len: tokens of each request.
        batch_size: requests that are there at once.
        n: samples of each.
        num_iters_warmup, num_iters: runs before the clock counts, and runs that count.
        detokenize: whether texts are made.
    """

    input_len: int = 32
    output_len: int = 128
    batch_size: int = 8
    n: int = 1
    num_iters_warmup: int = 10
    num_iters: int = 30
    detokenize: bool = True

    def __post_init__(self) -> None:
        for name in ("input_len", "output_len", "batch_size", "n", "num_iters"):
            if getattr(self, name) < 1:
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(flag, getattr(self, name), ">= 1")
        if self.num_iters_warmup < 0:
            raise ConfigError("--num-iters-warmup", self.num_iters_warmup, ">= 0")

    def run(self, llm: LLM, on_done: Callable[[], object] = lambda: None) -> dict[str, Any]:
        """Measure; the numbers by vLLM's keys, in seconds.

        on_done: called after each run.
        """
        vocab_size = llm.engine.core.config.vocab_size
        rng = np.random.default_rng(0)
        ids = rng.integers(0, min(10000, vocab_size), (self.batch_size, self.input_len))
        prompts = [{"prompt_token_ids": row} for row in ids.tolist()]
        params = _params(self.output_len, self.n, self.detokenize)
        latencies = []
        for i in range(self.num_iters_warmup + self.num_iters):
            start = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            if i >= self.num_iters_warmup:
                latencies.append(time.perf_counter() - start)
            on_done()
        percentiles = np.percentile(latencies, PERCENTILES).tolist()
        return {
            "avg_latency": float(np.mean(latencies)),
            "std_latency": float(np.std(latencies)),
            "latencies": latencies,
            "percentiles": {str(p): v for p, v in zip(PERCENTILES, percentiles, strict=True)},
        }


def latency_lines(result: dict[str, Any]) -> list[str]:
    """As `vllm bench latency` prints them."""
    return [
        f"Avg latency: {result['avg_latency']} seconds",
        f"Std latency: {result['std_latency']} seconds",
        *(f"{p}% percentile latency: {v} seconds" for p, v in result["percentiles"].items()),
    ]


def throughput(
    llm: LLM,
    dataset: DatasetOptions,
    *,
    name: str = "the model",
    n: int = 1,
    detokenize: bool = True,
    use_tqdm: bool = True,
) -> dict[str, Any]:
    """Answer all requests of a dataset, handed over at once; the numbers by vLLM's keys.

    Tokens are counted in the answers, which go on after the end of a text.

    Args:
        name: of the model, for errors.
        n: samples of each request.
        detokenize: whether texts are made.
        use_tqdm: show a progress bar where standard error is a terminal.

    Raises:
        CupagedError: the dataset cannot be read, or a request can never fit.
    """
    if n < 1:
        raise ConfigError("--n", n, ">= 1")
    samples = samples_of(dataset, facts_of(llm, name), lambda texts: _counted(llm, texts))
    prompts = [_prompt(llm, sample) for sample in samples]
    params = [_params(sample.max_tokens, n, detokenize) for sample in samples]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=use_tqdm)
    seconds = time.perf_counter() - start
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(each.token_ids) for output in outputs for each in output.outputs)
    return {
        "elapsed_time": seconds,
        "num_requests": len(outputs),
        "total_num_tokens": num_prompt + num_output,
        "requests_per_second": len(outputs) / seconds,
        "tokens_per_second": (num_prompt + num_output) / seconds,
        "total_prompt_tokens": num_prompt,
        "total_output_tokens": num_output,
        "output_tokens_per_second": num_output / seconds,
    }


def throughput_lines(result: dict[str, Any]) -> list[str]:
    """As `vllm bench throughput` prints them."""
    return [
        f"Throughput: {result['requests_per_second']:.2f} requests/s, "
        f"{result['tokens_per_second']:.2f} total tokens/s, "
        f"{result['output_tokens_per_second']:.2f} output tokens/s",
        f"Total num prompt tokens:  {result['total_prompt_tokens']}",
        f"Total num output tokens:  {result['total_output_tokens']}",
    ]


def facts_of(llm: LLM, name: str) -> ModelFacts:
    """What requests have to know of a model."""
    config, tokenizer = llm.engine.core.config, llm.engine.tokenizer
    return ModelFacts(
        name=name,
        vocab_size=config.vocab_size,
        max_model_len=config.max_model_len,
        special_token_ids=tuple(sorted(tokenizer.special_ids)),
        has_chat_template=tokenizer.chat_template is not None,
    )


def _counted(llm: LLM, texts: Sequence[str]) -> list[int]:
    return [len(llm.engine.tokenizer.encode(text)) for text in texts]


def _prompt(llm: LLM, sample: Sample) -> Any:
    if sample.is_chat:
        return llm.render_chat([{"role": "user", "content": str(sample.prompt)}])
    return sample.prompt if isinstance(sample.prompt, str) else list(sample.prompt)


def _params(max_tokens: int, n: int, detokenize: bool) -> SamplingParams:
    return SamplingParams(
        n=n, temperature=1.0, ignore_eos=True, max_tokens=max_tokens, detokenize=detokenize
    )
