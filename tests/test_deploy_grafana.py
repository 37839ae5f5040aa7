"""The dashboard: built by code, all its queries valid, all that they name in the table of metrics."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from headway.core.metrics import METRICS

SUFFIXES = {"counter": ("",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
METRIC_OF = {metric.name + suffix: metric for metric in METRICS for suffix in SUFFIXES[metric.kind]}


@pytest.fixture(scope="module")
def folder(root: Path) -> Path:
    return root / "deploy" / "grafana"


@pytest.fixture(scope="module")
def board(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "headway.json").read_text())


def queries(board: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Panels and their queries."""
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield panel, target


def test_the_committed_dashboard_is_what_the_code_builds(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, folder / "dashboard.py"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == (folder / "headway.json").read_text(), (
        "run deploy/grafana/dashboard.py headway.json"
    )


def test_promtool_accepts_every_query(board: dict[str, Any], tmp_path: Path) -> None:
    variables = {variable["name"] for variable in board["templating"]["list"]}
    rules = []
    for number, (_, target) in enumerate(queries(board)):
        used = set(re.findall(r"\$\{?(\w+)", target["expr"]))
        assert used <= variables, used
        expr = target["expr"].replace("$window", "5m").replace("$instance", "x")
        rules.append({"record": f"query_{number}", "expr": expr})
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", file], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rules)} rules found" in done.stdout and len(rules) > 50


def test_every_query_names_series_and_labels_that_exist(board: dict[str, Any]) -> None:
    for panel, target in queries(board):
        series = re.findall(r"\b(headway_\w+)\{([^}]*)\}", target["expr"])
        assert series and len(series) == len(re.findall("headway_", target["expr"])), target["expr"]
        for name, matchers in series:
            assert name in METRIC_OF, (panel["title"], name)
            metric = METRIC_OF[name]
            for label, value in re.findall(r'(\w+)!?="([^"]*)"', matchers):
                assert label == metric.label and value in metric.values, (panel["title"], target["expr"])
            # Counters are shown by how they rise, gauges as they are.
            rises = re.search(rf"(rate|increase)\({name}\{{", target["expr"]) is not None
            assert rises == (metric.kind != "gauge"), (panel["title"], target["expr"])
        labels = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) - {"instance", "le"}
        assert labels <= {METRIC_OF[name].label for name, _ in series}, (
            panel["title"],
            target["legendFormat"],
        )


def test_every_series_that_several_values_of_a_label_make_is_told_apart(board: dict[str, Any]) -> None:
    """A query without an aggregation that leaves its metric's label open names it in the legend."""
    for panel, target in queries(board):
        for name, matchers in re.findall(r"\b(headway_\w+)\{([^}]*)\}", target["expr"]):
            label = METRIC_OF[name].label
            is_one = re.search(rf'\b{label}="', matchers) or "sum " in target["expr"]
            if label and not is_one:
                assert f"{{{{{label}}}}}" in target["legendFormat"], (panel["title"], target["expr"])


def test_panels_have_ids_of_their_own_and_lie_side_by_side(board: dict[str, Any]) -> None:
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    cells: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        own = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & own and max(x for x, _ in own) < 24, panel["title"]
        cells |= own
        letters = [target["refId"] for target in panel.get("targets", ())]
        assert len(set(letters)) == len(letters)
    assert [panel["title"] for panel in board["panels"] if panel["type"] == "row"] == [
        "Now",
        "Version lag",
        "Throughput and step time",
        "Queue and waits",
        "Weights and engines",
        "Corrections",
        "Reward, lengths, loss",
        "Verifiers",
        "Groups and restarts",
    ]
