"""A report as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from compiled_llm.commands.bench.report import Report
from compiled_llm.commands.bench.table import Table
from compiled_llm.commands.bench.tables import footer, header, tables_of


def render(report: Report) -> str:
    """Return the whole report, command line included."""
    parts = [*header(report), f"`{report.command}`", *(_table(table) for table in tables_of(report))]
    return "\n\n".join([*parts, *footer(report)]) + "\n"


def _table(table: Table) -> str:
    rule = ["---"] * table.leading + ["---:"] * (len(table.columns) - table.leading)
    lines = [_line(table.columns), _line(rule), *(_line(row) for row in table.rows)]
    return "\n\n".join(filter(None, [f"**{table.title}**", "\n".join(lines), table.note]))


def _line(cells: Sequence[str]) -> str:
    escaped = [cell.replace("|", "\\|") for cell in cells]
    return f"| {' | '.join(escaped)} |"
