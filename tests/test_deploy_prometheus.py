"""Scrape configuration, rules, alerts and runbook: checked by promtool, against the table of metrics and the tree of
configuration keys, and in a real Prometheus that scrapes a real endpoint."""

from __future__ import annotations

import bisect
import json
import re
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from headway.cluster.cli import app
from headway.cluster.exporter import Exporter
from headway.cluster.run_folder import MAY_CHANGE, MAY_CHANGE_SECTIONS
from headway.core.config import keys
from headway.core.metrics import BY_NAME, LAG_BUCKETS, Recorder

SUFFIXES = {"counter": ("",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
SERIES = {name + suffix for name, metric in BY_NAME.items() for suffix in SUFFIXES[metric.kind]}
COUNTED = {name for name in SERIES if name.endswith(("_total", "_bucket", "_sum", "_count"))}
"""Series that only rise."""
FILES = (".py", ".md", ".json", ".jsonl", ".log", ".yml", ".parquet")


@pytest.fixture(scope="module")
def deploy(root: Path) -> Path:
    return root / "deploy"


@pytest.fixture(scope="module")
def rules(deploy: Path) -> list[dict[str, Any]]:
    """Recording rules, then alerts."""
    files = [
        yaml.safe_load((deploy / "prometheus" / f"{name}.yml").read_text())
        for name in ("recording", "alerts")
    ]
    return [rule for file in files for group in file["groups"] for rule in group["rules"]]


@pytest.fixture(scope="module")
def alerts(rules: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {rule["alert"]: rule for rule in rules if "alert" in rule}


@pytest.fixture(scope="module")
def sections(deploy: Path) -> dict[str, str]:
    """The runbook's sections by heading."""
    parts = re.split(r"^## (\w+)$", (deploy / "runbook.md").read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def promtool(*arguments: str | Path) -> str:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# ---- what promtool says -------------------------------------------------------------------------------------------


def test_promtool_accepts_configuration_and_rules(deploy: Path, rules: list[dict[str, Any]]) -> None:
    answer = promtool("check", "config", deploy / "prometheus" / "prometheus.yml")
    found = [int(number) for number in re.findall(r"SUCCESS: (\d+) rules found", answer)]
    assert sum(found) == len(rules) > 0


def test_every_alert_fires_and_keeps_silent_as_its_unit_tests_say(
    deploy: Path, alerts: dict[str, dict[str, Any]]
) -> None:
    file = deploy / "prometheus" / "rules_test.yml"
    cases = [case for test in yaml.safe_load(file.read_text())["tests"] for case in test["alert_rule_test"]]
    assert {case["alertname"] for case in cases if case["exp_alerts"]} == alerts.keys()
    assert {case["alertname"] for case in cases if not case["exp_alerts"]} == alerts.keys()
    promtool("test", "rules", file)


def test_any_bound_is_rounded_up_to_a_bound_of_the_lag_buckets(deploy: Path, tmp_path: Path) -> None:
    rounded = {bound: LAG_BUCKETS[bisect.bisect_left(LAG_BUCKETS, bound)] for bound in range(33)}
    assert (rounded[4], rounded[5], rounded[9], rounded[17]) == (4, 6, 12, 32)
    series = [
        {"series": f'headway_max_version_lag_steps{{instance="{bound}"}}', "values": str(bound)}
        for bound in rounded
    ]
    samples = [
        {"labels": f'headway:max_version_lag_steps:bucket{{instance="{bound}"}}', "value": value}
        for bound, value in rounded.items()
    ]
    case = {"expr": "headway:max_version_lag_steps:bucket", "eval_time": "0s", "exp_samples": samples}
    test = {"interval": "15s", "input_series": series, "promql_expr_test": [case]}
    file = tmp_path / "test.yml"
    recording = str(deploy / "prometheus" / "recording.yml")
    file.write_text(
        yaml.safe_dump({"rule_files": [recording], "evaluation_interval": "15s", "tests": [test]})
    )
    promtool("test", "rules", file)


def test_shares_of_a_step_and_of_the_queue_are_what_they_are_called(deploy: Path, tmp_path: Path) -> None:
    """Steps of 10 s, every 10 s: 5 s of waiting, 4 s of passes, 1 s of publishing; 8 groups each, 12 in the queue, 36
    running."""
    series = {
        'headway_step_seconds_sum{stage="total"}': "0+10x60",
        'headway_step_seconds_count{stage="total"}': "0+1x60",
        'headway_step_seconds_sum{stage="forward_backward"}': "0+4x60",
        'headway_step_seconds_sum{stage="publish"}': "0+1x60",
        'headway_wait_seconds_sum{stage="learner_for_groups"}': "0+5x60",
        'headway_wait_seconds_sum{stage="gate"}': "0+2x60",
        'headway_groups_total{state="trained"}': "0+8x60",
        "headway_queue_groups": "12+0x60",
        "headway_groups_running": "36+0x60",
        "headway_generation_tokens_total": "0+500x60",
    }
    expected = {
        'headway:step_seconds:share5m{stage="forward_backward"}': 0.4,
        'headway:step_seconds:share5m{stage="publish"}': 0.1,
        "headway:learner_wait:share10m": 0.5,
        "headway:gate_wait:share10m": 0.2,
        "headway:groups_per_batch:mean10m": 8,
        "headway:queue_batches:mean10m": 1.5,
        "headway:queue_groups:share": 0.25,
        "headway:generation_tokens:rate5m": 50,
        'headway:step_seconds:mean5m{stage="total"}': 10,
    }
    cases = [
        {"expr": name, "eval_time": "10m", "exp_samples": [{"labels": name, "value": value}]}
        for name, value in expected.items()
    ]
    test = {
        "interval": "10s",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": cases,
    }
    file = tmp_path / "test.yml"
    recording = str(deploy / "prometheus" / "recording.yml")
    file.write_text(
        yaml.safe_dump({"rule_files": [recording], "evaluation_interval": "10s", "tests": [test]})
    )
    promtool("test", "rules", file)


# ---- names that exist ---------------------------------------------------------------------------------------------


def test_rules_use_series_that_exist_as_what_they_are(rules: list[dict[str, Any]]) -> None:
    recorded = {rule["record"] for rule in rules if "record" in rule}
    for rule in rules:
        expr = rule["expr"]
        used = set(re.findall(r"\bheadway_\w+", expr))
        assert used <= SERIES, (expr, used - SERIES)
        assert set(re.findall(r"\bheadway:\w+:\w+", expr)) <= recorded, expr
        # Counters are looked at by how they rise. The mean of a whole run is the quotient of two of them.
        for name in used & COUNTED:
            rising = rf"(rate|increase)\({name}(\{{[^}}]*\}})?\["
            assert re.search(rising, expr) or rule.get("alert") == "HeadwayNoProgress", (name, expr)
        for name in used - COUNTED:
            assert not re.search(rf"(rate|increase)\({name}\b", expr), (name, expr)


def test_labels_in_rules_have_values_that_exist(rules: list[dict[str, Any]]) -> None:
    found = 0
    for rule in rules:
        for series, label, value in re.findall(r'\b(headway_\w+)\{(\w+)!?="([^"]*)"\}', rule["expr"]):
            metric = BY_NAME.get(series) or BY_NAME[series.rpartition("_")[0]]
            assert metric.label == label and value in metric.values, rule["expr"]
            found += 1
    assert found > 5


def test_every_alert_says_how_bad_it_is_what_it_is_and_where_to_read_on(
    alerts: dict[str, dict[str, Any]], sections: dict[str, str]
) -> None:
    assert list(sections) == [alert for alert in sections if alert in alerts]
    assert sections.keys() == alerts.keys()
    for name, alert in alerts.items():
        assert alert["labels"]["severity"] in ("critical", "warning")
        annotations = alert["annotations"]
        assert annotations.keys() == {"summary", "description", "runbook"}
        assert "$value" in annotations["description"] and "$labels.instance" in annotations["description"]
        assert annotations["runbook"] == f"deploy/runbook.md#{name.lower()}"


def test_the_runbook_names_only_what_exists(sections: dict[str, str], rules: list[dict[str, Any]]) -> None:
    known = {key for key, _ in keys()}
    recorded = {rule["record"] for rule in rules if "record" in rule}
    commands = typer.main.get_command(app).commands.keys()  # pyright: ignore[reportAttributeAccessIssue]
    for heading, text in sections.items():
        assert [part in text for part in ("**Means:**", "**Look at:**", "**Change:**")] == [True] * 3, heading
        for word in re.findall(r"[a-z_]+\.[a-z_]+", re.sub(r"\S+\.log\b|\S+/\S+", "", text)):
            assert word in known or word.endswith(FILES), f"{heading}: {word}"
        names = set(re.findall(r"\bheadway_\w+", text))
        assert names <= BY_NAME.keys(), f"{heading}: {names - BY_NAME.keys()}"
        assert set(re.findall(r"\bheadway:\w+:\w+", text)) <= recorded, heading
        assert set(re.findall(r"`headway (\w+)", text)) <= commands, heading
        for target in re.findall(r"\]\(#(\w+)\)", text):
            assert target in map(str.lower, sections), f"{heading}: {target}"


def test_the_runbook_marks_the_keys_that_need_a_new_run(sections: dict[str, str]) -> None:
    marks = {
        (key, bool(mark))
        for text in sections.values()
        for key, mark in re.findall(r"`([a-z]+\.[a-z_]+)(?:=[^`\s]*)?`(†?)", text)
    }
    assert ("lag.max_version_lag", True) in marks and ("queue.max_mib", False) in marks
    for key, marked in marks:
        assert marked == (key not in MAY_CHANGE and key.split(".")[0] not in MAY_CHANGE_SECTIONS), key


# ---- a real Prometheus --------------------------------------------------------------------------------------------


class Prometheus:
    """The API of a server on this machine."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def get(self, path: str) -> bytes:
        with urllib.request.urlopen(self._url + path, timeout=5) as answer:
            return answer.read()

    def is_ready(self) -> bool:
        try:
            return bool(self.get("/-/ready"))
        except OSError:
            return False

    def states(self) -> dict[str, str]:
        """State of every alert that is not inactive, by name."""
        found = json.loads(self.get("/api/v1/alerts"))["data"]["alerts"]
        return {alert["labels"]["alertname"]: alert["state"] for alert in found}

    def query(self, expr: str) -> list[dict[str, Any]]:
        answer = self.get("/api/v1/query?" + urllib.parse.urlencode({"query": expr}))
        return json.loads(answer)["data"]["result"]


@contextmanager
def prometheus(folder: Path, config: Path) -> Iterator[Prometheus]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = (folder / "prometheus.log").open("w")
    command = [
        "prometheus",
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            yield Prometheus(port)
        finally:
            process.kill()


def test_a_real_prometheus_sees_the_lag_pass_its_bound_and_come_back(deploy: Path, tmp_path: Path) -> None:
    """The shipped configuration and rules, with their times shortened: seconds for minutes."""
    config = yaml.safe_load((deploy / "prometheus" / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "250ms", "evaluation_interval": "250ms"}
    config["rule_files"] = ["recording.yml", "alerts.yml"]
    runs = next(job for job in config["scrape_configs"] if job["job_name"] == "headway-runs")
    runs["file_sd_configs"] = [{"files": ["*.targets.json"]}]
    config["scrape_configs"] = [runs]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    for name in config["rule_files"]:
        text = (deploy / "prometheus" / name).read_text()
        text = re.sub(r"for: \d+m", "for: 1s", text)
        (tmp_path / name).write_text(text.replace("[5m]", "[3s]").replace("[15m]", "[3s]"))

    recorder, exporter = Recorder(), Exporter()
    port = exporter.serve("127.0.0.1", 0)
    targets = tmp_path / "demo.targets.json"
    targets.write_text(json.dumps([{"targets": [f"127.0.0.1:{port}"], "labels": {"run": "demo"}}]))
    recorder.set("headway_max_version_lag_steps", 2)
    recorder.set("headway_learner_version", 7)
    recorder.set("headway_last_step_timestamp_seconds", time.time())

    def train_until(condition: Callable[[], bool], lag: int) -> None:
        """Groups with this version lag, until the condition holds."""
        end = time.monotonic() + 15
        while not condition():
            assert time.monotonic() < end, (
                server.states(),
                (tmp_path / "prometheus.log").read_text()[-2000:],
            )
            recorder.observe("headway_version_lag_steps", [lag] * 8, label="total")
            exporter.apply(recorder.drain())
            time.sleep(0.1)

    lag_alert, down_alert = "HeadwayLagOverBound", "HeadwayEndpointDown"
    highest = 'headway:version_lag_steps:max5m{phase="total", run="demo"}'
    with prometheus(tmp_path, tmp_path / "prometheus.yml") as server:
        try:
            train_until(server.is_ready, lag=2)
            train_until(lambda: [row["value"][1] for row in server.query(highest)] == ["2"], lag=2)
            assert server.states() == {}
            train_until(lambda: server.states().get(lag_alert) == "firing", lag=4)
            assert [row["metric"]["run"] for row in server.query(f'ALERTS{{alertname="{lag_alert}"}}')] == [
                "demo"
            ]
            train_until(lambda: lag_alert not in server.states(), lag=1)
        finally:
            exporter.close()
        train_until(lambda: server.states().get(down_alert) == "firing", lag=1)
        # What a run does at its end.
        targets.unlink()
        train_until(lambda: server.states() == {}, lag=1)
