"""A report on the terminal, and what is being done meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table as RichTable

from compiled_llm.commands.bench import markdown
from compiled_llm.commands.bench.contender import Log
from compiled_llm.commands.bench.report import Report
from compiled_llm.commands.bench.tables import Table, footer, header, tables_of


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
    """Yield a function that shows what is being done, on stderr: a spinner on a terminal, in pipes nothing.

    Args:
        verbose: one line for each step, and no spinner.
    """
    console = Console(stderr=True, highlight=False)
    if verbose:
        yield lambda line: console.print(f"bench: {line}", soft_wrap=True, markup=False)
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        task = shown.add_task("", total=None)
        yield lambda line: shown.update(task, description=line)
