"""Statistics of runs whose numbers are worked out by hand, and the report that is made of them."""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ElementTree
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from cupaged.benchmarks import report
from cupaged.benchmarks.load import LoadRun, RequestRecord
from cupaged.benchmarks.metrics import METRICS, Selection, details, summary
from cupaged.benchmarks.plot import check_plot_path, draw, nice_ticks
from cupaged.errors import ConfigError

GOLDEN = Path(__file__).parent / "golden" / "bench_serve.txt"


def answered(
    due: float,
    sent: float,
    messages: dict[float, int],
    end: float,
    num_prompt: int,
    late: float = 0,
) -> RequestRecord:
    return RequestRecord(
        due, due + late, sent, end, list(messages), list(messages.values()),
        num_prompt, sum(messages.values()),
    )  # fmt: skip


def failed(due: float, code: str) -> RequestRecord:
    return RequestRecord(due, due, due, due + 0.1, error_code=code, error=f"{code}: no")


# TTFT 100, 300, 500 ms. TPOT 400 / 3 ms, none, 300 / 2 ms. Gaps 100, 200; none; 200 ms.
# E2EL 500, 300, 800 ms. Waits for the limit 0, 199, 0 ms. Lateness 0, 1, 0, 0, 0 ms.
RUN = LoadRun(
    [
        answered(0.0, 0.0, {0.1: 1, 0.2: 1, 0.4: 2}, 0.5, 10),
        answered(0.5, 0.7, {1.0: 1}, 1.0, 20, late=0.001),
        answered(1.0, 1.0, {1.5: 1, 1.7: 2}, 1.8, 30),
        failed(1.0, "UNAVAILABLE"),
        failed(1.5, "RESOURCE_EXHAUSTED QUEUE_FULL"),
    ],
    duration_s=2.0,
    cpu_s=0.5,
)
COUNTED = {"tokens_counted_by": "server", "ended_early": 0}
EVERYTHING = Selection(
    metrics=tuple(metric.name for metric in METRICS),
    percentiles=(25.0, 99.0, 99.9),
    goodput={"ttft": 300.5},
)


def test_counts_and_rates() -> None:
    result = summary(RUN, Selection(), None)
    expected = {
        "duration": 2.0, "completed": 3, "failed": 2, "total_input_tokens": 60,
        "total_output_tokens": 8, "request_throughput": 1.5, "request_goodput": None,
        "output_throughput": 4.0, "total_token_throughput": 34.0,
        "max_output_tokens_per_s": 4.0, "max_concurrent_requests": 1,
        "client_cpu_seconds": 0.5, "client_cpu_share": 0.25,
        "failed_by_code": {"UNAVAILABLE": 1, "RESOURCE_EXHAUSTED QUEUE_FULL": 1},
    }  # fmt: skip
    assert {name: result[name] for name in expected} == expected
    assert result["max_lateness_ms"] == pytest.approx(1.0)
    assert result["mean_lateness_ms"] == pytest.approx(0.2)
    assert result["p99_lateness_ms"] == pytest.approx(0.96)  # 24/25 of the way from 0 to 1
    assert result["request_rate_sent"] == pytest.approx(4 / 1.5)


@pytest.mark.parametrize(
    ("name", "mean", "median", "std", "p25", "p99"),
    [
        ("ttft", 300.0, 300.0, math.sqrt(80000 / 3), 200.0, 496.0),
        ("tpot", 425 / 3, 425 / 3, 25 / 3, 137.5, 400 / 3 + 16.5),
        ("itl", 500 / 3, 200.0, math.sqrt(20000 / 9), 150.0, 200.0),
        ("e2el", 1600 / 3, 500.0, math.sqrt(380000 / 9), 400.0, 794.0),
        ("client_queue_time", 199 / 3, 0.0, 199 * math.sqrt(2) / 3, 0.0, 195.02),
        ("e2el_including_client_queue", 1799 / 3, 500.0, None, 499.5, 794.0),
    ],
)
def test_latencies(
    name: str, mean: float, median: float, std: float | None, p25: float, p99: float
) -> None:
    result = summary(RUN, EVERYTHING, max_concurrency=4)
    assert result[f"mean_{name}_ms"] == pytest.approx(mean)
    assert result[f"median_{name}_ms"] == pytest.approx(median)
    assert result[f"p25_{name}_ms"] == pytest.approx(p25)
    assert result[f"p99_{name}_ms"] == pytest.approx(p99)
    if std is not None:
        assert result[f"std_{name}_ms"] == pytest.approx(std)


