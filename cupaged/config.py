"""Configurations: frozen, checked once in their constructors, never changed.

`ModelConfig` is the one place where a Hugging Face `config.json` is read (a GGUF's metadata is
brought into that form first); `EngineConfig` holds the limits the engine core works under.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cupaged.errors import ConfigError, ModelError, NotSupportedError
from cupaged.json_values import flag, integer, number
from cupaged.rope import RopeConfig

DEVICE_BLOCK_SIZES = (8, 16, 32, 64, 128)  # what kernels take
PREFIX_CACHES = ("radix", "hash")
BLOCK_SIZES = (1, 2, 4, *DEVICE_BLOCK_SIZES)

# What transformers assumes where the config.json of a family leaves out a key. Only the families
# that are named here with a window have one; the others ignore the key.
_FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "MistralForCausalLM": {"num_key_value_heads": 8, "sliding_window": 4096},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder-only model.

    Attributes:
        architecture: class name as in `config.json`, e.g. "LlamaForCausalLM".
        head_dim: elements of one head; num_heads * head_dim need not be hidden_size.
        max_position_embeddings: as config.json has it; `max_context` is what can be served.
        sliding_window: each token sees itself and that many less one before it; None for all.
        tie_word_embeddings: the output head is the embedding matrix.
        attention_bias, mlp_bias: the linear layers there have biases.
        eos_token_ids: ids that end a text, as config.json names them.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    sliding_window: int | None = None
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    eos_token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        for name, key in (
            ("vocab_size", "vocab_size"),
            ("hidden_size", "hidden_size"),
            ("intermediate_size", "intermediate_size"),
            ("num_layers", "num_hidden_layers"),
            ("num_heads", "num_attention_heads"),
            ("num_kv_heads", "num_key_value_heads"),
            ("head_dim", "head_dim"),
            ("max_position_embeddings", "max_position_embeddings"),
        ):
            integer(f"config.json: {key}", getattr(self, name))
        if self.sliding_window is not None:
            integer("config.json: sliding_window", self.sliding_window)
        if not 0 < self.rms_norm_eps < math.inf:
            raise ConfigError("config.json: rms_norm_eps", self.rms_norm_eps, "a finite number > 0")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                "config.json: num_key_value_heads",
                self.num_kv_heads,
                f"a divisor of num_attention_heads={self.num_heads}",
            )
        if self.head_dim % 2:
            raise ConfigError("config.json: head_dim", self.head_dim, "even (RoPE turns pairs)")
        count = len(self.rope.frequency_factors)
        if count not in (0, self.head_dim // 2):
            raise ConfigError(
                "RoPE frequency factors", count, f"head_dim / 2 = {self.head_dim // 2}"
            )

    @property
    def max_context(self) -> int:
        """Most tokens of a sequence: what the RoPE reaches, and no more than the window, since
        attention is not windowed."""
        limit = self.rope.max_context(self.max_position_embeddings)
        return min(limit, self.sliding_window or limit)

    @property
    def default_context(self) -> int:
        """Tokens of a sequence when nothing is asked for: `max_context`, but for a "dynamic" RoPE
        the context up to which it leaves all as it was trained."""
        if self.rope.rope_type == "dynamic":
            return min(self.max_context, self.max_position_embeddings)
        return self.max_context

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        """Read a `config.json`, in the spelling of transformers v4 or v5.

        Raises:
            ModelError: a key that is needed is missing.
            ConfigError: a value is out of range.
            NotSupportedError: the model needs something this version does not build.
        """
        architectures = hf.get("architectures")
        names = architectures if isinstance(architectures, list) else []
        if len(names) != 1 or not isinstance(names[0], str):
            raise ConfigError("config.json: architectures", architectures, "a list of one name")
        defaults = _FAMILY_DEFAULTS.get(names[0], {})
        hf = {**defaults, **hf}
        hidden_act = hf.get("hidden_act", "silu")
        if hidden_act not in ("silu", "swish"):
            raise NotSupportedError(f"hidden_act={hidden_act!r} is not supported; only 'silu' is")
        quantization = hf.get("quantization_config")
        if quantization:
            if not isinstance(quantization, Mapping):
                raise ConfigError("config.json: quantization_config", quantization, "an object")
            method = quantization.get("quant_method", "unknown")
            raise NotSupportedError(f"quantized checkpoints ({method}) are not supported")
        num_heads = _needed(hf, "num_attention_heads")
        hidden_size = _needed(hf, "hidden_size")
        head_dim = hf.get("head_dim")
        if head_dim is None:
            integer("config.json: num_attention_heads", num_heads)
            integer("config.json: hidden_size", hidden_size)
            if hidden_size % num_heads:
                raise ConfigError(
                    "config.json: hidden_size",
                    hidden_size,
                    f"a multiple of num_attention_heads={num_heads} when head_dim is not given",
                )
            head_dim = hidden_size // num_heads
        max_positions = _needed(hf, "max_position_embeddings")
        integer("config.json: max_position_embeddings", max_positions)
        return cls(
            architecture=names[0],
            vocab_size=_needed(hf, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_needed(hf, "intermediate_size"),
            num_layers=_needed(hf, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=_or(hf.get("num_key_value_heads"), num_heads),
            head_dim=head_dim,
            rms_norm_eps=number("config.json: rms_norm_eps", hf.get("rms_norm_eps", 1e-6)),
            rope=RopeConfig.from_hf(hf, max_positions),
            max_position_embeddings=max_positions,
            sliding_window=hf.get("sliding_window") if "sliding_window" in defaults else None,
            tie_word_embeddings=_flag(hf, "tie_word_embeddings"),
            attention_bias=_flag(hf, "attention_bias"),
            mlp_bias=_flag(hf, "mlp_bias"),
            eos_token_ids=token_id_tuple("config.json: eos_token_id", hf.get("eos_token_id")),
        )


def token_id_tuple(name: str, value: object) -> tuple[int, ...]:
    """None, one id or a list of ids, as a tuple; ConfigError for anything else."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise ConfigError(name, value, "a token id >= 0 or a list of them")
    return tuple(ids)


