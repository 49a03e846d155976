"""Tables of all that these scripts measure; those of published runs, earlier kinds too, are made by `docs/figures.py`.

python tools/bench/tables.py startup.json
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from attention_ops.table import attention_tables
from recurrent_ops.table import recurrent_tables

from compiled_llm.commands.bench.report import BenchReport, Result
from compiled_llm.commands.bench.tables import (
    TABLES,
    Columns,
    Table,
    groups,
    number,
    pair,
    percentiles,
    ratio,
    show,
)


def startup(results: Sequence[Result]) -> Iterator[Table]:
    def stage(name: str) -> Callable[[Result], str]:
        return lambda result: pair(result["figures"][name])

    columns: Columns = {
        "contender": lambda result: result["contender"],
        "caches": lambda result: result["cache"],
        "runs": lambda result: str(next(iter(result["figures"].values()))["runs"]),
        **{f"{name}, s": stage(name) for name in results[0]["figures"]},
    }
    note = "Seconds from the start of the process, best / median. Cold: empty folders for everything compiled."
    yield Table("Start-up", results, columns, note, leading=2)


def roofline(results: Sequence[Result]) -> Iterator[Table]:
    columns: Columns = {
        "kernels": lambda row: row["name"],
        "launches": lambda row: "" if row.get("launches") is None else f"{row['launches']:,.1f}",
        "us": lambda row: f"{row['us']:,.1f}",
        "of the step": lambda row: f"{row['of_the_step']:.1%}",
        "MB": lambda row: "" if row.get("nbytes") is None else f"{row['nbytes'] / 1e6:,.1f}",
        "of the read bandwidth": lambda row: "" if row.get("of_bandwidth") is None else f"{row['of_bandwidth']:.1%}",
    }
    for result in results:
        step, figures = result["step_us"], result["figures"]
        whole = {**figures, "name": "one decode step", "us": step, "of_the_step": 1.0, "nbytes": result["nbytes"]}
        gaps = {"name": "gaps: no kernel runs", "us": figures["gaps_us"], "of_the_step": figures["gaps_of_the_step"]}
        title = f"A decode step of {result['contender']}, batch {result['batch']}"
        note = f"Times by kind from {result['steps']} profiled steps; the step from runs without the profiler."
        if result["host_us"] is not None:
            note += f" Launching a step takes the host {result['host_us']:,.0f} us."
        yield Table(title, [*result["kinds"], gaps, whole], columns, note)


def beams_and_drafts(results: Sequence[Result]) -> Iterator[Table]:
    columns: Columns = {
        "task": lambda result: result["task"],
        "contender": lambda result: result["contender"],
        "tokens/s": lambda result: pair(result["figures"]["tokens_per_s"]),
    }
    yield Table(
        "Beams, drafts, a chat and scoring", sorted(results, key=lambda one: str(one["task"])), columns, leading=2
    )


def loops(results: Sequence[Result]) -> Iterator[Table]:
    def figure(name: str) -> Callable[[Result], str]:
        return lambda result: pair(result["figures"][name]) if name in result["figures"] else ""

    columns: Columns = {
        "task": lambda result: result["task"],
        "contender": lambda result: result["contender"],
        "tokens/s": figure("tokens_per_s"),
        "s": figure("seconds"),
    }
    rows = sorted(results, key=lambda one: str(one["task"]))
    yield Table("In trainers' and evaluations' loops", rows, columns, leading=2)


def grpo(results: Sequence[Result]) -> Iterator[Table]:
    def figure(name: str) -> Callable[[Result], str]:
        return lambda result: pair(result["figures"][name]) if name in result["figures"] else ""

    columns: Columns = {
        "contender": lambda result: result["contender"],
        "step, s": figure("step"),
        "rollout, s": figure("rollout"),
        "rest, s": figure("rest"),
        "tokens/s": figure("tokens_per_s"),
        "wake, s": figure("wake"),
        "sleep, s": figure("sleep"),
        "first step, s": lambda result: number(result["first_step_s"]),
    }
    note = "Best / median of steps. Tokens/s: of answers, in the seconds of rollouts; waking and sleeping are in these."
    for group in groups(results, "workload"):
        yield Table(f"Steps of GRPO, {group[0]['workload']}", group, columns, note)


def offline(results: Sequence[Result]) -> Iterator[Table]:
    def count(name: str) -> Callable[[Result], str]:
        return lambda result: f"{result['counts'][name]:,.0f}" if name in result["counts"] else ""

    for group in groups(results, "workload"):
        base = group[0]["figures"]["tokens_per_s"]
        columns: Columns = {
            "contender": lambda result: result["contender"],
            "tokens/s": lambda result: pair(result["figures"]["tokens_per_s"]),
            f"x {group[0]['contender']}": lambda result, base=base: ratio(  # type: ignore[misc]
                result["figures"]["tokens_per_s"], base
            ),
            "prompt tokens/s": lambda result: pair(result["figures"]["prompt_tokens_per_s"]),
            "seconds": lambda result: pair(result["figures"]["seconds"]),
            "device busy": lambda result: "" if result.get("busy") is None else f"{result['busy']:.1%}",
            **{name: count(name) for name in ("steps", "preemptions", "cached tokens")},
            "warm-up, s": lambda result: number(result["ready_s"]),
        }
        yield Table(group[0]["workload"], group, columns, "Best / median over the whole, prompts included.")


def graph_modes(results: Sequence[Result]) -> Iterator[Table]:
    prompts = list(dict.fromkeys(prompt for result in results for prompt in result["figures"]["first_s"]))
    columns: Columns = {
        "contender": lambda result: result["contender"],
        "graphs": lambda result: result["recordings"],
        "start, s": lambda result: number(result["start_s"]),
        "MiB": lambda result: number(result["nbytes"] / 2**20),
    }
    for prompt in prompts:
        columns[f"first of {prompt}"] = lambda result, prompt=prompt: number(  # type: ignore[misc]
            1e3 * result["figures"]["first_s"].get(prompt, math.nan)
        )
    columns["slowest first"] = lambda result: number(1e3 * result["figures"]["slowest_first_s"])
    columns["between tokens"] = lambda result: percentiles(result["figures"]["between_s"])
    note = (
        "First of: the median first token of prompts of so many tokens, in ms, like those to the right. Start: until "
        "requests are answered, with compiled code on disk. MiB: what the device has less than with the model alone."
    )
    yield Table("The modes side by side", results, columns, note, leading=2)


def graph_times(results: Sequence[Result]) -> Iterator[Table]:
    columns: Columns = {
        "contender": lambda result: result["contender"],
        "graphs": lambda result: result["recordings"],
        "prompt": lambda result: str(result["prompt"]),
        "first token, ms": lambda result: percentiles(result["figures"]["first_s"]),
        "between tokens, ms": lambda result: percentiles(result["between_s"]),
        "running meanwhile, ms": lambda result: percentiles(waits) if (waits := result["figures"]["running_s"]) else "",
    }
    note = "Running meanwhile: the longest wait of a request in the midst of its answer while such a prompt comes."
    yield Table("When a CUDA graph is missing", results, columns, note, leading=2)


def graph_use(results: Sequence[Result]) -> Iterator[Table]:
    columns: Columns = {
        "contender": lambda result: result["contender"],
        "graphs": lambda result: result["recordings"],
        "ready": lambda result: str(result["ready"]),
        "MiB": lambda result: number(result["nbytes"] / 2**20),
        "captures": lambda result: str(result["captures"]),
        "evictions": lambda result: str(result["evictions"]),
        "failures": lambda result: str(result.get("failures", "")),  # earlier reports did not count them
        "ms a capture": lambda result: number(1e3 * (result["capture_s"] or 0.0) / max(1, result["captures"])),
    }
    yield Table("CUDA graphs", results, columns, "After all requests, those of warming up included.", leading=2)


TABLES.update(
    {
        "attention": attention_tables,
        "recurrent": recurrent_tables,
        "startup": startup,
        "roofline": roofline,
        "beams_and_drafts": beams_and_drafts,
        "loops": loops,
        "grpo": grpo,
        "offline": offline,
        "graph_modes": graph_modes,
        "graph_times": graph_times,
        "graph_use": graph_use,
    }
)


def main(results: Annotated[list[Path], typer.Argument(help="Of these scripts' --json, or in results/.")]) -> None:
    """Print the tables of results."""
    for path in results:
        show(BenchReport.load(path))


if __name__ == "__main__":
    typer.run(main)
