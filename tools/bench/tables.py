"""Tables of all that these scripts measure; those of published runs, earlier kinds too, are made by `docs/figures.py`.

python tools/bench/tables.py startup.json
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from compiled_llm.commands.bench.report import BenchReport, Result
from compiled_llm.commands.bench.tables import (
    TABLES,
    Columns,
    Table,
    groups,
    latency_tables,
    number,
    pair,
    ratio,
    show,
)


def spread(figure: str) -> Callable[[Result], str]:
    """Return what writes the best and the median of a figure; one that a result lacks is an empty cell."""
    return lambda result: pair(result["figures"].get(figure, {}))


CONTENDER: Columns = {"contender": lambda result: result["contender"]}
TASK: Columns = {"task": lambda result: result["task"]}


def load(path: Path) -> BenchReport:
    """Read what ``--json`` wrote, or a file of ``results/``; raises ValueError if it is something else."""
    try:
        found = json.loads(path.read_text())
        machine = {"versions": {}, "commit": None, "date": "", "gpu": None, **found["machine"]}
        mebibytes = found.get("memory_mib", {})  # of published runs
        memory = {name: {kind: mib * 2**20 for kind, mib in kinds.items()} for name, kinds in mebibytes.items()}
        given: dict[str, Any] = {"memory": memory, "unavailable": {}, "failures": []}
        known = {name: found.get(name, value) for name, value in given.items()}
        lists = {name: value for name, value in found.items() if value and isinstance(value, list)}
        lists.pop("failures", None)
        return BenchReport(found.get("command", ""), machine, found["model"], results=lists, **known)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no result of a bench: {error!r}") from error


def percent(share: float | None) -> str:
    """Return a share with at least one digit other than 0; an empty text if the share is not known."""
    return "" if share is None else f"{share:.0%}" if share >= 0.01 else f"{100 * share:.1g}%"


def latency(results: Sequence[Result]) -> Iterator[Table]:
    for table in latency_tables(results):
        table.columns["of the ceiling"] = lambda result: percent(result["figures"].get("of_ceiling"))
        yield table


def startup(results: Sequence[Result]) -> Iterator[Table]:
    columns = CONTENDER | {
        "caches": lambda result: result["cache"],
        "runs": lambda result: str(next(iter(result["figures"].values()))["runs"]),
    }
    stages = max((result["figures"] for result in results), key=len)  # peers tell fewer
    columns |= {f"{name}, s": spread(name) for name in stages}
    note = "Seconds from the start of the process, best / median. Cold: empty folders for everything compiled."
    yield Table("Start-up", results, columns, note, leading=2)
    spent = [
        {**result, "task": what, "figures": {"spent": times}}
        for result in results
        for what, times in result.get("spent", {}).items()
    ]
    if spent:
        columns = CONTENDER | {"caches": lambda result: result["cache"], "on": lambda result: result["task"]}
        note = "Best / median. Parts of one may be another, and what threads do beside the rest is among them."
        yield Table("What starts are spent on", spent, columns | {"s": spread("spent")}, note, leading=3)


def loops(results: Sequence[Result]) -> Iterator[Table]:
    rows = sorted(results, key=lambda one: str(one["task"]))
    columns = TASK | CONTENDER | {"tokens/s": spread("tokens_per_s"), "s": spread("seconds")}
    yield Table("In trainers' and evaluations' loops", rows, columns, leading=2)


def grpo(results: Sequence[Result]) -> Iterator[Table]:
    columns = CONTENDER | {f"{part}, s": spread(part) for part in ("step", "rollout", "rest")}
    columns["tokens/s"] = spread("tokens_per_s")
    columns |= {f"{part}, s": spread(part) for part in ("wake", "sleep")}
    columns["first step, s"] = lambda result: number(result["first_step_s"])
    note = "Best / median of steps. Tokens/s: of answers, in the seconds of rollouts; waking and sleeping are in these."
    for group in groups(results, "workload"):
        yield Table(f"Steps of GRPO, {group[0]['workload']}", group, columns, note)


def around(results: Sequence[Result]) -> Iterator[Table]:
    for group in groups(results, "task"):
        columns = CONTENDER | {"s": spread("seconds"), f"{group[0]['unit']}/s": spread("per_s")}
        for other in group[:-1]:
            base = other["figures"]["per_s"]
            columns[f"x {other['contender']}"] = lambda result, base=base: ratio(  # type: ignore[misc]
                result["figures"]["per_s"], base
            )
        columns["first pass, s"] = lambda result: number(result["first_pass_s"])
        columns["differs by"] = lambda result: f"{result['differs']:.1g}"
        note = f"Best / median. Differs by: the most of any number of an answer, from those of {group[0]['contender']}."
        yield Table(group[0]["task"], group, columns, note)


def offline(results: Sequence[Result]) -> Iterator[Table]:
    def count(name: str) -> Columns:
        return {name: lambda result: f"{result['counts'][name]:,.0f}" if name in result["counts"] else ""}

    for group in groups(results, "workload"):
        base = group[0]["figures"]["tokens_per_s"]
        columns = CONTENDER | {"tokens/s": spread("tokens_per_s")}
        columns[f"x {group[0]['contender']}"] = lambda result, base=base: ratio(  # type: ignore[misc]
            result["figures"]["tokens_per_s"], base
        )
        columns |= {"prompt tokens/s": spread("prompt_tokens_per_s"), "seconds": spread("seconds")}
        columns["device busy"] = lambda result: "" if result.get("busy") is None else f"{result['busy']:.1%}"
        columns |= count("steps") | count("preemptions") | count("cached tokens")
        columns["warm-up, s"] = lambda result: number(result["ready_s"])
        yield Table(group[0]["workload"], group, columns, "Best / median over the whole, prompts included.")


TABLES.update(
    {"latency": latency, "startup": startup, "loops": loops, "grpo": grpo, "around": around, "offline": offline}
)


def main(results: Annotated[list[Path], typer.Argument(help="Of these scripts' --json, or in results/.")]) -> None:
    """Print the tables of results."""
    for path in results:
        show(load(path))


if __name__ == "__main__":
    typer.run(main)
