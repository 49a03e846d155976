"""What mkdocs calls while it builds: published runs as tables, so that no figure is typed in by hand.

A page asks for a run by a comment of its own line: ``<!-- run: d414b6d-latency-qwen3-0.6b.json -->``, a file of
``results/``. It gets the run's command, commit, machine and remark, and a table of each kind of figures that it has.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).parents[1]
RESULTS = CHECKOUT / "results"
LAST_WITH_ALL_SCRIPTS = "d868dfb9"
"""The commit that still has the scripts of all published runs."""
_PLACE = re.compile(r"^<!-- run: (\S+\.json) -->$", re.MULTILINE)

Entry = dict[str, Any]
Read = Callable[[Entry], str]


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put runs where the page asks for them; mkdocs calls this for each page."""
    return _PLACE.sub(lambda place: shown(place[1]), markdown)


def shown(name: str) -> str:
    """Return one file of ``results/`` as Markdown.

    Raises:
        ValueError: it has figures of a kind that no table is known for.
    """
    run = json.loads((RESULTS / name).read_text())
    parts = [f"`{run['command']}`"] if run.get("command") else []
    parts.append(f"{_made_by(run)}; [JSON](../results/{name}).")
    parts += [run["remark"]] if run.get("remark") else []
    unknown = {key for key, value in run.items() if isinstance(value, list) and key not in (*TABLES, *OTHERS)}
    if unknown:
        raise ValueError(f"results/{name}: {sorted(unknown)} have no table in docs/figures.py")
    for kind in (key for key in run if key in TABLES or key in OTHERS):
        parts += OTHERS[kind](run[kind]) if kind in OTHERS else _tables(run[kind], *TABLES[kind])
    return "\n\n".join(parts)


def _made_by(run: Entry) -> str:
    machine = run["machine"]
    device = machine["gpu"] or machine["cpu"]
    parts = [f"Commit {machine['commit'][:7]}", machine.get("date"), device["name"]]
    if bandwidth := run.get("read_bandwidth"):
        parts.append(f"read bandwidth {number(bandwidth / 1e9)} GB/s")
    script = re.search(r"tools/\S+\.py", run.get("command") or "")
    if script and not (CHECKOUT / script[0]).exists():
        parts.append(f"script at commit {LAST_WITH_ALL_SCRIPTS}")
    return ", ".join(filter(None, parts))


# ---- cells


def number(value: float | None, unit: float = 1.0) -> str:
    """Return a figure in its column's unit, without the noise of binary fractions; measured ones with three digits."""
    if value is None:
        return ""
    rounded = float(f"{value * unit:.6g}")
    short = f"{rounded:,.10g}"
    measured = isinstance(value, float) and 1 <= rounded < 100
    return max(short, f"{rounded:.{1 if rounded >= 10 else 2}f}", key=len) if measured else short


def share(value: float | None) -> str:
    """Return a share of 1 in percent."""
    return "" if value is None else f"{float(f'{value * 100:.6g}'):g}%"


def _at(entry: Entry, path: str) -> Any:
    found: Any = entry
    for key in path.split("/"):
        found = found.get(key) if isinstance(found, dict) else None
    return found


def _text(path: str) -> Read:
    return lambda entry: str(_at(entry, path) or "")


def _number(path: str, unit: float = 1.0) -> Read:
    return lambda entry: number(_at(entry, path), unit)


def _share(path: str) -> Read:
    return lambda entry: share(_at(entry, path))


def _times(path: str) -> Read:
    """Best / median of runs; from 100 runs on, their 99th percentile as well."""

    def read(entry: Entry, unit: float) -> str:
        figure = _at(entry, path) or {}
        found = [figure.get(key) for key in ("best", "median", "p99")]
        return " / ".join(number(value, unit) for value in found if value is not None)

    return lambda entry: read(entry, 1e3 if path.endswith("first_s") else 1.0)


