"""Figures of replicas and of routing, in Ray's metrics, where Prometheus finds them with the replica's name."""

from __future__ import annotations

from ray.serve.metrics import Counter, Gauge

from compiled_llm.protocol.messages import StatsReply
from compiled_llm.server.openai.figures import COUNTERS, GAUGES, PAGES, QUANTILES, STATES, WAITS


class ReplicaFigures:
    """The figures of a replica's engine process, by the names of ``/metrics``; Ray puts ``ray_`` before them.

    Ray adds the tags ``application``, ``deployment`` and ``replica``.
    """

    def __init__(self) -> None:
        self._gauges = {name: Gauge(f"compiled_llm_{name}", text) for name, text in GAUGES.items()}
        self._counters = {name: Counter(f"compiled_llm_{name}_total", text) for name, text in COUNTERS.items()}
        self._waits = {name: Gauge(f"compiled_llm_{name}", text, ("quantile",)) for name, text in WAITS.items()}
        self._pages = Gauge("compiled_llm_pages", PAGES, ("state",))
        self._counted = dict.fromkeys(COUNTERS, 0)

    def tell(self, stats: StatsReply) -> None:
        """Set the metrics to an engine process's figures."""
        for name, gauge in self._gauges.items():
            gauge.set(getattr(stats, name))
        for name, counter in self._counters.items():
            new, self._counted[name] = getattr(stats, name) - self._counted[name], getattr(stats, name)
            if new:
                counter.inc(new)
        for name, gauge in self._waits.items():
            if (found := getattr(stats, name)) is not None:
                for quantile, field in QUANTILES.items():
                    gauge.set(getattr(found, field), {"quantile": quantile})
        for state in STATES if stats.pages is not None else ():
            self._pages.set(getattr(stats.pages, state), {"state": state})


class RoutedFigure:
    """How many prompts were routed by their leading pages, and how many by the length of queues."""

    def __init__(self) -> None:
        self._routed = Counter("compiled_llm_routed_total", "Prompts by why a replica was chosen", ("by",))

    def count(self, by_pages: bool) -> None:
        self._routed.inc(1, {"by": "pages" if by_pages else "queue"})
