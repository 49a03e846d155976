"""A report on the terminal, and what is being done meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from compiled_llm.commands.bench import markdown
from compiled_llm.commands.bench.contender import Log
from compiled_llm.commands.bench.report import Report
from compiled_llm.commands.bench.table import Table
from compiled_llm.commands.bench.tables import footer, header, tables_of
from compiled_llm.execution.reporting.progress import ProgressDisplay


def show(report: Report) -> None:
    """Print the report to stdout: rich tables on a terminal, Markdown elsewhere."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.out(markdown.render(report), end="")
        return
    for line in header(report):
        console.print(escape(line), style="dim")
    for table in tables_of(report):
        console.print()
        console.print(_rich(table))
    console.print()
    for line in footer(report):
        console.print(escape(line), style="yellow")


def _rich(table: Table) -> RichTable:
    shown = RichTable(
        title=escape(table.title), caption=escape(table.note), title_justify="left", caption_justify="left"
    )
    for index, column in enumerate(table.columns):
        name = index < table.leading
        shown.add_column(escape(column), justify="left" if name else "right", no_wrap=name)
    for row in table.rows:
        shown.add_row(*(escape(cell) for cell in row))
    return shown


@contextmanager
def progress(verbose: bool) -> Iterator[Log]:
    """Yield a function that shows what is being done, on stderr: a spinner on a terminal, in pipes what takes long.

    Args:
        verbose: one line for each step, and no spinner.
    """
    display = ProgressDisplay(enabled=True, animated=not verbose, brief=not verbose)
    with display.task("importing torch and transformers") as log:
        yield log