def _halves(path: str) -> Read:
    """Half of all / 99 of 100, in milliseconds."""

    def read(entry: Entry) -> str:
        figure = _at(entry, path)
        return "" if not figure else f"{number(figure['p50'], 1e3)} / {number(figure['p99'], 1e3)}"

    return read


# ---- tables


def _tables(entries: list[Entry], title: Callable[[Entry], str], columns: dict[str, Read]) -> Iterator[str]:
    for name in dict.fromkeys(map(title, entries)):
        if name:
            yield f"**{name}**"
        yield _table(columns, [entry for entry in entries if title(entry) == name])


def _table(columns: dict[str, Read], entries: list[Entry]) -> str:
    rows = [[read(entry) for read in columns.values()] for entry in entries]
    kept = [place for place in range(len(columns)) if any(row[place] for row in rows)]
    names = [list(columns)[place] for place in kept]
    lines = [names, ["---:" if place else "---" for place in kept], *([row[place] for place in kept] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _memory(found: Entry) -> Iterator[str]:
    entries = [{"contender": contender, **parts} for contender, parts in found.items()]
    names = dict.fromkeys(name for parts in found.values() for name in parts)
    yield "**Memory, MiB**"
    yield _table({"contender": _text("contender"), **{name: _number(name) for name in names}}, entries)


def _roofline(entries: list[Entry]) -> Iterator[str]:
    columns = {
        "kernels": _text("name"),
        "launches": _number("launches"),
        "us": _number("us"),
        "of the step": _share("of_the_step"),
        "MB": _number("nbytes", 1e-6),
        "of the read bandwidth": _share("of_bandwidth"),
    }
    for entry in entries:
        figures = entry["figures"]
        gaps = {"name": "gaps: no kernel runs", "us": figures["gaps_us"], "of_the_step": figures["gaps_of_the_step"]}
        step = {"name": "one decode step", "us": entry["step_us"], "of_the_step": 1, "nbytes": entry["nbytes"]}
        yield f"**Batch {entry['batch']}** (the host: {number(entry['host_us'])} us)"
        yield _table(columns, [*entry["kinds"], gaps, {**figures, **step}])


def _flat(entries: list[Entry]) -> Iterator[str]:
    """A table of whatever the entries have."""
    yield _table({name.replace("_", " "): _number(name) for name in entries[0]}, entries)


def _latency_title(entry: Entry) -> str:
    how = "sampled" if entry.get("sampled") else "greedy"
    return f"Prompts of {entry['prompt']:,} tokens, {entry['new']} new tokens, {how}{_over(entry)}"


def _prompts_title(entry: Entry) -> str:
    return f"Answers of {entry['new']} tokens"


def _streams_title(entry: Entry) -> str:
    return f"Streams at once, prompts of {entry['prompt']} tokens, answers of {entry['new']}"


def _attention_title(entry: Entry) -> str:
    heads = entry["heads"]
    kind = str(entry["kind"]).capitalize()
    return f"{kind}, {heads['query']} query heads, {heads['kv']} kv heads of size {heads['dim']}"


def _no_title(_: Entry) -> str:
    return ""


def _over(entry: Entry) -> str:
    over = _at(entry, "figures/ratio/over")
    return f"; ratios over {over}" if over else ""


_PROMPTS = (10, *range(50, 401, 50))
"""Lengths of prompts that runs of the modes side by side have."""

CONTENDER = {"contender": _text("contender")}
TABLES: dict[str, tuple[Callable[[Entry], str], dict[str, Read]]] = {
    "latency": (
        _latency_title,
        CONTENDER
        | {
            "batch": _number("batch"),
            "first token, ms": _times("figures/first_s"),
            "decode, tokens/s": _times("figures/decode_tokens_per_s"),
            "ratio": _number("figures/ratio/decode"),
            "of the ceiling": _share("figures/of_ceiling"),
            "end to end, tokens/s": _times("figures/end_to_end_tokens_per_s"),
        },
    ),
    "first_token_of_calls_of_two_tokens": (
        _latency_title,
        {"batch": _number("batch"), "first token, ms": _times("first_s")},
    ),
    "startup": (
        _no_title,
        CONTENDER
        | {
            "caches": _text("cache"),
            "runs": _number("figures/first token/runs"),
            **{f"{name}, s": _times(f"figures/{name}") for name in ("imported", "loaded", "first token", "all tokens")},
        },
    ),
    "offline": (
        lambda entry: f"{entry['workload']}{_over(entry)}",
        CONTENDER
        | {
            "tokens/s": _times("figures/tokens_per_s"),
            "ratio": _number("figures/ratio/tokens_per_s"),
            "prompt tokens/s": _times("figures/prompt_tokens_per_s"),
            "seconds": _times("figures/seconds"),
            "device busy": _share("busy"),
            "steps": _number("counts/steps"),
            "preemptions": _number("counts/preemptions"),
            "cached tokens": _number("counts/cached tokens"),
            "warm-up, s": _number("ready_s"),
        },
    ),
    "online": (
        lambda entry: str(entry["workload"]).capitalize(),
        CONTENDER
        | {
            "requests/s": _number("rate"),
            "first token, ms": _halves("first_s"),
            "between tokens, ms": _halves("between_s"),
            "end to end, ms": _halves("end_s"),
            "tokens/s": _number("figures/tokens_per_s"),
            "prompts cached": _share("figures/hit_rate"),
            "preemptions": _number("counts/preemptions"),
            "warm-up, s": _number("ready_s"),
        },
    ),
    "one_stream": (
        lambda entry: f"One stream, answers of {entry['new']} tokens",
        CONTENDER
        | {
            "prompt": _number("prompt"),
            "first token, ms": _halves("figures/first_s"),
            "between tokens, ms": _halves("between_s"),
            "tokens a piece": _number("figures/tokens_a_piece"),
        },
    ),
    "many_streams": (
        _streams_title,
        CONTENDER
        | {
            "streams": _number("streams"),
            "tokens/s": _times("figures/tokens_per_s"),
            "share": _share("figures/share"),
            "first token, ms": _halves("first_s"),
            "tokens a piece": _number("figures/tokens_a_piece"),
        },
    ),
    "serve": (
        lambda entry: f"Prompts of {entry['prompts']} tokens, answers of {entry['answers']}",
        CONTENDER
        | {
            "load": _text("load"),
            "first token, ms": _halves("first_s"),
            "between tokens, ms": _halves("between_s"),
            "end to end, ms": _halves("end_s"),
            "tokens/s": _times("figures/tokens_per_s"),
            "tokens a piece": _number("figures/tokens_a_piece"),
        },
    ),
    "graph_modes": (
        lambda entry: f"The modes side by side, answers of {entry['new']} tokens",
        CONTENDER
        | {
            "CUDA graphs": _text("recordings"),
            "start, s": _number("start_s"),
            "MiB": _number("nbytes", 2**-20),
            **{f"first of {prompt}, ms": _number(f"figures/first_s/{prompt}", 1e3) for prompt in _PROMPTS},
            "slowest first, ms": _number("figures/slowest_first_s", 1e3),
            "between tokens, ms": _halves("figures/between_s"),
        },
    ),
    "graph_times": (
        _prompts_title,
        CONTENDER
        | {
            "CUDA graphs": _text("recordings"),
            "prompt": _number("prompt"),
            "first token, ms": _halves("figures/first_s"),
            "between tokens, ms": _halves("between_s"),
            "running meanwhile, ms": _halves("figures/running_s"),
        },
    ),
    "graph_use": (
        lambda _: "CUDA graphs",
        CONTENDER
        | {
            "CUDA graphs": _text("recordings"),
            "graphs": _number("ready"),
            "MiB": _number("figures/mib"),
            "captures": _number("captures"),
            "evictions": _number("evictions"),
            "ms a capture": _number("figures/seconds_a_capture", 1e3),
        },
    ),
    "choices": (
        _no_title,
        {"all rows have": _text("settings"), "tokens/s": _number("tokens_per_s/median"), "lost": _share("lost")},
    ),
    "beams_and_drafts": (
        _no_title,
        {"task": _text("task"), **CONTENDER, "tokens/s": _number("figures/tokens_per_s/median")},
    ),
    "loops": (
        _no_title,
        {
            "task": _text("task"),
            **CONTENDER,
            "tokens/s": _times("figures/tokens_per_s"),
            "s": _times("figures/seconds"),
        },
    ),
    "grpo": (
        lambda entry: f"Steps of GRPO, {entry['workload']}",
        CONTENDER
        | {
            "step, s": _times("figures/step"),
            "rollout, s": _times("figures/rollout"),
            "rest, s": _times("figures/rest"),
            "tokens/s": _times("figures/tokens_per_s"),
            "wake, s": _times("figures/wake"),
            "sleep, s": _times("figures/sleep"),
            "first step, s": _number("first_step_s"),
        },
    ),
    "around": (
        _text("task"),
        CONTENDER
        | {
            "s": _times("figures/seconds"),
            "per s": _times("figures/per_s"),
            "first pass, s": _number("first_pass_s"),
            "differs by": _number("differs"),
        },
    ),
    "attention": (
        _attention_title,
        {
            "case": _text("case"),
            **CONTENDER,
            "us": _number("figures/us"),
            "GB/s": _number("figures/bytes_per_s", 1e-9),
            "of the read bandwidth": _share("figures/of_bandwidth"),
            "TFLOP/s": _number("figures/flops_per_s", 1e-12),
            "of a product": _share("figures/of_product"),
            "timed": _text("timed"),
            "remark": _text("remark"),
        },
    ),
    "experts": (
        lambda entry: f"{entry['chosen']} of {entry['experts']} experts",
        {
            "rows": _number("rows"),
            **CONTENDER,
            "us": _number("figures/us"),
            "GB/s": _number("figures/bytes_per_s", 1e-9),
            "of the read bandwidth": _share("figures/of_bandwidth"),
            "TFLOP/s": _number("figures/flops_per_s", 1e-12),
            "off": _share("off"),
            "timed": _text("timed"),
            "remark": _text("remark"),
        },
    ),
    "recurrent": (
        lambda entry: f"{entry['layer']}, `{entry['op']}`",
        {
            "case": lambda entry: f"{entry['kind']} {entry['case']}",
            **CONTENDER,
            "us": _number("figures/us"),
            "GB/s": _number("figures/bytes_per_s", 1e-9),
            "of the read bandwidth": _share("figures/of_bandwidth"),
            "off": _share("off"),
            "timed": _text("timed"),
            "remark": _text("remark"),
        },
    ),
    "variants": (
        lambda entry: "{kind}: {query} query heads, {kv} kv heads of {dim}".format(
            kind=entry["kind"], **entry["heads"]
        ),
        {
            "case": _text("case"),
            "way": _text("way"),
            "us of the variant": _number("figures/us"),
            "us of the argument": _number("figures/us_argument"),
            "ratio": _number("figures/ratio"),
            "remark": _text("remark"),
        },
    ),
    "sparse": (
        lambda entry: entry["op"],
        {
            "case": _text("case"),
            "us": _number("figures/us"),
            "us of dense decode": _number("figures/us_dense"),
            "of its bandwidth": _share("figures/of_dense"),
            "of the read bandwidth": _share("figures/of_bandwidth"),
            "remark": _text("remark"),
        },
    ),
    "sampled_over_greedy": (
        lambda _: "A sampled step over a greedy one",
        CONTENDER | {"batch": _number("batch"), "longer by": _share("step_time")},
    ),
}
"""By kind of figures: how a table is called, which entries share one, and its columns."""
OTHERS: dict[str, Callable[[Any], Iterator[str]]] = {
    "memory_mib": _memory,
    "roofline": _roofline,
    "logits": _flat,
    "prefill_attention": _flat,
    "latent_decode": _flat,
}
"""Kinds whose tables are made otherwise."""
