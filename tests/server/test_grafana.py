"""The Grafana dashboard: it can be loaded, and asks only for metrics and labels that there are."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from typing import Any

import pytest

from cupaged.server.metric_table import TABLE, MetricSpec

DASHBOARD: dict[str, Any] = json.loads(
    files("cupaged.server").joinpath("grafana/cupaged.json").read_text("utf-8")
)
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
GRAPHS = [panel for panel in PANELS if panel["type"] != "row"]
QUERIES = [target["expr"] for panel in GRAPHS for target in panel["targets"]]
BY_SERIES = {series: spec for spec in TABLE for series in spec.series}
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
# Prometheus adds these itself.
OF_PROMETHEUS = {"instance", "job"}
NAME = re.compile(r"\b(?:cupaged_|vllm:)\w+")


def labels_of(spec: MetricSpec) -> set[str]:
    return {*spec.labels, *OF_PROMETHEUS, *(["le"] if spec.kind == "histogram" else [])}


def test_grafana_ten_can_load_it() -> None:
    assert DASHBOARD["schemaVersion"] == 38  # of Grafana 10.0; newer ones migrate it
    assert DASHBOARD["id"] is None  # or it could only replace a dashboard of that number
    assert (DASHBOARD["title"], DASHBOARD["uid"]) == ("cupaged", "cupaged")
    assert {panel["type"] for panel in PANELS} == {"row", "stat", "timeseries"}
    ids = [panel["id"] for panel in PANELS]
    assert len(ids) == len(set(ids))
    for panel in GRAPHS:
        assert panel["title"] and panel["description"]
        assert panel["datasource"] == SOURCE
        assert [target["datasource"] for target in panel["targets"]] == [SOURCE] * len(
            panel["targets"]
        )
        letters = [target["refId"] for target in panel["targets"]]
        assert len(letters) == len(set(letters))


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in PANELS:
        at = panel["gridPos"]
        assert at["x"] >= 0 and at["x"] + at["w"] <= 24
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken
        taken |= cells


def test_variables_are_defined_and_ask_for_what_there_is() -> None:
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(PANELS))) - {"__rate_interval", "__all"}
    assert used == set(variables) == {"datasource", "model_name", "instance"}
    for name in ("model_name", "instance"):
        match = re.fullmatch(r"label_values\((\w+), (\w+)\)", variables[name]["definition"])
        assert match is not None
        assert match[2] in labels_of(BY_SERIES[match[1]])
        assert variables[name]["query"]["query"] == variables[name]["definition"]


@pytest.mark.parametrize("query", sorted(set(QUERIES)))
def test_a_query_asks_for_what_there_is(query: str) -> None:
    names = NAME.findall(query)
    assert names
    assert set(names) <= set(BY_SERIES)
    for opening, closing in ("()", "{}", "[]"):
        assert query.count(opening) == query.count(closing)
    for name, selector in re.findall(r"(cupaged_\w+)\{([^}]*)\}", query):
        labels = set(re.findall(r"(\w+)\s*=~?\"", selector))
        assert labels <= labels_of(BY_SERIES[name])
    for grouping in re.findall(r"by \(([^)]*)\)", query):
        wanted = {label.strip() for label in grouping.split(",")}
        for name in names:
            assert wanted <= labels_of(BY_SERIES[name])


@pytest.mark.parametrize("query", sorted(set(QUERIES)))
def test_counters_are_asked_for_their_rate_and_gauges_are_not(query: str) -> None:
    for name in NAME.findall(query):
        has_rate = bool(re.search(rf"(rate|increase)\({name}\b", query))
        assert has_rate == (BY_SERIES[name].kind != "gauge")


def test_every_metric_is_shown() -> None:
    shown = {BY_SERIES[name].name for query in QUERIES for name in NAME.findall(query)}
    assert {spec.name for spec in TABLE} - shown == {"cache_config_info"}
