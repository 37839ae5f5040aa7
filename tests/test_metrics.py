"""The endpoint: exact values, every series from the start, names that promtool accepts."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import threading
import urllib.request
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as strict

from headway.cluster.exporter import Exporter
from headway.core.config import Config
from headway.core.metrics import METRICS, Recorder


def scrape(exporter: Exporter) -> str:
    registry = CollectorRegistry()
    registry.register(exporter)
    return generate_latest(registry).decode()


def test_names_follow_the_rules() -> None:
    for metric in METRICS:
        assert re.fullmatch(r"headway_[a-z][a-z0-9_]*", metric.name)
        assert (metric.kind == "counter") == metric.name.endswith("_total")
        assert metric.help.endswith(".")
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def test_every_labelled_series_exists_at_zero_from_the_start() -> None:
    text = scrape(Exporter())
    assert 'headway_version_lag_steps_bucket{le="0",phase="total"} 0.0' in text
    assert 'headway_groups_dropped_total{reason="straggler"} 0.0' in text
    for metric in METRICS:
        assert (
            f"# TYPE {metric.name.removesuffix('_total') if metric.kind == 'counter' else metric.name}"
            in text
        )


def test_histogram_sums_are_exact_and_buckets_cumulative() -> None:
    recorder, exporter = Recorder(), Exporter()
    recorder.observe("headway_version_lag_steps", [0, 1, 1, 100, -0.0], label="total")
    exporter.apply(recorder.drain())
    recorder.observe("headway_version_lag_steps", [2], label="total")
    exporter.apply(recorder.drain())
    text = scrape(exporter)
    assert 'headway_version_lag_steps_sum{phase="total"} 104.0' in text
    assert 'headway_version_lag_steps_bucket{le="0",phase="total"} 2.0' in text
    assert 'headway_version_lag_steps_bucket{le="1",phase="total"} 4.0' in text
    assert 'headway_version_lag_steps_bucket{le="32",phase="total"} 5.0' in text
    assert 'headway_version_lag_steps_bucket{le="+Inf",phase="total"} 6.0' in text
    assert 'headway_version_lag_steps_count{phase="total"} 6.0' in text


def test_nan_is_counted_and_never_exported() -> None:
    recorder, exporter = Recorder(), Exporter()
    recorder.set("headway_loss", 1.5)
    recorder.set("headway_loss", float("nan"))
    recorder.observe("headway_reward", [float("inf"), 1.0])
    exporter.apply(recorder.drain())
    assert exporter.value("headway_loss") == 1.5
    assert exporter.value("headway_nonfinite_total") == 2
    samples = [line for line in scrape(exporter).splitlines() if not line.startswith("#")]
    assert not [line for line in samples if line.endswith(("NaN", "-0.0", "Inf"))]


def test_a_restored_endpoint_shows_what_the_state_says_and_nothing_else() -> None:
    recorder, exporter = Recorder(), Exporter()
    recorder.inc("headway_trained_tokens_total", 10)
    recorder.set("headway_queue_groups", 4)
    recorder.set("headway_engine_version", 7, label="3")
    recorder.observe("headway_reward", [1.0])
    exporter.apply(recorder.drain())
    recorder.inc("headway_trained_tokens_total", 1000)
    recorder.set("headway_engine_version", 2, label="5")
    other = Exporter()
    other.apply(recorder.drain())
    other.restore(json.loads(json.dumps(exporter.state())))
    assert scrape(other) == scrape(exporter)
    recorder.inc("headway_trained_tokens_total", 5)
    other.apply(recorder.drain())
    assert other.value("headway_trained_tokens_total") == 15
    assert exporter.value("headway_trained_tokens_total") == 10


def test_a_state_of_another_version_of_the_table_is_taken_as_far_as_it_goes() -> None:
    exporter = Exporter()
    exporter.restore(
        {
            "counters": [
                ["headway_gone_total", "", 1.0],
                ["headway_groups_total", "renamed", 2.0],
                ["headway_groups_total", "", 3.0],
                ["headway_trained_tokens_total", "labelled", 4.0],
                ["headway_loss", "", 5.0],
                ["headway_groups_total", "trained", 6.0],
            ],
            "histograms": [["headway_reward", "", [1, 2], 3.0], ["headway_reward", "x", [0] * 10, 3.0]],
        }
    )
    fresh = scrape(Exporter())
    changed = [line for line in scrape(exporter).splitlines() if line not in fresh.splitlines()]
    assert changed == ['headway_groups_total{state="trained"} 6.0']


def test_the_series_of_an_engine_that_has_left_go() -> None:
    recorder, exporter = Recorder(), Exporter()
    for replica in ("1", "12"):
        recorder.set("headway_engine_version", 3, label=replica)
        recorder.inc("headway_engine_preemptions_total", 2, label=replica)
    exporter.apply(recorder.drain())
    exporter.forget_replica("1")
    assert [line for line in scrape(exporter).splitlines() if "replica=" in line] == [
        'headway_engine_version{replica="12"} 3.0',
        'headway_engine_preemptions_total{replica="1"} 2.0',
        'headway_engine_preemptions_total{replica="12"} 2.0',
    ]


def test_an_endpoint_that_starts_again_waits_for_its_port() -> None:
    first, second = Exporter(), Exporter()
    port = first.serve("127.0.0.1", 0)
    timer = threading.Timer(0.3, first.close)
    timer.start()
    try:
        assert second.serve("127.0.0.1", port, wait_s=10) == port
    finally:
        timer.join()
        second.close()


def test_two_exporters_live_side_by_side_and_a_taken_port_is_passed_over() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        first, second = Exporter(), Exporter()
        try:
            first_port = first.serve("127.0.0.1", port)
            second_port = second.serve("127.0.0.1", port)
            assert port < first_port < second_port
            with urllib.request.urlopen(f"http://127.0.0.1:{second_port}/metrics", timeout=5) as answer:
                assert b"headway_learner_version 0.0" in answer.read()
        finally:
            first.close()
            second.close()


def test_promtool_has_nothing_to_say() -> None:
    recorder, exporter = Recorder(), Exporter()
    recorder.set("headway_engine_version", 3, label="0")
    recorder.observe("headway_step_seconds", [1.0], label="total")
    exporter.apply(recorder.drain())
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=scrape(exporter), capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_strict_reader_of_openmetrics_has_nothing_to_say() -> None:
    recorder, exporter = Recorder(), Exporter()
    recorder.observe("headway_reward", [-1.0, 0.5])
    exporter.apply(recorder.drain())
    registry = CollectorRegistry()
    registry.register(exporter)
    families = {family.name: family for family in strict(openmetrics(registry).decode())}
    assert [sample.value for sample in families["headway_reward"].samples][-1] == 2
    assert len(families) == len(METRICS)


def test_a_metric_that_is_not_in_the_table_is_a_bug() -> None:
    with pytest.raises(KeyError):
        Recorder().inc("headway_typo_total")


def test_the_shipped_scrape_configuration_is_valid(root: Path) -> None:
    config = root / "deploy" / "prometheus" / "prometheus.yml"
    done = subprocess.run(["promtool", "check", "config", config], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"localhost:{Config().metrics.port}" in config.read_text()
