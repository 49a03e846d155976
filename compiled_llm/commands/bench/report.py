"""What a run of the bench found: a header that says where and how, and results; to JSON and back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from compiled_llm.commands.bench.graph_results import GraphTimes, GraphUse
from compiled_llm.commands.bench.results import (
    Latency,
    ManyStreams,
    Offline,
    OneStream,
    Online,
    Roofline,
    Startup,
    Task,
)
from compiled_llm.commands.bench.timing import Percentiles
from compiled_llm.explaining.profile.breakdown import Kernel, Kind

SCHEMA = 1


@dataclass
class Report:
    """One run of the bench.

    Attributes:
        command: the command line.
        machine: versions, GPU, clocks, CPU, commit; see ``machine.py``.
        model: its name, weights and dtype.
        read_bandwidth: bytes/s, measured in this run; None if nothing needed it.
        latency: results of ``bench latency``.
        startup: results of ``bench startup``.
        roofline: results of ``bench roofline``.
        beams_and_drafts: results of ``bench beams-and-drafts``.
        offline: results of ``bench offline``.
        online: results of ``bench online``, and of ``bench serve``.
        one_stream: results of ``bench serve``, for requests one after the other.
        many_streams: and for many at once.
        graph_times: results of ``bench graphs``.
        graph_use: and what graphs they took.
        memory: bytes on the device by contender.
        unavailable: why contenders could not take part.
        failures: what went wrong with those that did.
    """

    command: str
    machine: dict[str, Any]
    model: dict[str, Any]
    read_bandwidth: float | None = None
    latency: list[Latency] = field(default_factory=list)
    startup: list[Startup] = field(default_factory=list)
    roofline: list[Roofline] = field(default_factory=list)
    beams_and_drafts: list[Task] = field(default_factory=list)
    offline: list[Offline] = field(default_factory=list)
    online: list[Online] = field(default_factory=list)
    one_stream: list[OneStream] = field(default_factory=list)
    many_streams: list[ManyStreams] = field(default_factory=list)
    graph_times: list[GraphTimes] = field(default_factory=list)
    graph_use: list[GraphUse] = field(default_factory=list)
    memory: dict[str, dict[str, int]] = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        """Whether nothing was measured."""
        return not any(getattr(self, kind) for kind in KINDS)

    def save(self, path: Path) -> None:
        """Write JSON."""
        results = {kind: _with_figures(getattr(self, kind)) for kind in KINDS}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"schema": SCHEMA, **asdict(self), **results}, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Report:
        """Read what ``save`` wrote.

        Raises:
            ValueError: it is something else.
        """
        try:
            found = json.loads(path.read_text())
            if found.pop("schema") != SCHEMA:
                raise ValueError(f"schema {SCHEMA} is needed")
            for kind, result in KINDS.items():
                found[kind] = [result(**fields) for fields in _without_figures(found.get(kind, []))]
            return cls(**found)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is no result of compiled-llm bench: {error}") from error


def _roofline(**fields: Any) -> Roofline:
    kinds = [Kind(**kind) for kind in fields["kinds"]]
    kernels = [Kernel(**kernel) for kernel in fields["kernels"]]
    return Roofline(**{**fields, "kinds": kinds, "kernels": kernels})


def _online(**fields: Any) -> Online:
    times = {name: Percentiles(**fields[name]) for name in ("first_s", "between_s", "end_s")}
    return Online(**{**fields, **times})


def _one_stream(**fields: Any) -> OneStream:
    return OneStream(**{**fields, "between_s": Percentiles(**fields["between_s"])})


def _many_streams(**fields: Any) -> ManyStreams:
    return ManyStreams(**{**fields, "first_s": Percentiles(**fields["first_s"])})


def _graph_times(**fields: Any) -> GraphTimes:
    return GraphTimes(**{**fields, "between_s": Percentiles(**fields["between_s"])})


KINDS: dict[str, Callable[..., Any]] = {
    "latency": Latency,
    "startup": Startup,
    "roofline": _roofline,
    "beams_and_drafts": Task,
    "offline": Offline,
    "online": _online,
    "one_stream": _one_stream,
    "many_streams": _many_streams,
    "graph_times": _graph_times,
    "graph_use": GraphUse,
}
"""The lists of results, and what builds a result from its fields."""


def _with_figures(results: Iterable[Any]) -> list[dict[str, Any]]:
    return [{**asdict(result), "figures": result.figures()} for result in results]


def _without_figures(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in result.items() if name != "figures"} for result in results]
