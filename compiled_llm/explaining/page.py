"""The report as one HTML page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from compiled_llm.explaining.profile.breakdown import columns_of, rows_of
from compiled_llm.explaining.wording import breakdown_of, change_of, history_rows, host_of, place_of, title_of

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
article { border-left: 4px solid #c33; padding: .2rem 1rem; margin: 1rem 0; background: #fafafa }
article.follows { border-color: #bbb; color: #666 }
pre { background: #eee; padding: .5rem; overflow-x: auto; white-space: pre-wrap }
.advice { color: #060 } .clean { color: #060; font-weight: bold } .place { font-family: monospace }
table { border-collapse: collapse } td, th { text-align: left; padding: .1rem 1rem .1rem 0; vertical-align: top }
body.wide { max-width: none }
th.figure { text-align: right } .links th:nth-child(1) { width: 16% } .links th:nth-child(2) { width: 40% }
table.links { table-layout: fixed; width: 100% } table.links td { overflow-wrap: anywhere }
summary { cursor: pointer; margin: .3rem 0 }
pre.listing { white-space: pre } .listing span:target { background: #fe9 }
.listing i { display: inline-block; width: 4em; color: #999; user-select: none }
td.figure { text-align: right; white-space: nowrap }
"""


def page(data: dict[str, Any]) -> str:
    """Return the page for a report's data."""
    findings = "".join(map(_finding, data["findings"]))
    return document(
        f"{data['model']} on {data['device']}",
        (findings or '<p class="clean">Nothing stands in the way: every program is one graph.</p>')
        + _section("Programs", {name: _program(program) for name, program in data["programs"].items()})
        + "".join(map(_timing, data["timings"]))
        + _section("So far", dict(history_rows(data["history"] or {})))
        + "".join(f"<p>{escape(note)}</p>" for note in data["notes"])
        + _section("Versions", data["versions"]),
    )


def document(title: str, body: str, wide: bool = False) -> str:
    """Return a whole page; a wide one takes all the room there is."""
    body_class = ' class="wide"' if wide else ""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body{body_class}><h1>{escape(title)}</h1>\n{body}</body></html>\n"
    )


def _finding(finding: dict[str, Any]) -> str:
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


def _timing(timing: dict[str, Any]) -> str:
    breakdown = breakdown_of(timing)
    kernels = [[kernel.name, f"{kernel.launches:.1f}", f"{kernel.us:,.1f}"] for kernel in breakdown.kernels]
    return (
        f"<h2>{escape(title_of(timing))}</h2>"
        + table(columns_of(breakdown), rows_of(breakdown, "in all"))
        + f"<p>{escape(host_of(timing))}</p><details><summary>{escape(breakdown.measured)}</summary>"
        + table([breakdown.measured, "a step", "us"], kernels)
        + "</details>\n"
    )


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; all but the first column are figures."""
    first, *figures = columns
    head = f"<th>{escape(first)}</th>" + "".join(f"<th class=figure>{escape(column)}</th>" for column in figures)
    body = "".join(
        f"<tr><td>{escape(row[0])}</td>{''.join(f'<td class=figure>{escape(cell)}</td>' for cell in row[1:])}</tr>"
        for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _section(title: str, rows: dict[str, str]) -> str:
    if not rows:
        return ""
    cells = (f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows.items())
    return f"<h2>{escape(title)}</h2><table>{''.join(cells)}</table>\n"
