"""Engine options as people give them, and the engine built from them.

The one place where the parts meet: files, device, KV pool, core and text shell. Everything that can
be refused is refused before weights are read or the pool is taken.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from cupaged.config import DEVICE_BLOCK_SIZES, EngineConfig, ModelConfig, check_prefix_cache
from cupaged.devices import (
    CPU_KERNELS,
    CPU_WEIGHT_DTYPES,
    MIB,
    Device,
    DeviceOptions,
    check_device,
    open_device,
)
from cupaged.engine.core import EngineCore
from cupaged.engine.device_memory import WEIGHT_OPTIONS, naming
from cupaged.engine.engine import Engine
from cupaged.engine.preemption import PreemptionCosts, check_preemption_mode, make_strategy
from cupaged.engine.runner import ModelRunner, Runner
from cupaged.engine.scheduling_policy import make_policy
from cupaged.engine.trace_file import TraceHeader, TraceWriter, check_trace_path
from cupaged.engine.traced_core import TracedCore
from cupaged.errors import CapacityError, ConfigError, NotSupportedError
from cupaged.estimate import (
    GPU_MEMORY_UTILIZATION,
    Limits,
    Shape,
    check_dtype,
    workspace_bytes,
)
from cupaged.json_values import flag
from cupaged.loading.model_files import ModelFiles, load_model, open_model
from cupaged.loading.weights import check_all_kept, weight_bytes
from cupaged.resources import kv_blocks_for, read_resources

_logger = logging.getLogger(__name__)

GENERATION_CONFIGS: dict[str, Callable[[ModelFiles], dict[str, float | int]]] = {
    "auto": lambda files: files.generation_defaults,
    "vllm": lambda files: {},
}
NOT_BUILT = frozenset(
    {
        "served_model_name", "revision", "kv_cache_dtype", "quantization", "load_format",
        "enforce_eager",
        "enable_chunked_prefill", "stream_interval", "speculative_config",
        "tensor_parallel_size", "disable_log_stats",
    }
)  # fmt: skip

_MAX_GIB = 2**20
_MAX_EMPTY_BLOCKS = 2**18  # of a pool that takes no memory


@dataclass(frozen=True, slots=True)
class BuiltCore:
    """An engine core and what it was made of; `device` is None when nothing is computed."""

    core: EngineCore
    files: ModelFiles
    device: Device | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArgs:
    """Options of an engine.

    Args:
        model: a folder with config.json and safetensors, or a .gguf file; None for the installed
            SmolLM2-135M-Instruct.
        tokenizer: a folder whose tokenizer replaces the model's own.
        device: "cpu"; "cuda", a GPU; "emulated", a GPU's kernels under checks on the processor; or
            "auto", a GPU where there is one, else the processor.
        dtype: "float32", "float16" or "bfloat16"; or "auto": float32 on `cpu`, else the model's own
            type of 16 bits.
        seed: draws the seeds of requests that bring none.
        max_model_len: most tokens of a sequence; by default the model's own limit, and no more
            than its attention window.
        block_size: tokens of a KV block: 8, 16, 32, 64 or 128.
        num_gpu_blocks_override: KV blocks in the pool, whatever the memory (on any device).
        kv_cache_memory_bytes: bytes of the KV pool; by default what max_num_seqs sequences of
            max_model_len tokens need, at most 40 % of the free memory (all of a GPU's).
        gpu_memory_utilization: share of a GPU's memory that the engine may take.
        max_num_seqs: most sequences that run at the same time.
        max_num_batched_tokens: most tokens that one step computes.
        watermark: share of the pool that admitting a sequence leaves free while others run.
        scheduling_policy: "fcfs"; "priority" (lower first, with bounded waiting); or
            "longest-prefix" (what finds most in the prefix cache first, with bounded waiting).
        enable_prefix_caching: requests begin with KV blocks that others have computed.
        swap_space: GiB of the host's memory for the KV blocks of sequences that were preempted,
            and for those that the prefix cache evicts; 0 for none, so that both are computed again.
        preemption_mode: "swap" where the host has room, "recompute", or "auto": what costs less by
            a short measurement at start.
        prefix_cache: how these are found: "radix", a radix tree, or "hash", a table of hashes.
        long_prefill_token_threshold: most tokens of one sequence in a step; 0 for no such limit.
        max_num_queued_reqs, max_num_queued_tokens: most requests that wait, and prompt tokens of
            requests that wait; None for no limit.
        max_logprobs: most logprobs a request may ask for, per token.
        threads: threads that compute on `cpu`, for the whole process; by default what
            OPENBLAS_NUM_THREADS or OMP_NUM_THREADS says, or the cores of the container; with NumPy
            the number of these that a short trial finds fastest.
        cpu_kernels: what computes on `cpu`: "native", the kernels built with cupaged; "numpy"; or
            "auto", native where they were built.
        cpu_weight_dtype: how the native kernels keep weights in memory: "float32"; "bfloat16" or
            "q8" (8 bits and a scale for each 32), rounded; "file", as the checkpoint has them
            (BF16, Q8_0, Q4_0, Q4_1), with float32's results but for roundings; "auto", likewise,
            and float32 for all other types.
        generation_config: where parameters come from that a request does not set: "auto", the
            model's generation_config.json; "vllm", the defaults of `SamplingParams`.
        trace: file that every step is recorded in, with all prompts and answers; None for none.
        kv_sanitizer: check every step for memory errors of the KV pool, at a cost in time.
    """

    model: str | Path | None = None
    tokenizer: str | Path | None = None
    device: str = "auto"
    dtype: str = "auto"
    seed: int = 0
    max_model_len: int | None = None
    block_size: int = 16
    num_gpu_blocks_override: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = GPU_MEMORY_UTILIZATION
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    watermark: float = 0.01
    scheduling_policy: str = "fcfs"
    enable_prefix_caching: bool = True
    swap_space: float = 0
    preemption_mode: str = "auto"
    prefix_cache: str = "radix"
    long_prefill_token_threshold: int = 0
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    max_logprobs: int = 20
    threads: int | None = None
    cpu_kernels: str = "auto"
    cpu_weight_dtype: str = "auto"
    generation_config: str = "auto"
    trace: str | Path | None = None
    kv_sanitizer: bool = False

    def __post_init__(self) -> None:
        check_device(self.device)
        check_dtype(self.dtype)
        share = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise ConfigError("gpu_memory_utilization", share, "a number > 0 and <= 1")
        make_policy(self.scheduling_policy)  # refuses an unknown one
        space = self.swap_space
        is_number = isinstance(space, int | float) and not isinstance(space, bool)
        if not is_number or not 0 <= space <= _MAX_GIB:
            raise ConfigError("swap_space", space, "a number of GiB >= 0")
        check_preemption_mode(self.preemption_mode, has_swap_space=space > 0)
        flag("enable_prefix_caching", self.enable_prefix_caching)
        check_prefix_cache(self.prefix_cache)
        if not isinstance(self.trace, str | Path | None):
            raise ConfigError("trace", self.trace, "the name of a file")
        flag("kv_sanitizer", self.kv_sanitizer)
        for name, values in (
            ("cpu_kernels", CPU_KERNELS), ("cpu_weight_dtype", CPU_WEIGHT_DTYPES)
        ):  # fmt: skip
            if getattr(self, name) not in values:
                allowed = f"one of {', '.join(values)}"
                raise ConfigError(name, getattr(self, name), allowed)
        if self.generation_config not in GENERATION_CONFIGS:
            raise ConfigError("generation_config", self.generation_config, "'auto' or 'vllm'")
        if self.block_size not in DEVICE_BLOCK_SIZES:
            raise ConfigError("block_size", self.block_size, f"one of {DEVICE_BLOCK_SIZES}")
        for name, low in (
            ("seed", 0),
            ("max_model_len", 2),
            ("num_gpu_blocks_override", 1),
            ("kv_cache_memory_bytes", 1),
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 1),
            ("threads", 1),
        ):
            value = getattr(self, name)
            if value is None and name.startswith(("max_model", "num_gpu", "kv_", "threads")):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ConfigError(name, value, f"an integer >= {low}")

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> EngineArgs:
        """Check the names, too: those known to the field but not built, and misspelt ones.

        Raises:
            NotSupportedError: an option that vLLM has and this version does not.
            ConfigError: an unknown option; the nearest known one is named.
        """
        known = [field.name for field in fields(cls)]
        for name, value in options.items():
            if name in NOT_BUILT:
                raise NotSupportedError(f"{name}={value!r} is not supported in this version")
            if name not in known:
                nearest = difflib.get_close_matches(name, known, 1)
                hint = f"one of {', '.join(known)}" if not nearest else f"perhaps {nearest[0]!r}"
                raise ConfigError("engine option", name, hint)
        return cls(**options)

    def build(self) -> Engine:
        """The engine with its text shell, in this process."""
        built = self.build_core()
        return Engine(
            built.core,
            built.files.tokenizer,
            eos_token_ids=built.files.eos_token_ids,
            generation_defaults=self.generation_defaults(built.files),
            seed=self.seed,
        )

    def generation_defaults(self, files: ModelFiles) -> dict[str, float | int]:
        """Fields of `SamplingParams` for requests that leave them out."""
        return GENERATION_CONFIGS[self.generation_config](files)

    def build_core(self) -> BuiltCore:
        """Open the model, size the pool, read the weights, start the core."""
        self._check_trace()
        files = open_model(self.model, tokenizer=self.tokenizer)
        resources = read_resources()
        device = open_device(
            self.device,
            DeviceOptions(
                dtype=self.dtype,
                stored_dtype=files.stored_dtype,
                threads=self.threads,
                gpu_memory_utilization=self.gpu_memory_utilization,
                resources=resources,
                kv_sanitizer=self.kv_sanitizer,
                cpu_kernels=self.cpu_kernels,
                cpu_weight_dtype=self.cpu_weight_dtype,
            ),
        )
        if device.name == "cpu" and self.cpu_weight_dtype == "file":
            check_all_kept(files.entries, files.reader, files.form, device.ops)
        specs = files.model_class.kv_cache_specs(files.config, self.block_size, device.dtype)
        device.check_attention(files.config.num_heads, specs)
        weights = weight_bytes(files.entries, files.reader, files.form, device.ops)
        available = device.available_bytes
        if weights > available:
            raise CapacityError(
                "model weights in bytes", weights, f"at most {available} (free memory)"
            )
        available -= weights
        length = self._max_model_len(files.config)
        bytes_per_block = sum(spec.bytes_per_block for spec in specs)
        on_host = resources.available_bytes - (weights if device.shares_memory else 0)
        num_host_blocks = self._num_host_blocks(bytes_per_block, on_host)
        if device.shares_memory:
            available -= num_host_blocks * bytes_per_block
        workspace = self._workspace_bytes(files, length, device, num_host_blocks)
        if workspace > available:
            raise CapacityError(
                "workspace in bytes",
                workspace,
                f"at most {available} (free memory without the weights): lower "
                f"max_num_batched_tokens={self.max_num_batched_tokens}, "
                f"max_num_seqs={self.max_num_seqs} or max_logprobs={self.max_logprobs}",
            )
        config = self._engine_config(
            files, length, bytes_per_block, available - workspace, device.shares_memory
        )
        config = replace(config, num_host_blocks=num_host_blocks)
        with naming("the weights", WEIGHT_OPTIONS):
            model = load_model(files, device.ops, max_model_len=config.max_model_len)
        runner = ModelRunner(model, specs, device.ops, config)
        if device.warms_up:
            _logger.info("warm-up: %d steps have loaded every kernel", runner.warm_up())
        measured = num_host_blocks and self.preemption_mode == "auto"
        core = self._core(config, runner, runner.measure_costs() if measured else None)
        for line in _start_lines(files, config, device, weights, bytes_per_block, workspace):
            _logger.info("%s", line)
        return BuiltCore(core, files, device)

    def build_core_without_weights(
        self, make_runner: Callable[[ModelFiles, EngineConfig], Runner]
    ) -> BuiltCore:
        """A core whose runner needs no model, to measure all else; the files are only opened."""
        self._check_trace()
        files = open_model(self.model, tokenizer=self.tokenizer)
        length = self._max_model_len(files.config)
        num_blocks = self.num_gpu_blocks_override
        if num_blocks is None:
            num_blocks = min(self.max_num_seqs * -(-length // self.block_size), _MAX_EMPTY_BLOCKS)
        config = self._limits(files, length, num_blocks)
        return BuiltCore(self._core(config, make_runner(files, config)), files, None)

    def _check_trace(self) -> None:
        """Refuse a file that cannot be written before anything is loaded."""
        if self.trace is not None:
            check_trace_path(self.trace)

    def _core(
        self, config: EngineConfig, runner: Runner, costs: PreemptionCosts | None = None
    ) -> EngineCore:
        """The core, which records what happens to it if that is wanted.

        Args:
            costs: by which it swaps; None for swapping whatever the host has room for.
        """
        policy, preemption = make_policy(self.scheduling_policy), make_strategy(config, costs)
        if self.trace is None:
            return EngineCore(config, runner, policy=policy, preemption=preemption)
        writer = TraceWriter(self.trace, TraceHeader(config, self.scheduling_policy, costs))
        return TracedCore(config, runner, writer, policy=policy, preemption=preemption)

    def _num_host_blocks(self, bytes_per_block: int, available: int) -> int:
        """Blocks that `swap_space` holds; none if nothing is ever swapped.

        Raises:
            CapacityError: more than the free memory of the host, or not a single one.
        """
        if self.preemption_mode == "recompute":
            return 0
        swap_bytes = int(self.swap_space * 2**30)
        if swap_bytes > available:
            allowed = f"at most {max(0, available) / 2**30:.2f} GiB (free memory of the host)"
            raise CapacityError("swap_space", self.swap_space, allowed)
        if 0 < swap_bytes < bytes_per_block:
            least = f"{bytes_per_block / 2**30:.3g} GiB (one KV block, {bytes_per_block} bytes)"
            allowed = f"0, or at least {least}"
            raise CapacityError("swap_space", self.swap_space, allowed)
        return swap_bytes // bytes_per_block

    def _workspace_bytes(
        self, files: ModelFiles, length: int, device: Device, num_host_blocks: int = 0
    ) -> int:
        """Memory of the largest step, and of the table of RoPE."""
        limits = Limits(
            max_model_len=length,
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_logprobs=self.max_logprobs,
            num_host_blocks=num_host_blocks,
        )
        shape = Shape.of(files.model_class, files.config)
        return workspace_bytes(shape, limits, device.element_bytes, device.ops.buffer_bytes)

    def _max_model_len(self, model: ModelConfig) -> int:
        """Most tokens of a sequence: what was asked for, if the model can serve it."""
        window, limit = model.sliding_window, model.max_context
        reach = model.rope.max_context(model.max_position_embeddings)
        if self.max_model_len is None:
            if limit < reach:
                text = "max_model_len is %d of %d tokens: no more than the attention window"
                _logger.warning(text, limit, reach)
            return model.default_context
        if window is not None and self.max_model_len > window:
            raise NotSupportedError(
                f"max_model_len={self.max_model_len} is not supported: the model attends to a "
                f"window of {window} tokens, and longer sequences than the window are not built"
            )
        if self.max_model_len > limit:
            allowed = f"at most the model's own limit, {limit}"
            raise ConfigError("max_model_len", self.max_model_len, allowed)
        return self.max_model_len

    def _engine_config(
        self,
        files: ModelFiles,
        length: int,
        bytes_per_block: int,
        available: int,
        shares_memory: bool,
    ) -> EngineConfig:
        num_blocks = self.num_gpu_blocks_override
        pool_bytes = self.kv_cache_memory_bytes
        if pool_bytes is None and not shares_memory:
            pool_bytes = available
        if num_blocks is None:
            num_blocks = kv_blocks_for(
                bytes_per_block=bytes_per_block,
                block_size=self.block_size,
                max_model_len=length,
                max_num_seqs=self.max_num_seqs,
                available_bytes=available,
                pool_bytes=pool_bytes,
            )
            if num_blocks * bytes_per_block > available:
                raise CapacityError(
                    "kv_cache_memory_bytes",
                    self.kv_cache_memory_bytes,
                    f"at most {available} (free memory without the weights)",
                )
        elif num_blocks * bytes_per_block > available:
            raise CapacityError(
                "num_gpu_blocks_override",
                num_blocks,
                f"at most {available // bytes_per_block} ({available / 2**20:.0f} MiB are free)",
            )
        return self._limits(files, length, num_blocks)

    def _limits(self, files: ModelFiles, length: int, num_blocks: int) -> EngineConfig:
        return EngineConfig(
            vocab_size=files.config.vocab_size,
            num_blocks=num_blocks,
            block_size=self.block_size,
            max_model_len=length,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            watermark=self.watermark,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            max_num_queued_reqs=self.max_num_queued_reqs,
            max_num_queued_tokens=self.max_num_queued_tokens,
            max_logprobs=self.max_logprobs,
            enable_prefix_caching=self.enable_prefix_caching,
            kv_sanitizer=self.kv_sanitizer,
            prefix_cache=self.prefix_cache,
        )


def _start_lines(
    files: ModelFiles,
    config: EngineConfig,
    device: Device,
    weights: int,
    bytes_per_block: int,
    workspace: int,
) -> Iterator[str]:
    """What was found and what was taken, for the log."""
    yield f"device {device.name}: {device.description}"
    tokens = config.num_blocks * config.block_size
    yield (
        f"{files.path.name}: weights {weights / MIB:.0f} MiB, KV pool "
        f"{config.num_blocks * bytes_per_block / MIB:.0f} MiB = {config.num_blocks} blocks of "
        f"{config.block_size} = {tokens} tokens, workspace {workspace / MIB:.0f} MiB; "
        f"{tokens // config.max_model_len} requests of max_model_len={config.max_model_len} fit"
    )
    if config.num_host_blocks:
        yield (
            f"swap space {config.num_host_blocks * bytes_per_block / MIB:.0f} MiB = "
            f"{config.num_host_blocks} blocks of the host"
        )
