"""The report as one HTML page."""

from __future__ import annotations

from html import escape
from typing import Any

from compiled_llm.explaining.document import document, named_values, table
from compiled_llm.explaining.profile.breakdown import columns_of, rows_of
from compiled_llm.explaining.subject import head_rows, title_of
from compiled_llm.explaining.wording import (
    breakdown_of,
    change_of,
    following,
    heading_of,
    history_rows,
    more_of,
    place_of,
    speed_of,
    timed_in,
)


def page(data: dict[str, Any], home: str = "") -> str:
    """Return the page for a report's data, with a link back to ``home`` unless that is empty."""
    title = title_of(data)
    back = f'<nav><a href="{home}">All stages, from lines to kernels</a></nav>' if home else ""
    return document(
        title,
        named_values(head_rows(data))
        + _findings(data["findings"])
        + _section("Programs", {name: _program(program) for name, program in data["programs"].items()})
        + "".join(map(_timing, data["timings"]))
        + _section("So far", dict(history_rows(data["history"] or {})))
        + "".join(f"<p>{escape(note)}</p>" for note in data["notes"]),
        heading=f"{back}<h1>{escape(title)}</h1>",
    )


def _findings(findings: list[dict[str, Any]]) -> str:
    causes = "".join(_finding(finding) for finding in findings if not finding["follows"])
    if not causes:
        return '<p class="clean">Nothing stands in the way: every program is one graph.</p>'
    more, consequences = more_of(findings), [finding for finding in findings if finding["follows"]]
    folded = "".join(map(_consequence, consequences))
    return (
        causes
        + (f'<p class="quiet">{escape(more)}</p>' if more else "")
        + (f"<details><summary>{escape(following(consequences))}</summary>{folded}</details>" if folded else "")
    )


def _finding(finding: dict[str, Any]) -> str:
    kind, programs = heading_of(finding)
    parts = [
        f"<h2>{escape(kind)} <small>{escape(programs)}</small></h2>",
        f'<p class="place">{escape(place_of(finding))}</p>' if finding["file"] else "",
        f"<pre>{escape(finding['source'])}</pre>" if finding["source"] else "",
        f"<p>{escape(finding['reason'])}</p>",
        f"<p>{escape(change_of(finding))}</p>" if finding["pinned_by"] else "",
        f'<p class="advice">→ {escape(finding["advice"])}</p>',
        f"<details><summary>torch's words</summary><pre>{escape(finding['detail'])}</pre></details>"
        if finding["detail"]
        else "",
    ]
    return f"<article>{''.join(parts)}</article>\n"


def _consequence(finding: dict[str, Any]) -> str:
    said = finding["detail"] or finding["reason"]
    return f'<p class="place">{escape(place_of(finding))}</p><pre>{escape(finding["source"])}\n\n{escape(said)}</pre>\n'


def _program(program: dict[str, Any]) -> str:
    return f"one graph, {program['nodes']:,} operations" if program["whole"] else "not one graph"


def _timing(timing: dict[str, Any]) -> str:
    breakdown = breakdown_of(timing)
    kernels = [[kernel.name, f"{kernel.launches:.1f}", f"{kernel.us:,.1f}"] for kernel in breakdown.kernels]
    return (
        f"<h2>{escape(timed_in(timing))}</h2>"
        + table(columns_of(breakdown), rows_of(breakdown, "in all"))
        + f'<p class="quiet">{escape(speed_of(timing))}</p>'
        + f"<details><summary>the {breakdown.measured} that take longest</summary>"
        + table([breakdown.measured, "a step", "us"], kernels)
        + "</details>\n"
    )


def _section(title: str, rows: dict[str, str]) -> str:
    return f"<h2>{escape(title)}</h2>{named_values(rows)}\n" if rows else ""
