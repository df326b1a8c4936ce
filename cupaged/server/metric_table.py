"""The table of all metrics: names, labels, units, buckets, and what vLLM calls them.

It is the one place where a name stands. `metrics.py` makes the objects, `metrics_page.py` the page,
and the Grafana dashboard is checked against it. It imports nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PREFIX = "cupaged_"
VLLM_PREFIX = "vllm:"

# Upper bounds in seconds. Long generations and long queues are real: all reach ten minutes.
REQUEST_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0,
    20.0, 40.0, 60.0, 120.0, 300.0, 600.0,
)  # fmt: skip
TOKEN_SECONDS = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5,
    0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0,
)  # fmt: skip
STEP_SECONDS = (0.0001, 0.00025, *TOKEN_SECONDS)
REQUEST_TOKENS = tuple(float(1 << power) for power in range(18))  # 1 .. 131072
STEP_TOKENS = tuple(float(1 << power) for power in range(15))  # 1 .. 16384

Source = Literal["front end", "engine", "supervisor"]
Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric.

    name: after `cupaged_`; a counter's ends in `_total`.
    source: the process that keeps it.
    labels: all of them; `model_name` is the first served name.
    buckets: upper bounds of a histogram, in the unit of its name; infinity is added.
    vllm: vLLM's names after `vllm:`, the newest first; empty where it has none.
    """

    name: str
    kind: Kind
    source: Source
    documentation: str
    labels: tuple[str, ...] = ("model_name",)
    buckets: tuple[float, ...] = ()
    vllm: tuple[str, ...] = ()

    @property
    def full_name(self) -> str:
        """The name on the page, without the suffixes of a histogram's series."""
        return PREFIX + self.name

    @property
    def series(self) -> tuple[str, ...]:
        """The names that a query may use."""
        if self.kind == "histogram":
            return tuple(f"{self.full_name}_{part}" for part in ("bucket", "count", "sum"))
        return (self.full_name,)


FRONT_END = (
    MetricSpec(
        "request_received_total", "counter", "front end",
        "Requests that a front end received, by method of GenerationService.",
        ("model_name", "method"),
    ),
    MetricSpec(
        "request_success_total", "counter", "front end",
        "Requests answered to their end, by the reason why the first sample ended.",
        ("model_name", "finished_reason"), vllm=("request_success_total",),
    ),
    MetricSpec(
        "request_failed_total", "counter", "front end",
        "Requests that ended with a status other than OK, by gRPC code and reason; a cancelled "
        "request has the code CANCELLED.",
        ("model_name", "code", "reason"),
    ),
    MetricSpec(
        "streams_active", "gauge", "front end", "Calls of GenerateStream that are open.",
    ),
    MetricSpec(
        "received_bytes_total", "counter", "front end",
        "Bytes of request messages, without the framing of gRPC.",
    ),
    MetricSpec(
        "sent_bytes_total", "counter", "front end",
        "Bytes of response messages, without the framing of gRPC, counted when the request ends.",
    ),
    MetricSpec(
        "prompt_tokens_total", "counter", "front end",
        "Prompt tokens of requests that got a first token.", vllm=("prompt_tokens_total",),
    ),
    MetricSpec(
        "request_prompt_tokens", "histogram", "front end",
        "Prompt tokens of a request that was answered to its end.",
        buckets=REQUEST_TOKENS, vllm=("request_prompt_tokens",),
    ),
    MetricSpec(
        "request_generation_tokens", "histogram", "front end",
        "Tokens that a request got, over all its samples.",
        buckets=REQUEST_TOKENS, vllm=("request_generation_tokens",),
    ),
    MetricSpec(
        "time_to_first_token_seconds", "histogram", "front end",
        "Seconds from the arrival of a request to its first tokens.",
        buckets=REQUEST_SECONDS, vllm=("time_to_first_token_seconds",),
    ),
    MetricSpec(
        "inter_token_latency_seconds", "histogram", "front end",
        "Seconds between two messages with tokens of one stream.",
        buckets=TOKEN_SECONDS,
        vllm=("inter_token_latency_seconds", "time_per_output_token_seconds"),
    ),
    MetricSpec(
        "e2e_request_latency_seconds", "histogram", "front end",
        "Seconds from the arrival of a request to its end, if it was answered to its end.",
        buckets=REQUEST_SECONDS, vllm=("e2e_request_latency_seconds",),
    ),
    MetricSpec(
        "request_queue_time_seconds", "histogram", "front end",
        "Seconds from the arrival of a request at the engine to its first step.",
        buckets=REQUEST_SECONDS, vllm=("request_queue_time_seconds",),
    ),
    MetricSpec(
        "request_prefill_time_seconds", "histogram", "front end",
        "Seconds from the first step of a request to its first token.",
        buckets=REQUEST_SECONDS, vllm=("request_prefill_time_seconds",),
    ),
    MetricSpec(
        "request_decode_time_seconds", "histogram", "front end",
        "Seconds from the first token of a request to its last.",
        buckets=REQUEST_SECONDS, vllm=("request_decode_time_seconds",),
    ),
)  # fmt: skip