def _needed(hf: Mapping[str, Any], key: str) -> Any:
    if hf.get(key) is None:
        raise ModelError(f"config.json has no {key!r}, which the model needs")
    return hf[key]


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _flag(hf: Mapping[str, Any], key: str) -> bool:
    return flag(f"config.json: {key}", _or(hf.get(key), False))


def check_prefix_cache(name: object) -> None:
    """ConfigError for what is not in `PREFIX_CACHES`."""
    if name not in PREFIX_CACHES:
        raise ConfigError("prefix_cache", name, f"one of {', '.join(map(repr, PREFIX_CACHES))}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Limits of the engine core.

    Args:
        vocab_size: token ids are in [0, vocab_size).
        num_blocks: KV blocks in the pool.
        block_size: tokens a block holds: a power of two up to 128.
        max_model_len: most tokens of a sequence, prompt and output together.
        max_num_seqs: most sequences that run at the same time.
        max_num_batched_tokens: most tokens that a step computes.
        watermark: share of the pool that admitting a sequence leaves free while others run, so
            that these can grow without preempting it at once.
        long_prefill_token_threshold: most tokens of one sequence in a step, so that a long prompt
            leaves room for others; 0 for no such limit.
        max_num_queued_reqs, max_num_queued_tokens: most requests that wait, and prompt tokens of
            requests that wait; None for no limit. Preempted sequences do not count.
        max_logprobs: most logprobs a request may ask for, per token.
        max_steps_in_flight: steps submitted before the first of them is collected.
        enable_prefix_caching: requests begin with blocks that others have computed, where their
            tokens are equal from the first on.
        kv_sanitizer: every step is checked for memory errors of the KV pool, at a cost.
        num_host_blocks: KV blocks in the memory of the host, for sequences that are swapped out and
            for what the prefix cache evicts.
        prefix_cache: how these blocks are found: "radix", a radix tree, or "hash", a flat table of
            chained hashes.
    """

    vocab_size: int
    num_blocks: int
    block_size: int = 16
    max_model_len: int
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    watermark: float = 0.01
    long_prefill_token_threshold: int = 0
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    max_logprobs: int = 20
    max_steps_in_flight: int = 1
    enable_prefix_caching: bool = True
    kv_sanitizer: bool = False
    num_host_blocks: int = 0
    prefix_cache: str = "radix"

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "num_blocks",
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_steps_in_flight",
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
                raise ConfigError(name, value, "an integer in [1, 2^31)")
        if type(self.block_size) is not int or self.block_size not in BLOCK_SIZES:
            raise ConfigError("block_size", self.block_size, f"one of {BLOCK_SIZES}")
        number = isinstance(self.watermark, int | float) and not isinstance(self.watermark, bool)
        if not number or not 0 <= self.watermark < 1:
            raise ConfigError("watermark", self.watermark, "a number in [0, 1)")
        flag("enable_prefix_caching", self.enable_prefix_caching)
        flag("kv_sanitizer", self.kv_sanitizer)
        check_prefix_cache(self.prefix_cache)
        for name in (
            "long_prefill_token_threshold",
            "max_num_queued_reqs",
            "max_num_queued_tokens",
            "max_logprobs",
            "num_host_blocks",
        ):
            value = getattr(self, name)
            if value is None and name.startswith("max_num_queued"):
                continue
            low = 1 if name.startswith("max_num_queued") else 0
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value < 2**31:
                raise ConfigError(name, value, f"an integer in [{low}, 2^31)")

    @property
    def max_chunk(self) -> int:
        """Most tokens of one sequence in a step."""
        return self.long_prefill_token_threshold or self.max_num_batched_tokens

    @property
    def max_blocks_per_seq(self) -> int:
        """Blocks that the longest sequence fills."""
        return -(-min(self.max_model_len, self.num_blocks * self.block_size) // self.block_size)

    @property
    def max_logits(self) -> int:
        """Most rows of logits that one step needs."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    @property
    def watermark_blocks(self) -> int:
        """Blocks kept free when a sequence is admitted beside others."""
        return math.ceil(self.watermark * self.num_blocks)
