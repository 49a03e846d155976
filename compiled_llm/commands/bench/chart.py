"""A chart of ``bench latency``, drawn from a result's figures alone; nothing but this file imports matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from compiled_llm.commands.bench.report import BenchReport, Result

_KINDS = ("svg", "png", "pdf")
_PANELS_IN_A_ROW = 4
NAMES = {
    "hf-eager": "HuggingFace",
    "hf-static": "HuggingFace, compiled",
    "vllm": "vLLM",
    "compiled-llm:cuda-graphs": "compiled_llm",
}
"""Names in the chart, from top to bottom; other contenders follow under their own."""
COLOURS = {
    "hf-eager": "#8c8c8c",
    "hf-static": "#4c4c4c",
    "compiled-llm:eager": "#9ecae1",
    "compiled-llm:compile": "#4292c6",
    "compiled-llm:reduce-overhead": "#2171b5",
    "compiled-llm:cuda-graphs": "#08306b",
    "compiled-llm:piecewise": "#c51b8a",
    "compiled-llm:cuda-graphs:flashinfer": "#756bb1",
    "compiled-llm:cuda-graphs:triton": "#41ab5d",
    "vllm": "#e6550d",
}


class Speeds(NamedTuple):
    """The chart's texts, and tokens/s by panel, which its workload names, and contender, from top to bottom."""

    title: str
    asked: str
    rates: dict[str, dict[str, float]]
    contenders: list[str]


def speeds_of(report: BenchReport) -> Speeds:
    """Return the rates of a report, of greedy decoding if both were measured; raises ValueError without any."""
    found: list[Result] = report.results.get("latency", [])
    found = [result for result in found if not result["sampled"]] or found
    if not found:
        raise ValueError("a chart needs results of `bench latency`: leave --plot out")
    found = sorted(found, key=lambda result: (result["prompt"], result["new"], result["batch"]))
    lengths = dict.fromkeys((result["prompt"], result["new"]) for result in found)
    rates: dict[str, dict[str, float]] = {}
    for result in found:
        panel = f"batch {result['batch']}" + (f", {result['prompt']} + {result['new']}" if len(lengths) > 1 else "")
        rates.setdefault(panel, {})[result["contender"]] = result["figures"]["end_to_end_tokens_per_s"]["median"]
    measured = dict.fromkeys(result["contender"] for result in found)
    names = [*(name for name in NAMES if name in measured), *(name for name in measured if name not in NAMES)]
    model = report.model
    machine = report.machine
    first = found[0]
    where = (machine["gpu"] or machine["cpu"])["name"]
    commit = machine["commit"]
    tokens = f"prompts of {first['prompt']} tokens, {first['new']} new tokens"
    asked = tokens if len(lengths) == 1 else "prompt + new tokens"
    asked += f", {'sampled' if first['sampled'] else 'greedy'}; {machine['date'][:10]}"
    asked += (f", commit {commit[:7]}" if commit else "") + "; each panel has its own scale"
    title = f"{model['name']} ({model['weights']} weights, {model['dtype']}) on {where}"
    return Speeds(f"{title}: tokens per second, end to end", asked, rates, names)


def draw(speeds: Speeds, path: Path, columns: int = _PANELS_IN_A_ROW, panel_width: float = 2.05) -> None:
    """Write the chart, panels of ``panel_width`` inches, as the kind of picture that the file's name ends with."""
    kind = path.suffix.removeprefix(".").lower()
    if kind not in _KINDS:
        raise ValueError(f"{path}: the name of a picture ends with .{', .'.join(_KINDS)}")
    with mpl.rc_context():
        mpl.rcdefaults()  # not those of a matplotlibrc in the current folder
        mpl.rcParams.update({"font.size": 10, "svg.hashsalt": "compiled_llm"})  # with a salt, SVGs can be repeated
        columns = min(columns, len(speeds.rates))
        rows = -(-len(speeds.rates) // columns)
        size = (1.8 + panel_width * columns, 1.2 + 0.32 * len(speeds.contenders) * rows)
        figure = Figure(figsize=size, layout="constrained")
        panels = list(figure.subplots(rows, columns, squeeze=False, sharey=True).flat)
        for panel, (title, rates) in zip(panels, speeds.rates.items(), strict=False):
            panel.set_title(title, fontsize=10, loc="left")
            _bars(panel, speeds.contenders, rates)
        for empty in panels[len(speeds.rates) :]:
            empty.set_axis_off()
        figure.suptitle(speeds.title, fontsize=11, x=0.01, ha="left")
        figure.supxlabel(speeds.asked, fontsize=8, color="#666666", x=0.01, ha="left")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150, format=kind, metadata={"Date": None} if kind == "svg" else None)


def _bars(panel: Axes, contenders: Sequence[str], rates: dict[str, float]) -> None:
    rows = [row for row, name in enumerate(contenders) if name in rates]
    values = [rates[contenders[row]] for row in rows]
    panel.barh(rows, values, height=0.72, color=[COLOURS.get(contenders[row], "#bbbbbb") for row in rows])
    for row, value in zip(rows, values, strict=True):
        panel.annotate(f" {value:,.0f}", (value, row), va="center", fontsize=9)
    for row in {*range(len(contenders))}.difference(rows):
        panel.annotate(" not measured", (0, row), va="center", fontsize=8, color="#666666")
    panel.set_yticks(range(len(contenders)), [NAMES.get(name, name) for name in contenders])
    panel.tick_params(axis="y", length=0)
    panel.set_ylim(len(contenders) - 0.5, -0.5)
    panel.set_xticks([])
    panel.spines[["top", "right", "bottom"]].set_visible(False)
    panel.margins(x=0.4)
