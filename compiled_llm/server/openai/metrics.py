"""``/metrics``: the counts of the API server and the figures of the engine process, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from compiled_llm.client import EngineProcessError
from compiled_llm.protocol.messages import StatsReply
from compiled_llm.requests.histogram import BUCKETS
from compiled_llm.server.openai.common.api_server import api_server_of
from compiled_llm.server.openai.figures import (
    COUNTERS,
    FEATURES,
    GAUGES,
    HISTOGRAMS,
    PAGES,
    STATES,
    UNCOMPILED,
    cumulative,
)

router = APIRouter()

_PATIENCE = 5.0


class ApiServerMetrics:
    """The API server's own counts; in ``shared`` (``PROMETHEUS_MULTIPROC_DIR``) several servers count together."""

    def __init__(self, shared: Path | None = None) -> None:
        self.registry = CollectorRegistry()
        self._shared = shared
        names = ["path", "status"]
        self._requests = Counter(
            "compiled_llm_http_requests", "Requests that were answered", names, registry=self.registry
        )
        self._seconds = Histogram(
            "compiled_llm_http_seconds",
            "Until a response had gone out",
            ["path"],
            registry=self.registry,
            buckets=BUCKETS,
        )
        self.open = Gauge(
            "compiled_llm_http_open",
            "Requests that are being answered",
            registry=self.registry,
            multiprocess_mode="livesum",
        )

    def count(self, path: str, status: int, seconds: float) -> None:
        self._requests.labels(path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)

    def text(self) -> bytes:
        """Return the counts of all API servers, as Prometheus reads them."""
        if self._shared is None:
            return generate_latest(self.registry)
        registry = CollectorRegistry()
        MultiProcessCollector(registry, path=str(self._shared))
        return generate_latest(registry)


class _EngineCollector(Collector):
    def __init__(self, stats: StatsReply) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        for name, text in GAUGES.items():
            yield GaugeMetricFamily(f"compiled_llm_{name}", text, getattr(self._stats, name))
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(f"compiled_llm_{name}", text, getattr(self._stats, name))
        yield GaugeMetricFamily("compiled_llm_uncompiled", UNCOMPILED, int(self._stats.uncompiled is not None))
        for name, (field, text) in HISTOGRAMS.items():
            if (found := getattr(self._stats, field)) is not None:
                buckets = list(cumulative(found.counts))
                yield HistogramMetricFamily(f"compiled_llm_{name}", text, buckets, found.seconds)
        if self._stats.pages is not None:
            yield self._pages()
        for feature, fields in FEATURES.items():
            if (counts := getattr(self._stats, feature)) is not None:
                for field, (name, text) in fields.items():
                    yield self._counter(f"compiled_llm_{name}", text, getattr(counts, field))

    @staticmethod
    def _counter(name: str, text: str, count: int | list[int]) -> Metric:
        if isinstance(count, int):
            return CounterMetricFamily(name, text, count)
        family = CounterMetricFamily(name, text, labels=["position"])
        for position, each in enumerate(count):
            family.add_metric([str(position)], each)
        return family

    def _pages(self) -> Metric:
        family = GaugeMetricFamily("compiled_llm_pages", PAGES, labels=["state"])
        for state in STATES:
            family.add_metric([state], getattr(self._stats.pages, state))
        return family


@router.get("/metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    """Return figures for Prometheus; those of the engine process only if it answers."""
    text: bytes = request.app.state.metrics.text()
    if (stats := await _stats(request)) is not None:
        registry = CollectorRegistry()
        registry.register(_EngineCollector(stats))
        text += generate_latest(registry)
    return Response(text, media_type=CONTENT_TYPE_LATEST)


async def _stats(request: Request) -> StatsReply | None:
    link = api_server_of(request).link
    if not link.is_ready:
        return None
    try:
        return await link.model.client.stats(_PATIENCE)
    except (EngineProcessError, TimeoutError):
        return None
