"""Colours, and matplotlib's settings, of every picture that the bench draws."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import matplotlib as mpl
from matplotlib.figure import Figure, FigureBase

Paper: TypeAlias = Callable[[float, float], FigureBase]
"""Gives so many inches, wide and high, to draw on."""

COLOURS = {
    "hf-eager": "#8c8c8c",
    "hf-static": "#4c4c4c",
    "compiled-llm:eager": "#9ecae1",
    "compiled-llm:compile": "#4292c6",
    "compiled-llm:reduce-overhead": "#2171b5",
    "compiled-llm:cuda-graphs": "#08306b",
    "compiled-llm:pieces": "#c51b8a",
    "compiled-llm:cuda-graphs:flashinfer": "#756bb1",
    "compiled-llm:engine": "#08306b",
    "compiled-llm:socket": "#4292c6",
    "compiled-llm:socket-busy-poll": "#2171b5",
    "compiled-llm:http": "#756bb1",
    "hf-batch": "#8c8c8c",
    "vllm": "#e6550d",
    "sglang": "#31a354",
}
MARKERS = "osD^vP*X"
DPI = 150


@contextmanager
def style(settings: dict[Any, Any]) -> Iterator[None]:
    """Draw with matplotlib's defaults and these settings: it has read those of a matplotlibrc in the current folder."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(settings)
        yield


def paper(width: float, height: float) -> Figure:
    """Return an empty figure of so many inches."""
    return Figure(figsize=(width, height), layout="constrained")
