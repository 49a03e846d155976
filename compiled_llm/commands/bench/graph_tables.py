"""Results of ``bench graphs`` as tables: a column for each prompt length, and what graphs there were."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from compiled_llm.commands.bench.graph_results import GraphTimes, GraphUse
from compiled_llm.commands.bench.table import Table, number, percentiles
from compiled_llm.commands.bench.timing import Percentiles

Figure = Callable[[GraphTimes], Percentiles | None]


def graph_tables(times: Sequence[GraphTimes], use: Sequence[GraphUse]) -> Iterator[Table]:
    """Yield a table for each figure, with prompt lengths side by side, and one of the graphs."""
    if times:
        new = times[0].new
        first = f"Half of all / 99 of 100, from sending each request; {_counts(times)}."
        yield _table("First token, ms, over tokens of the prompt", times, lambda result: result.first, first)
        between = f"Half of all / 99 of 100, over the tokens of answers of {new}."
        yield _table("Between tokens, ms, over tokens of the prompt", times, lambda result: result.between_s, between)
    if running := [result for result in times if result.running]:
        note = "The longest wait of a request in the midst of its answer, once for each prompt: half / 99 of 100."
        yield _table("Running meanwhile, ms, over tokens of the prompt that comes", running, _running, note)
    if use:
        yield _use(use)


def _running(result: GraphTimes) -> Percentiles | None:
    return result.running


def _table(title: str, times: Sequence[GraphTimes], figure: Figure, note: str) -> Table:
    prompts = sorted({result.prompt for result in times})
    rows = []
    for name, recordings in dict.fromkeys((result.contender, result.recordings) for result in times):
        found = {result.prompt: figure(result) for result in times if _is_of(result, name, recordings)}
        rows.append([name, recordings, *(_cell(found.get(prompt)) for prompt in prompts)])
    return Table(title, ["contender", "recordings", *map(str, prompts)], rows, note, leading=2)


def _cell(times: Percentiles | None) -> str:
    return "" if times is None else percentiles(times)


def _is_of(result: GraphTimes, name: str, recordings: str) -> bool:
    return (result.contender, result.recordings) == (name, recordings)


def _counts(times: Sequence[GraphTimes]) -> str:
    counts = sorted({len(result.first_s) for result in times})
    return f"{' or '.join(map(str, counts))} of each length"


def _use(use: Sequence[GraphUse]) -> Table:
    columns = ["contender", "recordings", "graphs", "MiB", "captures", "evictions", "ms a capture"]
    note = "After all requests; captures and evictions with those of warming up."
    return Table("CUDA graphs", columns, [_use_row(result) for result in use], note, leading=2)


def _use_row(result: GraphUse) -> list[str]:
    seconds = result.seconds_a_capture
    counts = map(str, (result.captures, result.evictions))
    return [
        *(result.contender, result.recordings, str(result.ready), number(result.nbytes / 2**20)),
        *counts,
        "" if seconds is None else number(1e3 * seconds),
    ]
