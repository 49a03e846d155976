"""Results of ``bench graphs`` as curves over the length of prompts: colours are contenders, lines states of graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import FigureBase
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from compiled_llm.commands.bench.curves import FAR_APART
from compiled_llm.commands.bench.graph_results import GraphTimes
from compiled_llm.commands.bench.plot_style import COLOURS, MARKERS, Paper, paper
from compiled_llm.commands.bench.timing import Percentiles

_LINES = {"prepared": "-", "on demand": ":", "evicted": "--"}
_FIGURES: dict[str, Callable[[GraphTimes], float | None]] = {
    "first token, ms: half of all": lambda result: result.first.p50,
    "between tokens, ms: 99 of 100": lambda result: result.between_s.p99,
    "running meanwhile, ms: longest wait, half of all": lambda result: _half(result.running),
}


def draw_graphs(results: Sequence[GraphTimes], new: Paper = paper) -> FigureBase:
    """Return the first token, the time between tokens, and what a request that runs meanwhile waits."""
    figure = new(15.0, 5.0)
    panels = figure.subplots(1, len(_FIGURES))
    for panel, (label, value) in zip(panels, _FIGURES.items(), strict=True):
        _panel(panel, results, value)
        panel.set_title(f"{label} (less is better)", fontsize=9)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure


def _panel(panel: Axes, results: Sequence[GraphTimes], value: Callable[[GraphTimes], float | None]) -> None:
    names = list(dict.fromkeys(result.contender for result in results))
    for name, recordings in dict.fromkeys((result.contender, result.recordings) for result in results):
        line = [result for result in results if (result.contender, result.recordings) == (name, recordings)]
        points = sorted((result.prompt, 1e3 * seconds) for result in line if (seconds := value(result)) is not None)
        panel.plot(
            [prompt for prompt, _ in points],
            [milliseconds for _, milliseconds in points],
            color=COLOURS.get(name, f"C{names.index(name)}"),
            marker=MARKERS[names.index(name) % len(MARKERS)],
            markersize=4,
            linestyle=_LINES[recordings],
            label=f"{name}, {recordings}",
        )
    _scaled(panel)
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    panel.set_xticks(sorted({result.prompt for result in results}))
    panel.set_xlabel("tokens of the prompt")
    panel.grid(visible=True, color="#e5e5e5")


def _scaled(panel: Axes) -> None:
    """What is missing may take many times as long as what is there."""
    drawn = [float(height) for line in panel.get_lines() for height in np.asarray(line.get_ydata())]
    if drawn and max(drawn) > FAR_APART * min(drawn):
        panel.set_yscale("log")
        panel.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        panel.yaxis.set_minor_locator(NullLocator())
    else:
        panel.set_ylim(bottom=0)


def _half(times: Percentiles | None) -> float | None:
    return None if times is None else times.p50