ENGINE = (
    MetricSpec(
        "num_requests_running", "gauge", "engine",
        "Sequences that hold blocks and take part in steps.", vllm=("num_requests_running",),
    ),
    MetricSpec(
        "num_requests_waiting", "gauge", "engine",
        "Sequences that wait for their first step or to go on after a preemption.",
        vllm=("num_requests_waiting",),
    ),
    MetricSpec(
        "num_tokens_waiting", "gauge", "engine",
        "Prompt tokens of the requests that wait for their first step.",
    ),
    MetricSpec(
        "kv_cache_usage_perc", "gauge", "engine",
        "Blocks of the KV cache in use over all blocks; 1 is full.",
        vllm=("kv_cache_usage_perc", "gpu_cache_usage_perc"),
    ),
    MetricSpec(
        "cache_config_info", "gauge", "engine",
        "Always 1; the labels say how large the KV cache is.",
        ("model_name", "block_size", "num_blocks"), vllm=("cache_config_info",),
    ),
    MetricSpec(
        "num_preemptions_total", "counter", "engine",
        "Sequences whose blocks were taken away, to be computed again later or swapped out.",
        vllm=("num_preemptions_total",),
    ),
    MetricSpec(
        "num_swap_preemptions_total", "counter", "engine",
        "Those of them whose blocks were swapped out to the host's memory.",
    ),
    MetricSpec(
        "num_requests_swapped", "gauge", "engine",
        "Waiting sequences whose blocks are in the host's memory.",
        vllm=("num_requests_swapped",),
    ),
    MetricSpec(
        "host_cache_usage_perc", "gauge", "engine",
        "Blocks of the host's memory in use over all of them; 0 if there are none.",
        vllm=("cpu_cache_usage_perc",),
    ),
    MetricSpec(
        "swapped_out_blocks_total", "counter", "engine",
        "KV blocks of preempted sequences copied to the host's memory.",
    ),
    MetricSpec(
        "swapped_in_blocks_total", "counter", "engine",
        "KV blocks of preempted sequences copied back from the host's memory.",
    ),
    MetricSpec(
        "host_cache_offloaded_perc", "gauge", "engine",
        "Share of the host's KV blocks that keep what was evicted from the prefix cache.",
    ),
    MetricSpec(
        "offloaded_blocks_total", "counter", "engine",
        "KV blocks evicted from the prefix cache and copied to the host's memory.",
    ),
    MetricSpec(
        "loaded_blocks_total", "counter", "engine",
        "Those of them that were copied back for a request.",
    ),
    MetricSpec(
        "prefix_cache_queries_total", "counter", "engine",
        "Prompt tokens of new requests that were looked up in the prefix cache.",
        vllm=("prefix_cache_queries_total",),
    ),
    MetricSpec(
        "prefix_cache_hits_total", "counter", "engine",
        "Those of them that were found there and not computed.",
        vllm=("prefix_cache_hits_total",),
    ),
    MetricSpec(
        "generation_tokens_total", "counter", "engine", "Tokens drawn.",
        vllm=("generation_tokens_total",),
    ),
    MetricSpec(
        "iteration_tokens_total", "histogram", "engine",
        "Tokens computed in a step, of prompts and of answers.",
        buckets=STEP_TOKENS, vllm=("iteration_tokens_total",),
    ),
    MetricSpec(
        "step_time_seconds", "histogram", "engine",
        "Seconds from the start of a step to its tokens.", buckets=STEP_SECONDS,
    ),
)  # fmt: skip

SUPERVISOR = (
    MetricSpec(
        "build_info", "gauge", "supervisor",
        "Always 1; the labels say which version runs.", ("version", "python_version"),
    ),
    MetricSpec(
        "server_state", "gauge", "supervisor",
        "1 for the state that the server is in, 0 for the others.", ("model_name", "state"),
    ),
    MetricSpec(
        "frontends_listening", "gauge", "supervisor", "Front ends that accept calls.",
    ),
    MetricSpec(
        "engine_restarts_total", "counter", "supervisor",
        "Times that the engine process was started again after its death.",
    ),
    MetricSpec(
        "frontend_restarts_total", "counter", "supervisor",
        "Times that a front end was started again after its death.",
    ),
)  # fmt: skip

TABLE = FRONT_END + ENGINE + SUPERVISOR
# Labels that vLLM spells otherwise; every one of its series has `engine` besides.
VLLM_LABELS = {"num_blocks": "num_gpu_blocks"}
