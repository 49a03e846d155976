"""A report as tables: rich ones on a terminal, Markdown elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markdown import Markdown as MarkdownText

from compiled_llm.commands.bench.report import BenchReport, Result
from compiled_llm.commands.printable import printable


@dataclass
class Table:
    """A table with a title and a note; the first ``leading`` columns are names, the others figures."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    leading: int = 1


Columns = dict[str, Callable[[Result], str]]
"""The heads of columns, and what writes the cell of a result."""


def table(title: str, results: Sequence[Result], columns: Columns, note: str = "", leading: int = 1) -> Table:
    """Return a table with a row for each result."""
    return Table(
        title, list(columns), [[cell(result) for cell in columns.values()] for result in results], note, leading
    )


def number(value: float) -> str:
    """Return a figure with three digits or so."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def pair(spread: dict[str, Any], scale: float = 1.0) -> str:
    """Return the best, the median and the 99th percentile, as far as they are known."""
    return " / ".join(
        number(spread[name] * scale) for name in ("best", "median", "p99") if spread.get(name) is not None
    )


def percentiles(times: dict[str, float]) -> str:
    """Return half of all / 99 of 100, in ms."""
    return f"{number(times['p50'] * 1e3)} / {number(times['p99'] * 1e3)}"


def ratio(spread: dict[str, Any], base: dict[str, Any] | None) -> str:
    """Return the ratio of both medians."""
    return "" if base is None else f"{spread['median'] / base['median']:.2f}"


def percent(share: float | None) -> str:
    """Return a share with at least one digit other than 0; an empty text if the share is not known."""
    return "" if share is None else f"{share:.0%}" if share >= 0.01 else f"{100 * share:.1g}%"


def groups(results: Sequence[Result], *names: str) -> list[list[Result]]:
    """Return results that are equal in these fields side by side, in their order."""
    found: dict[tuple[Any, ...], list[Result]] = {}
    for result in results:
        found.setdefault(tuple(result.get(name) for name in names), []).append(result)
    return list(found.values())


def latency_tables(results: Sequence[Result]) -> Iterator[Table]:
    """Yield a table for each prompt length, output length and way of decoding."""
    base = results[0]["contender"]
    for group in groups(results, "prompt", "new", "sampled"):
        decode = {(one["contender"], one["batch"]): one["figures"]["decode_tokens_per_s"] for one in group}
        columns: Columns = {
            "contender": lambda result: result["contender"],
            "batch": lambda result: str(result["batch"]),
            "first token, ms": lambda result: pair(result["figures"]["first_s"], 1e3),
            "decode, tokens/s": lambda result: pair(result["figures"]["decode_tokens_per_s"]),
            f"x {base}": lambda result, decode=decode: ratio(  # type: ignore[misc]
                result["figures"]["decode_tokens_per_s"], decode.get((base, result["batch"]))
            ),
            "of the ceiling": lambda result: percent(result["figures"].get("of_ceiling")),
            "end to end, tokens/s": lambda result: pair(result["figures"]["end_to_end_tokens_per_s"]),
        }
        first, runs = group[0], group[0]["figures"]["first_s"]["runs"]
        decoding = "sampled" if first["sampled"] else "greedy"
        title = f"Prompts of {first['prompt']} tokens, {first['new']} new tokens, {decoding}"
        note = f"Best / median (of 100 runs or more also the 99th percentile) of {runs} runs; ratios are of medians."
        yield table(title, sorted(group, key=lambda result: int(result["batch"])), columns, note)


SERVE: Columns = {
    "server": lambda result: result["contender"],
    "load": lambda result: result["load"],
    "first token, ms": lambda result: percentiles(result["first_s"]),
    "between tokens, ms": lambda result: percentiles(result["between_s"]),
    "end to end, ms": lambda result: percentiles(result["end_s"]),
    "tokens/s": lambda result: pair(result["figures"]["tokens_per_s"]),
    "tokens a piece": lambda result: f"{result['figures']['tokens_a_piece']:.2f}",
}


def serve_tables(results: Sequence[Result]) -> Iterator[Table]:
    """Yield a table for each kind of request: a row for each way that they come and each server."""
    for group in groups(results, "prompts", "answers"):
        note = "Times: half of all / 99 of 100 are at most this long, from when a request was to be sent."
        if short := sum(result["short"] for result in group):
            note += f" {short} answers were shorter than asked for: this server does not know ignore_eos."
        title = f"Prompts of {group[0]['prompts']} tokens, answers of {group[0]['answers']}"
        yield table(title, group, SERVE, note, leading=2)


TABLES: dict[str, Callable[[Sequence[Result]], Iterator[Table]]] = {"latency": latency_tables, "serve": serve_tables}
"""Makes the tables of each kind of result; ``tools/bench`` adds its own."""


def tables_of(report: BenchReport) -> list[Table]:
    """Return a report's tables."""
    found = [table for kind, results in report.results.items() if kind in TABLES for table in TABLES[kind](results)]
    kinds = list(dict.fromkeys(kind for memory in report.memory.values() for kind in memory))
    rows = [
        [name, *(number(memory[kind] / 2**20) if kind in memory else "" for kind in kinds)]
        for name, memory in report.memory.items()
    ]
    return [*found, Table("Memory, MiB", ["contender", *kinds], rows)] if rows else found


def header(report: BenchReport) -> list[str]:
    """Return the lines above the tables: the model, the machine and the versions."""
    machine, model, bandwidth = report.machine, report.model, report.read_bandwidth
    where = (machine["gpu"] or machine["cpu"])["name"]
    versions = ", ".join(f"{package} {number}" for package, number in machine["versions"].items())
    lines = [
        f"{model['name']} ({', '.join(str(value) for name, value in model.items() if name != 'name')}) on {where}.",
        f"{versions}; commit {machine['commit'] or 'not known'}; {machine['date']}.",
    ]
    if "client_busy" in machine:
        lines.append(f"The client computed {machine['client_busy']:.0%} of the time: near 100%, it was too slow.")
    return lines if bandwidth is None else [*lines, f"Read bandwidth in this run: {bandwidth / 1e9:,.1f} GB/s."]


def footer(report: BenchReport) -> list[str]:
    """Return the lines below the tables: contenders that could not take part, and failures."""
    absent = [f"Not available: {name}: {reason}." for name, reason in report.unavailable.items()]
    return [*absent, *(f"Failed: {line}" for line in report.failures)]


def markdown(report: BenchReport) -> str:
    """Return the whole report, command line included."""
    parts = [*header(report), f"`{report.command}`", *map(_markdown, tables_of(report)), *footer(report)]
    return printable("\n\n".join(parts)) + "\n"


def _markdown(table: Table) -> str:
    rule = ["---"] * table.leading + ["---:"] * (len(table.columns) - table.leading)
    lines = [" | ".join(cell.replace("|", "\\|") for cell in cells) for cells in (table.columns, rule, *table.rows)]
    return "\n\n".join(filter(None, [f"**{table.title}**", "\n".join(f"| {line} |" for line in lines), table.note]))


def show(report: BenchReport) -> None:
    """Print the report to stdout, laid out on a terminal."""
    console = Console(highlight=False)
    text = markdown(report)
    if console.is_terminal:
        console.print(MarkdownText(text))
    else:
        console.out(text, end="")
