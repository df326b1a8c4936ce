"""What the processes of a server count, and how it comes together on one page."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from cupaged.errors import ConfigError
from cupaged.server.metric_table import REQUEST_SECONDS, STEP_SECONDS, TABLE, TOKEN_SECONDS
from cupaged.server.metrics import (
    EngineMetrics,
    FrontEndMetrics,
    SupervisorMetrics,
    process_died,
)
from cupaged.server.metrics_page import MetricsPage
from cupaged.server.serving_state import ServingState
from tests.server.metrics_child import STATS, TIMES

GOLDEN = Path(__file__).with_name("golden")
OPEN_METRICS = "application/openmetrics-text"
Child = subprocess.Popen[str]


def page(folder: Path, compat: str | None = None) -> MetricsPage:
    supervisor = SupervisorMetrics()
    supervisor.engine_restarted()
    supervisor.frontend_restarted()
    supervisor.frontend_restarted()
    return MetricsPage(
        folder,
        state=lambda: ServingState("ready", num_listening=2),
        metrics=supervisor,
        model_name="tiny",
        compat=compat,
    )


def values(folder: Path, compat: str | None = None) -> dict[str, float]:
    """Every series of the page by its name and labels as they are printed."""
    text = page(folder, compat).render()[0].decode()
    pairs = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {series: float(value) for series, _, value in pairs}


def families(body: bytes) -> list[Metric]:
    """A page of OpenMetrics, read strictly."""
    parse = cast(Callable[[str], Iterator[Metric]], text_string_to_metric_families)
    return list(parse(body.decode()))


def start(folder: Path, name: str) -> Child:
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.server.metrics_child", str(folder), name],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdout is not None
    assert child.stdout.readline() == "done\n"
    return child


def kill(child: Child) -> None:
    with child:
        child.kill()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """That of an engine and two front ends, all living."""
    folder = tmp_path_factory.mktemp("metrics")
    children = [start(folder, name) for name in ("engine", "frontend-1", "frontend-2")]
    yield folder
    for child in children:
        kill(child)


def test_golden_names_types_and_labels(folder: Path) -> None:
    lines = []
    for family in families(page(folder, "vllm").render("application/openmetrics-text")[0]):
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = sorted({",".join(sorted(sample.labels)) for sample in family.samples})
        lines.append(f"{name} {family.type} {' '.join(labels)}\n")
    assert "".join(lines) == (GOLDEN / "metrics.txt").read_text("utf-8")


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        ("", "text/plain; version=0.0.4; charset=utf-8"),
        ("text/html,*/*;q=0.8", "text/plain; version=0.0.4; charset=utf-8"),
        ("text/plain;version=abc", "text/plain; version=0.0.4; charset=utf-8"),
        (OPEN_METRICS, f"{OPEN_METRICS}; version=1.0.0; charset=utf-8"),
        (f"{OPEN_METRICS};version=1.0.0", f"{OPEN_METRICS}; version=1.0.0; charset=utf-8"),
        (
            # What Prometheus 2 sends.
            f"{OPEN_METRICS};version=1.0.0;q=0.5,{OPEN_METRICS};version=0.0.1;q=0.4,"
            "text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
            f"{OPEN_METRICS}; version=1.0.0; charset=utf-8",
        ),
        (
            # What Prometheus 3 sends.
            f"{OPEN_METRICS};version=1.0.0;escaping=allow-utf-8;q=0.6,"
            f"{OPEN_METRICS};version=0.0.1;q=0.5,text/plain;version=1.0.0;"
            "escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
            f"{OPEN_METRICS}; version=1.0.0; charset=utf-8",
        ),
        (
            f"{OPEN_METRICS};version=1.0.0;escaping=values",
            f"{OPEN_METRICS}; version=1.0.0; charset=utf-8",
        ),
    ],
)  # fmt: skip
def test_the_format_follows_the_accept_header(folder: Path, accept: str, content_type: str) -> None:
    body, given = page(folder, "vllm").render(accept)
    assert given == content_type
    assert body.endswith(b"# EOF\n") == given.startswith(OPEN_METRICS)
    assert b'\nvllm:num_requests_running{engine="0",model_name="tiny"} 3.0\n' in body
    assert b'\ncupaged_num_requests_running{model_name="tiny"} 3.0\n' in body


def test_the_table_holds_what_the_page_shows(folder: Path) -> None:
    names = {series.partition("{")[0] for series in values(folder)}
    assert names == {name for spec in TABLE for name in spec.series}


def test_buckets_reach_ten_minutes() -> None:
    for buckets in (REQUEST_SECONDS, TOKEN_SECONDS, STEP_SECONDS):
        assert buckets[-1] == 600.0
        assert list(buckets) == sorted(set(buckets))


@pytest.mark.parametrize(
    ("series", "value"),
    [
        # Two front ends, each with one stream that ended, one cancelled, one open, one refused.
        ('cupaged_request_received_total{method="GenerateStream",model_name="tiny"}', 6),
        ('cupaged_request_received_total{method="Generate",model_name="tiny"}', 2),
        ('cupaged_request_success_total{finished_reason="length",model_name="tiny"}', 2),
        ('cupaged_request_success_total{finished_reason="stop",model_name="tiny"}', 0),
        ('cupaged_request_failed_total{code="CANCELLED",model_name="tiny",reason=""}', 2),
        (
            'cupaged_request_failed_total{code="RESOURCE_EXHAUSTED",model_name="tiny",'
            'reason="QUEUE_FULL"}',
            2,
        ),
        ('cupaged_streams_active{model_name="tiny"}', 2),
        ('cupaged_received_bytes_total{model_name="tiny"}', 200),
        ('cupaged_sent_bytes_total{model_name="tiny"}', 114),
        ('cupaged_prompt_tokens_total{model_name="tiny"}', 10),
        ('cupaged_request_prompt_tokens_sum{model_name="tiny"}', 10),
        ('cupaged_request_generation_tokens_sum{model_name="tiny"}', 18),
        # The clock moves on by 0.25 s a look: arrival, first and second message, end.
        ('cupaged_time_to_first_token_seconds_sum{model_name="tiny"}', 0.5),
        ('cupaged_time_to_first_token_seconds_count{model_name="tiny"}', 2),
        ('cupaged_time_to_first_token_seconds_bucket{le="0.1",model_name="tiny"}', 0),
        ('cupaged_time_to_first_token_seconds_bucket{le="0.25",model_name="tiny"}', 2),
        ('cupaged_time_to_first_token_seconds_bucket{le="+Inf",model_name="tiny"}', 2),
        ('cupaged_inter_token_latency_seconds_sum{model_name="tiny"}', 0.5),
        ('cupaged_inter_token_latency_seconds_count{model_name="tiny"}', 2),
        ('cupaged_e2e_request_latency_seconds_sum{model_name="tiny"}', 1.5),
        ('cupaged_request_queue_time_seconds_sum{model_name="tiny"}', 1),
        ('cupaged_request_prefill_time_seconds_sum{model_name="tiny"}', 1),
        ('cupaged_request_decode_time_seconds_sum{model_name="tiny"}', 4),
        ('cupaged_num_requests_running{model_name="tiny"}', 3),
        ('cupaged_num_requests_waiting{model_name="tiny"}', 5),
        ('cupaged_num_tokens_waiting{model_name="tiny"}', 77),
        ('cupaged_kv_cache_usage_perc{model_name="tiny"}', 0.25),
        ('cupaged_cache_config_info{block_size="16",model_name="tiny",num_blocks="200"}', 1),
        ('cupaged_num_preemptions_total{model_name="tiny"}', 6),
        ('cupaged_num_swap_preemptions_total{model_name="tiny"}', 5),
        ('cupaged_num_requests_swapped{model_name="tiny"}', 1),
        ('cupaged_host_cache_usage_perc{model_name="tiny"}', 0.25),
        ('cupaged_swapped_out_blocks_total{model_name="tiny"}', 30),
        ('cupaged_swapped_in_blocks_total{model_name="tiny"}', 10),
        ('cupaged_host_cache_offloaded_perc{model_name="tiny"}', 9 / 80),
        ('cupaged_offloaded_blocks_total{model_name="tiny"}', 40),
        ('cupaged_loaded_blocks_total{model_name="tiny"}', 20),
        ('cupaged_generation_tokens_total{model_name="tiny"}', 7),
        ('cupaged_iteration_tokens_total_sum{model_name="tiny"}', 43),
        ('cupaged_iteration_tokens_total_bucket{le="4.0",model_name="tiny"}', 1),
        ('cupaged_step_time_seconds_sum{model_name="tiny"}', 0.05),
        ('cupaged_server_state{model_name="tiny",state="ready"}', 1),
        ('cupaged_server_state{model_name="tiny",state="dead"}', 0),
        ('cupaged_frontends_listening{model_name="tiny"}', 2),
        ('cupaged_engine_restarts_total{model_name="tiny"}', 1),
        ('cupaged_frontend_restarts_total{model_name="tiny"}', 2),
    ],
)
def test_one_view_over_all_processes(folder: Path, series: str, value: float) -> None:
    assert values(folder)[series] == pytest.approx(value)


@pytest.mark.parametrize(
    ("series", "value"),
    [
        ('vllm:num_requests_running{engine="0",model_name="tiny"}', 3),
        ('vllm:num_requests_waiting{engine="0",model_name="tiny"}', 5),
        ('vllm:kv_cache_usage_perc{engine="0",model_name="tiny"}', 0.25),
        ('vllm:gpu_cache_usage_perc{engine="0",model_name="tiny"}', 0.25),
        (
            'vllm:cache_config_info{block_size="16",engine="0",model_name="tiny",'
            'num_gpu_blocks="200"}',
            1,
        ),
        ('vllm:num_preemptions_total{engine="0",model_name="tiny"}', 6),
        ('vllm:num_requests_swapped{engine="0",model_name="tiny"}', 1),
        ('vllm:cpu_cache_usage_perc{engine="0",model_name="tiny"}', 0.25),
        ('vllm:prompt_tokens_total{engine="0",model_name="tiny"}', 10),
        ('vllm:generation_tokens_total{engine="0",model_name="tiny"}', 7),
        (
            'vllm:request_success_total{engine="0",finished_reason="length",model_name="tiny"}',
            2,
        ),
        ('vllm:time_to_first_token_seconds_count{engine="0",model_name="tiny"}', 2),
        (
            'vllm:time_to_first_token_seconds_bucket{engine="0",le="0.25",model_name="tiny"}',
            2,
        ),
        ('vllm:inter_token_latency_seconds_sum{engine="0",model_name="tiny"}', 0.5),
        ('vllm:time_per_output_token_seconds_sum{engine="0",model_name="tiny"}', 0.5),
        ('vllm:e2e_request_latency_seconds_sum{engine="0",model_name="tiny"}', 1.5),
        ('vllm:request_queue_time_seconds_sum{engine="0",model_name="tiny"}', 1),
        ('vllm:request_prefill_time_seconds_sum{engine="0",model_name="tiny"}', 1),
        ('vllm:request_decode_time_seconds_sum{engine="0",model_name="tiny"}', 4),
        ('vllm:iteration_tokens_total_sum{engine="0",model_name="tiny"}', 43),
    ],
)
def test_the_names_of_vllm(folder: Path, series: str, value: float) -> None:
    assert values(folder, "vllm")[series] == pytest.approx(value)


def test_names_of_vllm_only_if_asked(folder: Path) -> None:
    ours = values(folder)
    assert not [series for series in ours if series.startswith("vllm:")]
    both = values(folder, "vllm")
    assert {s: v for s, v in both.items() if not s.startswith("vllm:")} == ours


def test_unknown_compat_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="metrics_compat must be 'vllm', got 'tgi'"):
        page(tmp_path, "tgi")


def test_a_dead_process_leaves_its_counters_and_a_successor_goes_on(tmp_path: Path) -> None:
    streams = 'cupaged_streams_active{model_name="tiny"}'
    received = 'cupaged_request_received_total{method="Generate",model_name="tiny"}'
    latency = 'cupaged_e2e_request_latency_seconds_count{model_name="tiny"}'
    kill(start(tmp_path, "frontend-1"))
    assert values(tmp_path)[streams] == 1
    process_died(tmp_path, "frontend-1")
    after = values(tmp_path)
    assert streams not in after
    assert (after[received], after[latency]) == (1, 1)
    files = sorted(path.name for path in tmp_path.iterdir())
    kill(start(tmp_path, "frontend-1"))
    after = values(tmp_path)
    assert (after[streams], after[received], after[latency]) == (1, 2, 2)
    assert {path.name for path in tmp_path.iterdir()} - set(files) == {
        "gauge_livesum_frontend-1.db"
    }


def test_a_file_that_is_being_made_does_not_spoil_the_page(tmp_path: Path) -> None:
    """A child that has opened its file but not yet sized it: the page is tried again."""
    empty = tmp_path / "counter_frontend-9.db"
    empty.touch()
    shown = page(tmp_path)

    class Files:
        tries = 0

        def collect(self) -> list[object]:
            self.tries += 1
            if self.tries == 2:
                empty.unlink()
            return list(real.collect())  # type: ignore[no-untyped-call]

    real = shown._files
    shown._files = files = Files()  # type: ignore[assignment]
    assert b"cupaged_build_info" in shown.render()[0]
    assert files.tries == 2


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def in_process() -> tuple[FrontEndMetrics, CollectorRegistry, Clock]:
    registry, clock = CollectorRegistry(), Clock()
    return FrontEndMetrics("m", registry=registry, clock=clock), registry, clock


def sample(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, {"model_name": "m", **labels})


def test_a_call_without_a_stream_takes_the_engines_time_to_first_token() -> None:
    metrics, registry, clock = in_process()
    meter = metrics.received(stream=False)
    meter.num_prompt_tokens = 4
    clock.now += 3.5
    meter.finished("stop", num_tokens=2, times=TIMES)
    assert sample(registry, "cupaged_time_to_first_token_seconds_sum") == 1.0
    assert sample(registry, "cupaged_e2e_request_latency_seconds_sum") == 3.5
    assert sample(registry, "cupaged_prompt_tokens_total") == 4
    assert sample(registry, "cupaged_inter_token_latency_seconds_count") == 0
    assert sample(registry, "cupaged_streams_active") == 0


def test_a_request_that_ends_before_its_first_token_has_no_latency() -> None:
    metrics, registry, _ = in_process()
    meter = metrics.received(stream=True)
    assert sample(registry, "cupaged_streams_active") == 1
    meter.num_prompt_tokens = 4
    meter.failed("DEADLINE_EXCEEDED")
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time"):
        assert sample(registry, f"cupaged_{name}_seconds_count") == 0
    assert sample(registry, "cupaged_prompt_tokens_total") == 0
    assert sample(registry, "cupaged_streams_active") == 0


@pytest.mark.parametrize("first", ["finished", "failed"])
def test_exactly_one_end_counts(first: str) -> None:
    metrics, registry, _ = in_process()
    meter = metrics.received(stream=True)
    if first == "finished":
        meter.finished("stop", num_tokens=1)
    meter.failed("INTERNAL", "NUMERICAL")
    meter.failed("CANCELLED")
    meter.finished("stop", num_tokens=1)
    finished = sample(registry, "cupaged_request_success_total", finished_reason="stop")
    failed = sample(registry, "cupaged_request_failed_total", code="INTERNAL", reason="NUMERICAL")
    cancelled = sample(registry, "cupaged_request_failed_total", code="CANCELLED", reason="")
    assert (finished, failed, cancelled) == (
        (1, None, None) if first == "finished" else (0, 1, None)
    )
    assert sample(registry, "cupaged_streams_active") == 0


def test_preemptions_are_counted_by_their_growth() -> None:
    registry = CollectorRegistry()
    metrics = EngineMetrics("m", block_size=16, num_blocks=8, registry=registry)
    metrics.update(STATS)
    metrics.update(STATS)
    assert sample(registry, "cupaged_num_preemptions_total") == STATS.num_preemptions_total
    assert sample(registry, "cupaged_num_swap_preemptions_total") == 5
    assert sample(registry, "cupaged_swapped_out_blocks_total") == 30
    assert sample(registry, "cupaged_swapped_in_blocks_total") == 10


def test_what_the_supervisor_imports_stays_small() -> None:
    code = (
        "import sys, cupaged.server.http_endpoints, cupaged.server.log_setup\n"
        "import cupaged.server.stats_line, cupaged.server.tracing; print(*sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(run.stdout.split())
    assert not loaded & {"numpy", "grpc", "google.protobuf", "tokenizers", "opentelemetry"}
