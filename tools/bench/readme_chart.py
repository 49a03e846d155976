"""Draw README's chart from two published runs: small enough for a phone, with a model that fills the GPU.

``python tools/bench/readme_chart.py`` writes ``docs/speed.svg``.
"""

from __future__ import annotations

from pathlib import Path

from tables import load

from compiled_llm.commands.bench import chart

CHECKOUT = Path(__file__).parents[2]
RUNS = {
    "Qwen3-0.6B": CHECKOUT / "results" / "02fa1c3-latency-qwen3-0.6b.json",
    "Qwen3-8B": CHECKOUT / "results" / "439edf7-latency-qwen3-8b.json",
}
BATCHES = ("batch 1", "batch 32")
DARK = {"#ffffff": "#0d1117", "#000000": "#e6edf3", "#666666": "#9198a1", "#08306b": "#58a6ff", "#4c4c4c": "#b0b0b0"}
"""Colours for readers of dark pages, in place of those that an SVG has."""


def speeds() -> chart.Speeds:
    """Return the rates of both models, a panel for each batch size."""
    runs = {model: chart.speeds_of(load(path)) for model, path in RUNS.items()}
    rates = {f"{model}, {batch}": run.rates[batch] for model, run in runs.items() for batch in BATCHES}
    contenders = next(iter(runs.values())).contenders
    asked = next(iter(runs.values())).asked.partition(";")[0]
    title = "Tokens per second, end to end, on an NVIDIA H100"
    return chart.Speeds(title, f"{asked}; bfloat16;\neach panel has its own scale", rates, contenders)


def draw(path: Path) -> None:
    """Write the chart; its panels are narrow, so that a phone's reader can read the letters."""
    chart.draw(speeds(), path, columns=2, panel_width=1.75)
    path.write_text(with_dark_colours(path.read_text()))


def with_dark_colours(svg: str) -> str:
    """Return a picture that readers of dark pages see in other colours; matplotlib writes them into each shape."""
    rules = [
        f'[style*="{part}: {light}"] {{{part}: {dark} !important}}'
        for light, dark in DARK.items()
        for part in ("fill", "stroke")
    ]
    rules.append(f"svg {{fill: {DARK['#000000']}}}")  # letters have the colour that is not said
    style = f"<style>@media (prefers-color-scheme: dark) {{{' '.join(rules)}}}</style>"
    return svg.replace(" <defs>", f" {style}\n <defs>", 1)


if __name__ == "__main__":
    draw(CHECKOUT / "docs" / "speed.svg")
