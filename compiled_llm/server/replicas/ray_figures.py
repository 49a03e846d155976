"""Figures of replicas and of routing, in Ray's metrics, where Prometheus finds them with the replica's name."""

from __future__ import annotations

from ray.serve.metrics import Counter, Gauge

from compiled_llm.protocol.messages import StatsReply
from compiled_llm.server.openai.figures import COUNTERS, GAUGES, HISTOGRAMS, PAGES, STATES, UNCOMPILED, cumulative


class ReplicaFigures:
    """The figures of a replica's engine process, by the names of ``/metrics``, before which Ray puts ``ray_``."""

    def __init__(self) -> None:
        self._gauges = {name: Gauge(f"compiled_llm_{name}", text) for name, text in GAUGES.items()}
        self._counters = {name: Counter(f"compiled_llm_{name}_total", text) for name, text in COUNTERS.items()}
        self._uncompiled = Gauge("compiled_llm_uncompiled", UNCOMPILED)
        # As gauges, by the names of a histogram: Ray's own takes waits one by one, and not how many there were.
        self._buckets = {
            field: Gauge(f"compiled_llm_{name}_bucket", text, ("le",)) for name, (field, text) in HISTOGRAMS.items()
        }
        self._sums = {field: Gauge(f"compiled_llm_{name}_sum", text) for name, (field, text) in HISTOGRAMS.items()}
        self._counts = {field: Gauge(f"compiled_llm_{name}_count", text) for name, (field, text) in HISTOGRAMS.items()}
        self._pages = Gauge("compiled_llm_pages", PAGES, ("state",))
        self._counted = dict.fromkeys(COUNTERS, 0)

    def tell(self, stats: StatsReply) -> None:
        for name, gauge in self._gauges.items():
            gauge.set(getattr(stats, name))
        for name, counter in self._counters.items():
            new, self._counted[name] = getattr(stats, name) - self._counted[name], getattr(stats, name)
            if new:
                counter.inc(new)
        self._uncompiled.set(int(stats.uncompiled is not None))
        for field in self._buckets:
            if (found := getattr(stats, field)) is not None:
                for bound, count in cumulative(found.counts):
                    self._buckets[field].set(count, {"le": bound})
                self._sums[field].set(found.seconds)
                self._counts[field].set(sum(found.counts))
        for state in STATES if stats.pages is not None else ():
            self._pages.set(getattr(stats.pages, state), {"state": state})


class RoutedFigure:
    """A count of prompts routed by their leading pages, and of those routed by the length of queues."""

    def __init__(self) -> None:
        self._routed = Counter("compiled_llm_routed_total", "Prompts by why a replica was chosen", ("by",))

    def count(self, by_pages: bool) -> None:
        self._routed.inc(1, {"by": "pages" if by_pages else "queue"})
