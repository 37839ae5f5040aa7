"""The run's one Prometheus endpoint. Every value lives here, exact, in one process; actors send increments.

Ray's own metrics are not used for this: they rebuild histogram sums from bucket midpoints and drop gauges that
were not set lately.
"""

from __future__ import annotations

import errno
import itertools
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headway.core.metrics import BY_NAME, METRICS, Update

PORTS = 100
"""Ports that are tried, from the configured one on, before any other will do."""
LAST_PORT = 65_535
RETRY_S = 0.1


class Exporter(Collector):
    """Holds every series of the metric table, from the start at zero, and serves them over HTTP."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[tuple[str, str], float]
        self._histograms: dict[tuple[str, str], tuple[list[int], float]]
        self._server: WSGIServer | None = None
        self._is_silent = False
        self._reset()

    def _reset(self) -> None:
        self._values, self._histograms = {}, {}
        for metric in METRICS:
            for label in metric.values or (() if metric.label else ("",)):
                if metric.kind == "histogram":
                    self._histograms[metric.name, label] = ([0] * (len(metric.buckets) + 1), 0.0)
                else:
                    self._values[metric.name, label] = 0.0

    def serve(self, host: str, port: int, wait_s: float = 0.0) -> int:
        """Starts the endpoint; takes the next free port when this one is still taken after `wait_s`. Returns the
        port. Raises `OSError` for a host that is not this machine's, and a port that is not for everyone.

        With `wait_s` it takes the place of another one, and shows nothing before `restore`: a counter that fell to zero for a
        moment would count everything twice in `rate`, and a series that is away for a moment nothing."""
        registry = CollectorRegistry()
        registry.register(self)
        self._is_silent = wait_s > 0
        end = time.monotonic() + wait_s
        candidates = [*range(port, min(port + PORTS, LAST_PORT + 1)), 0]
        while True:
            try:
                self._server, _ = start_http_server(candidates[0], addr=host, registry=registry)
                return self._server.server_port
            except OSError as error:
                if error.errno != errno.EADDRINUSE or len(candidates) == 1:
                    raise
            if time.monotonic() < end:
                time.sleep(RETRY_S)
            else:
                del candidates[0]

    def apply(self, updates: list[Update]) -> None:
        """Adds counters and histograms, sets gauges."""
        with self._lock:
            for name, label, payload in updates:
                kind, key = BY_NAME[name].kind, (name, label)
                if isinstance(payload, tuple):
                    empty = ([0] * len(payload[0]), 0.0)
                    counts, total = self._histograms.get(key, empty)
                    self._histograms[key] = (
                        [a + b for a, b in zip(counts, payload[0], strict=True)],
                        total + payload[1],
                    )
                elif kind == "counter":
                    self._values[key] = self._values.get(key, 0.0) + payload
                else:
                    self._values[key] = payload

    def forget_replica(self, replica: str) -> None:
        """Drops the gauges of an engine that has left: they would show its last moment for ever. Its counters stay, or
        sums over replicas would fall."""
        with self._lock:
            for name, label in list(self._values):
                metric = BY_NAME[name]
                if metric.kind == "gauge" and metric.label == "replica" and label == replica:
                    del self._values[name, label]

    def value(self, name: str, label: str = "") -> float:
        """Current value of a counter or gauge."""
        with self._lock:
            return self._values[name, label]

    def state(self) -> dict[str, Any]:
        """Every series as JSON values."""
        with self._lock:
            by_kind = {"counters": "counter", "gauges": "gauge"}
            values = {
                group: [
                    [name, label, value]
                    for (name, label), value in self._values.items()
                    if BY_NAME[name].kind == kind
                ]
                for group, kind in by_kind.items()
            }
            histograms = [
                [name, label, list(counts), total]
                for (name, label), (counts, total) in self._histograms.items()
            ]
        return {**values, "histograms": histograms}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Replaces every series by those of a state; what it lacks starts anew. Metrics, labels and buckets of another
        version of the table are left out."""
        with self._lock:
            self._is_silent = False
            self._reset()
            for kind, group in (("counter", "counters"), ("gauge", "gauges")):
                for name, label, value in state.get(group, ()):
                    if _is_known(name, label, kind):
                        self._values[name, label] = value
            for name, label, counts, total in state.get("histograms", ()):
                if _is_known(name, label, "histogram") and len(counts) == len(BY_NAME[name].buckets) + 1:
                    self._histograms[name, label] = (list(counts), total)

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            if self._is_silent:
                return
            values = dict(self._values)
            histograms = {key: (list(counts), total) for key, (counts, total) in self._histograms.items()}
        for metric in METRICS:
            labels = [metric.label] if metric.label else []
            if metric.kind == "histogram":
                # With a negative bound there is no sum, which could fall, and so no count: OpenMetrics forbids it, and strict
                # readers refuse the whole page.
                is_rising = metric.buckets[0] >= 0
                family = Metric(metric.name, metric.help, "histogram")
                bounds = [*(f"{bound:g}" for bound in metric.buckets), "+Inf"]
                for (name, label), (counts, total) in histograms.items():
                    if name == metric.name:
                        own = {metric.label: label} if labels else {}
                        for bound, below in zip(bounds, itertools.accumulate(counts), strict=True):
                            family.add_sample(f"{name}_bucket", {"le": bound, **own}, below)
                        if is_rising:
                            family.add_sample(f"{name}_count", own, sum(counts))
                            family.add_sample(f"{name}_sum", own, total)
            else:
                make = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
                family = make(metric.name, metric.help, labels=labels)
                for (name, label), value in values.items():
                    if name == metric.name:
                        family.add_metric([label] if labels else [], value)
            yield family

    def close(self) -> None:
        if self._server:
            self._server.shutdown()
            self._server.server_close()


def _is_known(name: str, label: str, kind: str) -> bool:
    """Whether the table has this series. A label without listed values may have any."""
    metric = BY_NAME.get(name)
    if metric is None or metric.kind != kind:
        return False
    return label in metric.values if metric.values else bool(label) == bool(metric.label)
