"""The report as one HTML page."""

from __future__ import annotations

import json
from html import escape
from typing import Any

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
article { border-left: 4px solid #c33; padding: .2rem 1rem; margin: 1rem 0; background: #fafafa }
article.follows { border-color: #bbb; color: #666 }
pre { background: #eee; padding: .5rem; overflow-x: auto; white-space: pre-wrap }
.advice { color: #060 } .clean { color: #060; font-weight: bold } .place { font-family: monospace }
table { border-collapse: collapse } td, th { text-align: left; padding: .1rem 1rem .1rem 0; vertical-align: top }
"""


def page(data: dict[str, Any]) -> str:
    """Return the page for a report's data."""
    findings = "".join(map(_finding, data["findings"]))
    return document(
        f"{data['model']} on {data['device']}",
        (findings or '<p class="clean">Nothing stands in the way: every program is one graph.</p>')
        + _section("Programs", {name: _program(program) for name, program in data["programs"].items()})
        + _section("So far", data["history"] or {})
        + _section("Versions", data["versions"]),
    )


def document(title: str, body: str) -> str:
    """Return a whole page."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body><h1>{escape(title)}</h1>\n{body}</body></html>\n"
    )


def _finding(finding: dict[str, Any]) -> str:
    from compiled_llm.explaining.report import change_of, place_of

    parts = [
        f"<h2>{escape(finding['kind'])} {escape(', '.join(finding['programs']))}</h2>",
        f'<p class="place">{escape(place_of(finding))}</p>' if finding["file"] else "",
        f"<pre>{escape(finding['source'])}</pre>" if finding["source"] else "",
        f"<p>{escape(finding['reason'])}</p>",
        f"<p>{escape(change_of(finding))}</p>" if finding["pinned_by"] else "",
        f'<p class="advice">→ {escape(finding["advice"])}</p>',
        f"<details><summary>torch's words</summary><pre>{escape(finding['detail'])}</pre></details>"
        if finding["detail"]
        else "",
    ]
    return f'<article class="{"follows" if finding["follows"] else "cause"}">{"".join(parts)}</article>\n'


def _program(program: dict[str, Any]) -> str:
    return f"{'one graph' if program['whole'] else 'not one graph'}, {program['nodes']} operations"


def _section(title: str, rows: dict[str, Any]) -> str:
    if not rows:
        return ""
    shown = {name: value if isinstance(value, str) else json.dumps(value) for name, value in rows.items()}
    cells = (f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in shown.items())
    return f"<h2>{escape(title)}</h2><table>{''.join(cells)}</table>\n"