def test_waiting_for_the_limit_is_told_only_where_there_is_one() -> None:
    result = summary(RUN, EVERYTHING, max_concurrency=None)
    assert "mean_e2el_ms" in result and "mean_client_queue_time_ms" not in result


@pytest.mark.parametrize(
    ("limits", "good"),
    [
        ({"ttft": 299.5}, 1),
        ({"ttft": 300.5}, 2),
        ({"tpot": 140.0}, 2),  # a single token has no time per token, and keeps any limit
        ({"e2el": 500.5}, 2),
        ({"ttft": 300.5, "tpot": 100.0}, 1),
        ({"ttft": 1e9, "tpot": 1e9, "e2el": 1e9}, 3),
    ],
)
def test_goodput_counts_requests_that_keep_all_limits(limits: dict[str, float], good: int) -> None:
    assert summary(RUN, Selection(goodput=limits), None)["request_goodput"] == good / 2.0


def test_peaks_count_tokens_and_overlaps() -> None:
    records = [
        answered(0.0, 10.0, {10.9: 1, 11.1: 7}, 11.5, 1),
        answered(0.0, 10.2, {11.9: 5, 12.0: 3}, 12.5, 1),
        answered(0.0, 11.4, {12.2: 2}, 12.4, 1),
    ]
    result = summary(LoadRun(records, 3.0, 0.0), Selection(), None)
    assert result["max_output_tokens_per_s"] == 12.0  # of the second that begins at 11
    assert result["max_concurrent_requests"] == 3


def test_a_run_in_which_all_failed_has_finite_numbers() -> None:
    run = LoadRun([failed(0.0, "UNAVAILABLE")], duration_s=0.1, cpu_s=0.0)
    result = summary(run, EVERYTHING, None)
    assert (result["completed"], result["failed"], result["mean_ttft_ms"]) == (0, 1, 0.0)
    json.dumps(result, allow_nan=False)


def test_details_of_each_request() -> None:
    few = details(RUN, everything=False)
    assert set(few) == {"ttfts", "itls", "errors"}
    assert few["ttfts"] == pytest.approx([0.1, 0.3, 0.5, 0.0, 0.0])
    assert [len(gaps) for gaps in few["itls"]] == [2, 0, 1, 0, 0]
    assert few["errors"][2:4] == ["", "UNAVAILABLE: no"]
    everything = details(RUN, everything=True)
    assert everything["output_lens"] == [4, 1, 3, 0, 0]
    assert everything["input_lens"] == [10, 20, 30, 0, 0]
    assert everything["start_times"] == [0.0, 0.7, 1.0, 1.0, 1.5]
    assert everything["queue_times"] == pytest.approx([0.0, 0.199, 0.0, 0.0, 0.0])
    assert everything["message_tokens"][0] == [1, 1, 2]


def test_the_printed_report() -> None:
    head: dict[str, Any] = {"request_rate": 2.5, "max_concurrency": 4, **COUNTED}
    lines = report.report_lines(head | summary(RUN, EVERYTHING, 4), EVERYTHING)
    assert lines == GOLDEN.read_text().splitlines()


def test_the_report_of_a_burst_without_a_limit_leaves_lines_out() -> None:
    head = {"request_rate": "inf", "max_concurrency": None, **COUNTED}
    selection = Selection(metrics=("e2el",))
    text = "\n".join(report.report_lines(head | summary(RUN, selection, None), selection))
    for word in ("Maximum request", "Request rate", "goodput", "TTFT", "Queue"):
        assert word not in text
    assert re.search(r"^P99 E2EL \(ms\): +794\.00$", text, re.MULTILINE)


