"""A report as tables, which Markdown and the terminal both show."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from compiled_llm.commands.bench.graph_tables import graph_tables
from compiled_llm.commands.bench.report import Report
from compiled_llm.commands.bench.results import Latency, Offline, Online, Roofline, Startup, Task
from compiled_llm.commands.bench.stream_tables import many_streams_tables, one_stream_tables
from compiled_llm.commands.bench.table import Table, number, pair, percentiles, sentence, share
from compiled_llm.commands.bench.timing import Spread
from compiled_llm.explaining.profile.breakdown import columns_of, rows_of


def tables_of(report: Report) -> list[Table]:
    """Return every table that the report has figures for."""
    return [
        *_latency(report.latency),
        *_sampling(report.latency),
        *_memory(report),
        *_startup(report.startup),
        *(_roofline(result) for result in report.roofline),
        *_kernels(report.roofline),
        *_beams_and_drafts(report.beams_and_drafts),
        *_offline(report.offline),
        *one_stream_tables(report.one_stream),
        *many_streams_tables(report.many_streams),
        *_online(report.online),
        *graph_tables(report.graph_times, report.graph_use),
    ]


def header(report: Report) -> list[str]:
    """Return lines that say what was measured, with what and where."""
    machine, model = report.machine, report.model
    where = _gpu(machine["gpu"]) if machine["gpu"] else _cpu(machine)
    lines = [f"{model['name']} ({model['weights']} weights, {model['dtype']}) on {where}.", versions(report)]
    if report.read_bandwidth is not None:
        lines.append(f"Read bandwidth, measured in this run: {report.read_bandwidth / 1e9:,.1f} GB/s.")
    return lines


def versions(report: Report) -> str:
    """Return a line that says with what, of which commit and when a report was made."""
    machine = report.machine
    packages = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    return f"{packages}; Python {machine['python']}; commit {machine['commit'] or 'not known'}; {machine['date']}."


def _gpu(gpu: dict[str, object]) -> str:
    clocks = gpu["clocks"]
    state = ", ".join(f"{name} {value}" for name, value in clocks.items()) if isinstance(clocks, dict) else "not known"
    return f"{gpu['name']} (driver {gpu['driver']}, CUDA {gpu['cuda']}; under load: {state})"


def _cpu(machine: dict[str, dict[str, object]]) -> str:
    cpu = machine["cpu"]
    return f"{cpu['name']}, {cpu['cores']} cores, {cpu['threads']} threads, load at the start {machine['load']}"


def footer(report: Report) -> list[str]:
    """Return lines on who could not take part and what failed."""
    return [
        *(f"Not available: {name}: {reason}." for name, reason in report.unavailable.items()),
        *(f"Failed: {line}" for line in report.failures),
    ]


# ---- latency


def _latency(results: Sequence[Latency]) -> Iterator[Table]:
    for prompt, new, sampled in dict.fromkeys((result.prompt, result.new, result.sampled) for result in results):
        group = [result for result in results if (result.prompt, result.new, result.sampled) == (prompt, new, sampled)]
        base = group[0].contender
        title = f"Prompts of {prompt} tokens, {new} new tokens, {group[0].workload.decoding}"
        columns = [
            "contender",
            "batch",
            "first token, ms",
            "decode, tokens/s",
            f"x {base}",
            "of the ceiling",
            "end to end, tokens/s",
        ]
        group.sort(key=lambda result: result.batch)  # stable: contenders stay in order
        rows = [_latency_row(result, base_of(result, results, base)) for result in group]
        yield Table(title, columns, rows, _note(group), leading=1)


def base_of(result: Latency, results: Sequence[Latency], base: str) -> Latency | None:
    """Return what the contender ``base`` did under the same workload, if it got that far."""
    same = (other for other in results if other.contender == base and other.workload == result.workload)
    return next(same, None)


def _latency_row(result: Latency, base: Latency | None) -> list[str]:
    return [
        result.contender,
        str(result.batch),
        pair(result.first, 1e3) + ("" if result.first.p99 is None else f" / {number(result.first.p99 * 1e3)}"),
        pair(result.decode),
        "" if base is None else f"{result.decode.median / base.decode.median:.2f}",
        "" if result.of_ceiling is None else share(result.of_ceiling),
        pair(result.end_to_end),
    ]


def _note(group: Sequence[Latency]) -> str:
    runs = sorted({result.first.runs for result in group})
    counts = " or ".join(map(str, runs))
    p99 = " (the first token's third figure is the 99th percentile)" if any(r.first.p99 for r in group) else ""
    return f"Best / median{p99} of {counts} runs; ratios and shares are of medians."


def _sampling(results: Sequence[Latency]) -> Iterator[Table]:
    """What sampling costs over greedy decoding."""
    rows = []
    for result in results:
        greedy = next((other for other in results if _is_greedy_twin(other, result)), None)
        if greedy is not None:
            cost = greedy.decode.median / result.decode.median - 1
            rows.append([result.contender, str(result.batch), f"{result.prompt} + {result.new}", f"{cost:+.1%}"])
    if rows:
        columns = ["contender", "batch", "tokens", "time of a decode step"]
        yield Table("Sampled over greedy", columns, rows, "Medians.")


def _is_greedy_twin(other: Latency, result: Latency) -> bool:
    same = (other.contender, other.batch, other.prompt, other.new) == (
        result.contender,
        result.batch,
        result.prompt,
        result.new,
    )
    return same and result.sampled and not other.sampled


def _memory(report: Report) -> Iterator[Table]:
    kinds = list(dict.fromkeys(kind for memory in report.memory.values() for kind in memory))
    if kinds:
        rows = [
            [name, *(number(memory[kind] / 2**20) if kind in memory else "" for kind in kinds)]
            for name, memory in report.memory.items()
        ]
        yield Table("Memory, MiB", ["contender", *kinds], rows)


# ---- startup


def _startup(results: Sequence[Startup]) -> Iterator[Table]:
    if results:
        stages = list(results[0].stages)
        rows = [
            [
                result.contender,
                result.cache,
                str(result.stage(stages[0]).runs),
                *(pair(result.stage(stage)) for stage in stages),
            ]
            for result in results
        ]
        columns = ["contender", "caches", "runs", *(f"{stage}, s" for stage in stages)]
        note = (
            "Seconds from the start of the process, best / median. Cold: empty folders for everything compiled. "
            "Artifacts: such folders, and one that `compiled-llm compile` would write."
        )
        yield Table("Start-up", columns, rows, note, leading=2)


# ---- roofline


def _roofline(result: Roofline) -> Table:
    title = f"A decode step of {result.contender}, {result.workload}"
    return Table(title, columns_of(result), rows_of(result, "one decode step"), _roofline_note(result))


def _roofline_note(result: Roofline) -> str:
    note = (
        f"Times by kind from {result.steps} profiled steps about a context of {result.workload.context}; the step from "
        "runs without the profiler."
    )
    if result.host_us is not None:
        note += f" Launching a step takes the host {result.host_us:,.0f} us (idle device, mean, page entries included)."
    return note


def _kernels(results: Sequence[Roofline]) -> Iterator[Table]:
    for result in results:
        rows = [[kernel.name[:100], f"{kernel.launches:.1f}", f"{kernel.us:,.1f}"] for kernel in result.kernels[:10]]
        yield Table(f"Longest {result.measured}, {result.contender}, {result.workload}", ["name", "a step", "us"], rows)


# ---- beams and drafts


def _beams_and_drafts(results: Sequence[Task]) -> Iterator[Table]:
    """A row for each task, a column for each contender; the ratio is the last one's over the first one's."""
    if results:
        contenders = list(dict.fromkeys(result.contender for result in results))
        rows = []
        for task in dict.fromkeys(result.task for result in results):
            rates = {result.contender: result.rate for result in results if result.task == task}
            cells = [pair(rates[name]) if name in rates else "" for name in contenders]
            first, last = rates.get(contenders[0]), rates.get(contenders[-1])
            ratio = "" if first is None or last is None else f"{last.median / first.median:.2f}"
            rows.append([task, *cells, ratio])
        note = f"Tokens/s, best / median of {results[0].rate.runs} runs; ratios are of medians."
        yield Table("Beams, drafts, a chat and scoring", ["task", *contenders, f"x {contenders[0]}"], rows, note)


# ---- offline


def _offline(results: Sequence[Offline]) -> Iterator[Table]:
    """A table for each workload; a contender that got a part of it says so."""
    for workload in dict.fromkeys(result.workload for result in results):
        group = [result for result in results if result.workload == workload]
        columns = [
            "contender",
            "tokens/s",
            f"x {group[0].contender}",
            "prompt tokens/s",
            "seconds",
            *("device busy", "steps", "preemptions", "cached tokens", "warm-up, s"),
        ]
        rows = [_offline_row(result, group[0]) for result in group]
        note = (
            f"Best / median of {group[0].rate.runs} runs over the whole, prompts included; ratios are of medians. "
            "Device busy: of a stretch in the middle of one more run, under the profiler."
        )
        yield Table(sentence(workload), columns, rows, note)


def _offline_row(result: Offline, base: Offline) -> list[str]:
    part = f" ({result.requests} of {result.of_requests} requests)" if result.requests < result.of_requests else ""
    return [
        result.contender + part,
        pair(result.rate),
        f"{result.rate.median / base.rate.median:.2f}",
        pair(result.prompt_rate),
        pair(Spread.of_times(result.seconds)),
        "" if result.busy is None else f"{result.busy:.1%}",
        *(_count(result.counts.get(name)) for name in ("steps", "preemptions", "cached tokens")),
        number(result.ready_s),
    ]


def _count(counts: Sequence[int] | None) -> str:
    return "" if counts is None else f"{statistics.median(counts):,.0f}"


# ---- online


def _online(results: Sequence[Online]) -> Iterator[Table]:
    for workload in dict.fromkeys(result.workload for result in results):
        group = [result for result in results if result.workload == workload]
        group.sort(key=lambda result: result.rate)  # stable: contenders stay in order
        columns = [
            "contender",
            "requests/s",
            *("first token, ms", "between tokens, ms", "end to end, ms"),
            *("tokens/s", "prompts cached", "preemptions", "warm-up, s"),
        ]
        note = "Times: half of all / 99 of 100 are at most this long. They begin when a request was to arrive."
        yield Table(sentence(workload), columns, [_online_row(result) for result in group], note)


def _online_row(result: Online) -> list[str]:
    preemptions = result.counts.get("preemptions")
    return [
        result.contender,
        f"{result.rate:g}",
        *map(percentiles, (result.first_s, result.between_s, result.end_s)),
        number(result.throughput),
        "" if result.hit_rate is None else f"{result.hit_rate:.1%}",
        "" if preemptions is None else str(preemptions),
        number(result.ready_s),
    ]
