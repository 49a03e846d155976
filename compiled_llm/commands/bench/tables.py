"""A report as tables: rich ones on a terminal, Markdown elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markdown import Markdown as MarkdownText

from compiled_llm.commands.bench.report import BenchReport, Result
from compiled_llm.commands.printable import printable

Columns = dict[str, Callable[[Result], str]]  # the heads of columns, and what writes the cell of a result


@dataclass
class Table:
    """A table with a row for each result; the first ``leading`` columns are names, the others figures."""

    title: str
    results: Sequence[Result]
    columns: Columns
    note: str = ""
    leading: int = 1

    @property
    def rows(self) -> list[list[str]]:
        return [[cell(result) for cell in self.columns.values()] for result in self.results]


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def pair(spread: dict[str, Any], scale: float = 1.0) -> str:
    known = [spread[name] for name in ("best", "median", "p99") if spread.get(name) is not None]
    return " / ".join(number(value * scale) for value in known)


def percentiles(times: dict[str, float]) -> str:
    return f"{number(times['p50'] * 1e3)} / {number(times['p99'] * 1e3)}"


def ratio(spread: dict[str, Any], base: dict[str, Any] | None) -> str:
    return "" if base is None else f"{spread['median'] / base['median']:.2f}"


def groups(results: Sequence[Result], *names: str) -> list[list[Result]]:
    found: dict[tuple[Any, ...], list[Result]] = {}
    for result in results:
        found.setdefault(tuple(result.get(name) for name in names), []).append(result)
    return list(found.values())


def latency_tables(results: Sequence[Result]) -> Iterator[Table]:
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
            "end to end, tokens/s": lambda result: pair(result["figures"]["end_to_end_tokens_per_s"]),
        }
        first = group[0]
        runs = group[0]["figures"]["first_s"]["runs"]
        decoding = "sampled" if first["sampled"] else "greedy"
        title = f"Prompts of {first['prompt']} tokens, {first['new']} new tokens, {decoding}"
        note = f"Best / median (of 100 runs or more also the 99th percentile) of {runs} runs; ratios are of medians."
        yield Table(title, sorted(group, key=lambda result: int(result["batch"])), columns, note)


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
    for group in groups(results, "prompts", "answers"):
        note = "Times: half of all / 99 of 100 are at most this long, from when a request was to be sent."
        if short := sum(result["short"] for result in group):
            note += f" {short} answers were shorter than asked for: this server does not know ignore_eos."
        title = f"Prompts of {group[0]['prompts']} tokens, answers of {group[0]['answers']}"
        yield Table(title, group, SERVE, note, leading=2)


TABLES: dict[str, Callable[[Sequence[Result]], Iterator[Table]]] = {"latency": latency_tables, "serve": serve_tables}
"""Makes the tables of each kind of result; ``tools/bench`` adds its own."""


def tables_of(report: BenchReport) -> list[Table]:
    found = [table for kind, results in report.results.items() if kind in TABLES for table in TABLES[kind](results)]
    if report.memory:
        columns: Columns = {"contender": lambda result: result["contender"]}
        columns |= {kind: _mebibytes(kind) for memory in report.memory.values() for kind in memory}
        found.append(Table("Memory, MiB", [{"contender": name, **one} for name, one in report.memory.items()], columns))
    return found


def _mebibytes(kind: str) -> Callable[[Result], str]:
    return lambda result: number(result[kind] / 2**20) if kind in result else ""


def markdown(report: BenchReport) -> str:
    """Return the whole report: model, machine, versions and command line, the tables, and what is not in them."""
    machine = report.machine
    model = report.model
    where = (machine["gpu"] or machine["cpu"])["name"]
    versions = ", ".join(f"{package} {number}" for package, number in machine["versions"].items())
    lines = [
        f"{model['name']} ({', '.join(str(value) for name, value in model.items() if name != 'name')}) on {where}.",
        f"{versions}; commit {machine['commit'] or 'not known'}; {machine['date']}.",
    ]
    if "client_busy" in machine:
        lines.append(f"The client computed {machine['client_busy']:.0%} of the time: near 100%, it was too slow.")
    lines += [f"`{report.command}`", *map(_markdown, tables_of(report))]
    lines += [f"Not available: {name}: {reason}." for name, reason in report.unavailable.items()]
    lines += [f"Failed: {line}" for line in report.failures]
    return printable("\n\n".join(lines)) + "\n"


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
