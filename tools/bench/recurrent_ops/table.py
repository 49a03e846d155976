"""Tables of recurrent layers' ops: for each layer and case its contenders, the fastest first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from compiled_llm.commands.bench.report import Result
from compiled_llm.commands.bench.tables import Columns, Table, groups, number, percent


def recurrent_tables(results: Sequence[Result]) -> Iterator[Table]:
    """Yield a table for each layer."""
    for of_layer in groups(results, "layer"):
        best = {case[0]["case"]: min(map(_microseconds, case)) for case in groups(of_layer, "case")}
        columns: Columns = {
            "case": lambda result: f"{result['kind']} {result['case']}",
            "contender": lambda result: result["contender"],
            "us": lambda result: _figure(result, "us"),
            "x best": lambda result, best=best: _ratio(result, best[result["case"]]),  # type: ignore[misc]
            "MB": lambda result: number(result["nbytes"] / 1e6),
            "GB/s": lambda result: _figure(result, "bytes_per_s", 1e-9),
            "of the read bandwidth": lambda result: percent(result["figures"].get("of_bandwidth")),
            "off": lambda result: "" if result["off"] is None else f"{result['off']:.2%}",
            "timed": lambda result: result["timed"],
            "remark": lambda result: result["remark"],
        }
        ordered = [one for case in groups(of_layer, "case") for one in sorted(case, key=_microseconds)]
        note = "MB: tokens, results, and states read and written. Off: the worst head, as a share of its norm."
        yield Table(f"{of_layer[0]['layer']}, {of_layer[0]['op']}", ordered, columns, note, leading=2)


def _microseconds(result: Result) -> float:
    return float(result["figures"].get("us", math.inf))


def _figure(result: Result, name: str, scale: float = 1.0) -> str:
    value = result["figures"].get(name)
    return "" if value is None else number(value * scale)


def _ratio(result: Result, best: float) -> str:
    found = _microseconds(result)
    return "" if math.isinf(found) else f"{found / best:.2f}"
