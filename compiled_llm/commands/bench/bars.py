"""Horizontal bars: times of a start, times of a decode step, rates of a single workload."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import FigureBase
from matplotlib.ticker import FuncFormatter

from compiled_llm.commands.bench.plot_style import COLOURS, Paper, paper
from compiled_llm.commands.bench.results import Latency, Offline, Roofline, Startup
from compiled_llm.explaining.profile.kernels import KINDS

_STARTED = {"cold": "cold caches", "warm": "warm caches", "artifacts": "artifacts"}
REST = "nothing of these runs"
"""What is left of a step."""


def draw_rates(results: Sequence[Latency], new: Paper = paper) -> FigureBase:
    """Return the decode rate of each result, in bars."""
    return _rates(results, [result.decode.median for result in results], "decode", new)


def draw_offline(results: Sequence[Offline], new: Paper = paper) -> FigureBase:
    """Return the rate of each result over the whole workload, in bars."""
    return _rates(results, [result.rate.median for result in results], "over the whole", new)


def _rates(results: Sequence[Latency | Offline], rates: Sequence[float], what: str, new: Paper) -> FigureBase:
    names = [f"{result.contender}\n{result.workload}" for result in results]
    bars = [Bar(name, [rate], rate) for name, rate in zip(names, rates, strict=True)]
    figure, panel = _stacked(new, bars, [what], f"{what}, tokens/s (medians; more is better)")
    for patch, result in zip(panel.patches, results, strict=True):
        patch.set_color(COLOURS.get(result.contender, "C0"))
    return figure


def draw_startup(results: Sequence[Startup], new: Paper = paper) -> FigureBase:
    """Return the stages of each start, in bars."""
    stages = list(results[0].stages)
    bars = []
    for result in results:
        reached = [0.0, *(result.stage(stage).median for stage in stages)]
        lengths = [later - earlier for earlier, later in itertools.pairwise(reached)]
        bars.append(Bar(f"{result.contender}\n{_STARTED[result.cache]}", lengths, reached[-1]))
    label = "time from the start of the process, s (medians; less is better)"
    return _stacked(new, bars, [f"until {stage}" for stage in stages], label)[0]


def draw_roofline(results: Sequence[Roofline], new: Paper = paper) -> FigureBase:
    """Return the kinds of kernels of each step, in bars, beside what the memory's bandwidth asks for."""
    names = [kind for kind, _ in KINDS if any(kind == found.name for result in results for found in result.kinds)]
    bars = []
    for result in results:
        spent = {kind.name: kind.us for kind in result.kinds}
        lengths = [*(spent.get(name, 0.0) for name in names), result.gaps_us]
        bars.append(Bar(f"{result.contender}\n{result.workload}", lengths, result.step_us))
    label = "time of one decode step, µs (less is better; numbers: without the profiler)"
    figure, panel = _stacked(new, bars, [*names, REST], label)
    for row, result in enumerate(results):
        if result.weight_bytes is not None:
            least = (result.weight_bytes + result.kv_bytes) / result.read_bandwidth * 1e6
            label = "all bytes at the read bandwidth" if row == 0 else "_nolegend_"
            panel.vlines(least, row - 0.4, row + 0.4, color="black", linestyle=":", label=label)
    figure.legends.clear()
    _legend_below(figure, panel)
    return figure


class Bar(NamedTuple):
    """A bar of parts.

    Attributes:
        name: beside it.
        lengths: of its parts.
        total: the number at its end.
    """

    name: str
    lengths: list[float]
    total: float


def _stacked(new: Paper, bars: Sequence[Bar], parts: Sequence[str], label: str) -> tuple[FigureBase, Axes]:
    figure = new(10, 2.4 + 0.7 * len(bars))
    panel = figure.subplots()
    colours = mpl.colormaps["tab10"]
    rows = range(len(bars))
    left = [0.0] * len(bars)
    for number, part in enumerate(parts):
        lengths = [bar.lengths[number] for bar in bars]
        colour = "#d9d9d9" if part == REST else colours(number)
        panel.barh(rows, lengths, left=left, height=0.6, color=colour, label=part)
        left = [start + length for start, length in zip(left, lengths, strict=True)]
    for row, end in zip(rows, left, strict=True):
        panel.annotate(f" {bars[row].total:,.1f}", (end, row), va="center")
    panel.set_yticks(rows, [bar.name for bar in bars])
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    panel.invert_yaxis()
    panel.margins(x=0.1)
    panel.set_xlabel(label)
    if len(parts) > 1:
        _legend_below(figure, panel)
    return figure, panel


def _legend_below(figure: FigureBase, panel: Axes) -> None:
    handles, labels = panel.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
