"""What the gateway counts, for Prometheus."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from connectors.gateway.feed import Feed
from connectors.results import Results

if TYPE_CHECKING:
    from prometheus_client.core import Metric

__all__ = ["GatewayMetrics"]

#: Around the promise of 300 ms, in seconds.
_LATENCY_BUCKETS = (0.025, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.6, 1.0, 2.0, 5.0)


class GatewayMetrics:
    """One gateway's metrics, in a registry of their own.

    Args:
        results: whose counts are reported as they are.
        feed: the same.
    """

    def __init__(self, results: Results, feed: Feed) -> None:
        self.registry = CollectorRegistry()
        self.records = Counter("asr_gateway_records_total", "Result records read, by kind.", ["record"], registry=self.registry)
        self.frame_latency = Histogram(
            "asr_gateway_frame_latency_seconds",
            "From a frame's capture until its answer could be read.",
            buckets=_LATENCY_BUCKETS,
            registry=self.registry,
        )
        self.clients = Gauge("asr_gateway_clients", "WebSocket clients connected.", registry=self.registry)
        self.sent = Counter("asr_gateway_messages_sent_total", "WebSocket messages sent after the opening.", registry=self.registry)
        self.replaced = Counter(
            "asr_gateway_messages_replaced_total", "Partials and the like that a slow client was spared.", registry=self.registry
        )
        self.overflows = Counter(
            "asr_gateway_overflows_total", "Clients sent away because they fell behind with finals.", registry=self.registry
        )
        self.registry.register(_ResultsCollector(results, feed))


class _ResultsCollector(Collector):
    """Reads counts where they are kept."""

    def __init__(self, results: Results, feed: Feed) -> None:
        self._results = results
        self._feed = feed

    def collect(self) -> Iterator[Metric]:
        dropped = CounterMetricFamily("asr_gateway_dropped", "Records passed over: repeats, and those of fenced writers.", labels=["why"])
        dropped.add_metric(["repeat"], self._results.repeats)
        dropped.add_metric(["fenced"], self._results.fenced)
        yield dropped
        yield CounterMetricFamily("asr_gateway_conflicts", "Finals that differed from the one that stands.", self._results.conflicts)
        sessions = GaugeMetricFamily("asr_gateway_sessions", "Sessions known, by state.", labels=["state"])
        tally = Tally(view.state for view in self._results.sessions.values())
        for state in ("open", "idle", "closed"):
            sessions.add_metric([state], tally[state])
        yield sessions
