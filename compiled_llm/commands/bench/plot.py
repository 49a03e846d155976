"""A report as a picture. Nothing but this file, those that it draws with and ``chart.py`` imports matplotlib."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure, SubFigure

from compiled_llm.commands.bench.bars import draw_offline, draw_roofline, draw_startup
from compiled_llm.commands.bench.curves import draw_latency
from compiled_llm.commands.bench.graph_curves import draw_graphs
from compiled_llm.commands.bench.plot_style import DPI, paper, style
from compiled_llm.commands.bench.report import Report
from compiled_llm.commands.bench.tables import versions
from compiled_llm.commands.bench.waiting_curves import draw_online

LINE = 7 * 1.5 / 72
"""Inches that a line of the small print is high."""
CHARACTERS = 19
"""Of the small print that an inch has room for."""
_SMALL: dict[str, Any] = {"fontsize": 7, "color": "#666666", "linespacing": 1.5, "parse_math": False}


def draw(report: Report, path: Path) -> None:
    """Write a PNG of the report's first kind of result.

    Raises:
        ValueError: that kind has no plot.
    """
    with style({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure_of(report).savefig(path, dpi=DPI, format="png")


def figure_of(report: Report) -> Figure:
    """Draw the report's first kind of result, with model and machine above it, versions and command line below.

    Raises:
        ValueError: that kind has no plot.
    """
    frame = Frame(_caption(report), [versions(report), report.command])
    if report.latency:
        draw_latency(report.latency, frame.new)
    elif report.startup:
        draw_startup(report.startup, frame.new)
    elif report.roofline:
        draw_roofline(report.roofline, frame.new)
    elif report.offline:
        draw_offline(report.offline, frame.new)
    elif report.online:
        draw_online(report.online, frame.new)
    elif report.graph_times:
        draw_graphs(report.graph_times, frame.new)
    else:
        raise ValueError("there is no plot of these results: leave --plot out")
    return frame.figure


class Frame:
    """What stands around a picture.

    Attributes:
        title: above it.
        small_print: below it, to be wrapped.
        figure: all of it, once something is drawn.
    """

    figure: Figure

    def __init__(self, title: str, small_print: Sequence[str]) -> None:
        """Frame nothing yet: how large the picture will be, its kind decides."""
        self.title = title
        self.small_print = small_print

    def new(self, width: float, height: float) -> SubFigure:
        """Return so many inches to draw on."""
        columns = int(width * CHARACTERS)
        lines = [part for line in self.small_print for part in textwrap.wrap(line, columns, break_on_hyphens=False)]
        below = LINE * len(lines) + 0.1
        self.figure = paper(width, height + below)
        grid = self.figure.add_gridspec(2, 1, height_ratios=(height, below))
        body, foot = self.figure.add_subfigure(grid[0]), self.figure.add_subfigure(grid[1])
        foot.text(0.01, 1, "\n".join(lines), va="top", **_SMALL)
        body.suptitle(self.title, fontsize=9, color="#444444", parse_math=False)
        return body


def _caption(report: Report) -> str:
    machine, model = report.machine, report.model
    where = machine["gpu"]["name"] if machine["gpu"] else machine["cpu"]["name"]
    return f"{model['name']} ({model['weights']} weights, {model['dtype']}) on {where}"