def test_notes_say_when_the_generator_was_the_limit() -> None:
    fine = summary(RUN, Selection(), None) | COUNTED
    assert report.notes(fine, ["", "X: no", "X: no"], scheduled=True) == ["failed: X: no"]
    late = {**fine, "p99_lateness_ms": 30.0, "max_lateness_ms": 70.0, "request_rate_sent": 3.25}
    (note,) = report.notes(late, [], scheduled=True)
    assert "fell behind" in note and "up to 70 ms late (P99 30 ms); 3.25 requests/s" in note
    assert report.notes(late, [], scheduled=False) == []  # a burst is sent as fast as it can be
    (note,) = report.notes({**fine, "client_cpu_share": 0.97}, [], scheduled=False)
    assert "0.97 of a core" in note
    (note,) = report.notes(fine | {"tokens_counted_by": "messages"}, [], scheduled=True)
    assert "each message was counted as one" in note
    assert report.notes(fine | {"tokens_counted_by": "tokenizer"}, [], scheduled=True) == []
    (note,) = report.notes(fine | {"ended_early": 3}, [], scheduled=True)
    assert note.startswith("3 answers ended before their whole length")


def test_the_name_of_the_file() -> None:
    head = {
        "backend": "cupaged", "label": None, "model_id": "team/model", "request_rate": 2.5,
        "max_concurrency": None,
    }  # fmt: skip
    moment = datetime(2026, 1, 2, 3, 4, 5)

    def path(folder: str | None, name: str | None, **changes: Any) -> str:
        return str(report.result_path(folder, name, head | changes, moment=moment))

    assert path(None, None) == "cupaged-2.5qps-model-20260102-030405.json"
    limited = path("out", None, label="mine", request_rate="inf", max_concurrency=8)
    assert limited == "out/mine-infqps-concurrency8-model-20260102-030405.json"
    assert path("out", "x.json") == "out/x.json"
    assert path(None, None, request_rate="trace").startswith("cupaged-trace-model-")


def test_results_are_lines_of_json(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.json"
    for number in range(3):
        report.save(path, {"number": number}, append=number == 2)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"number": 1}, {"number": 2},
    ]  # fmt: skip
    with pytest.raises(report.ResultError, match="new: cannot be written: it is a folder"):
        report.save(path.parent, {})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"metrics": ("ttfx",)}, "--percentile-metrics"),
        ({"percentiles": (101.0,)}, "--metric-percentiles"),
        ({"percentiles": (math.nan,)}, "--metric-percentiles"),
        ({"goodput": {"itl": 5.0}}, "--goodput"),
        ({"goodput": {"ttft": -1.0}}, "--goodput ttft"),
    ],
)
def test_what_cannot_be_reported_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=f"^{named} must be "):
        Selection(**changes)


@pytest.mark.parametrize(
    ("most", "ticks"),
    [
        (1.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (7.0, [0, 2, 4, 6, 8]),
        (10.0, [0, 2, 4, 6, 8, 10]),
        (11.0, [0, 2.5, 5, 7.5, 10, 12.5]),
        (4321.0, [0, 1000, 2000, 3000, 4000, 5000]),
        (0.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
    ],
)
def test_ticks_are_round(most: float, ticks: list[float]) -> None:
    assert nice_ticks(most) == pytest.approx(ticks)


def test_the_picture_is_svg_with_a_curve_a_panel(tmp_path: Path) -> None:
    path = tmp_path / "run.svg"
    draw(str(path), RUN, "a <title> & more", "below")
    root = ElementTree.parse(path).getroot()
    names = {element.tag.partition("}")[2] for element in root}
    assert root.tag.endswith("}svg") and names == {"rect", "text", "path", "polyline"}
    texts = [element.text for element in root if element.tag.endswith("}text")]
    assert "a <title> & more" in texts and {"TPOT", "ITL"} <= set(texts)
    curves = [e.attrib["points"].split() for e in root if e.tag.endswith("}polyline")]
    assert len(curves) == 5
    # The first panel spans 380 x 200 from (70, 290): TTFT up to 500 ms, shares up to 1.
    assert curves[0] == ["146.0,290.0", "146.0,223.3", "298.0,156.7", "450.0,90.0"]


def test_a_run_without_answers_is_drawn_too(tmp_path: Path) -> None:
    run = LoadRun([failed(0.0, "UNAVAILABLE")], duration_s=0.2, cpu_s=0.0)
    draw(str(tmp_path / "run.svg"), run, "title", "below")
    assert (tmp_path / "run.svg").read_text().count(">nothing<") == 3


@pytest.mark.parametrize("name", ["run.png", "run", "svg"])
def test_only_svg_is_drawn(name: str) -> None:
    with pytest.raises(ConfigError, match=r"--plot must be a name that ends in \.svg"):
        check_plot_path(name)
