"""Pages of HTML that need nothing else, light and dark, wide and narrow: the report, and with it those of a dump."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined  # comes with torch

from compiled_llm.explaining import wording
from compiled_llm.explaining.subject import head_rows, title_of

_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=StrictUndefined,
)


def render(template: str, **values: Any) -> str:
    """Return a page of ``templates/``; texts among the values are escaped."""
    return _TEMPLATES.get_template(template).render(values)


def page(data: dict[str, Any], home: str = "") -> str:
    """Return the page for a report's data, with a link back to ``home`` unless that is empty."""
    history = dict(wording.history_rows(data["history"] or {}))
    shown = {"title": title_of(data), "head": head_rows(data), "history": history}
    return render("report.html", data=data, home=home, words=wording, **shown)
