"""Tables of attention ops: for each case its contenders, the fastest first, then those without a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from compiled_llm.commands.bench.report import Result
from compiled_llm.commands.bench.tables import Columns, Table, groups, number, percent

DEVICE_FIGURES = {
    "decode": ("of_bandwidth", "of the read bandwidth"),
    "shared": ("of_bandwidth", "of the read bandwidth"),
    "prefill": ("of_product", "of a product"),
}


def attention_tables(results: Sequence[Result]) -> Iterator[Table]:
    """Yield a table for each kind of cases."""
    for of_kind in groups(results, "kind"):
        kind, heads = of_kind[0]["kind"], of_kind[0]["heads"]
        shown = [DEVICE_FIGURES[kind]] if kind in DEVICE_FIGURES else list(DEVICE_FIGURES.values())
        never = _never(of_kind)
        timed = [one for one in of_kind if one["contender"] not in never]
        ordered = [one for case in groups(timed, "case") for one in sorted(case, key=_microseconds)]
        ordered += never.values()
        best = {case[0]["case"]: min(map(_microseconds, case)) for case in groups(of_kind, "case")}
        columns: Columns = {
            "case": lambda result: result["case"],
            "contender": lambda result: result["contender"],
            "us": lambda result: _figure(result, "us"),
            "x best": lambda result, best=best: _ratio(result, best.get(result["case"], math.inf)),  # type: ignore[misc]
        }
        if any(name == "of_bandwidth" for name, _ in shown):
            columns["GB/s"] = lambda result: _figure(result, "bytes_per_s", 1e-9)
        if any(name == "of_product" for name, _ in shown):
            columns["TFLOP/s"] = lambda result: _figure(result, "flops_per_s", 1e-12)
        for name, title in shown:
            columns[title] = lambda result, name=name: percent(result["figures"].get(name))  # type: ignore[misc]
        columns |= {"off": _off, "timed": lambda result: result["timed"], "remark": lambda result: result["remark"]}
        product = of_kind[0]["product"]
        note = f"A product of {product['of']}: {number(product['flops_per_s'] * 1e-12)} TFLOP/s in this run. "
        note += "Off: how far the worst head is from dense attention, as a share of its norm."
        title = f"{kind.capitalize()}: {heads['query']} query heads, {heads['kv']} kv heads of {heads['dim']}"
        yield Table(title, ordered, columns, note, leading=2)


def _never(results: Sequence[Result]) -> dict[str, Result]:
    """Return one row for each contender that has no time in any case, always for the same reason."""
    found = {}
    for of_one in groups(results, "contender"):
        if len({one["remark"] for one in of_one}) == 1 and not any(one["figures"] for one in of_one):
            name = "all" if len(of_one) > 1 else of_one[0]["case"]
            found[of_one[0]["contender"]] = of_one[0] | {"case": name, "off": None}
    return found


def _microseconds(result: Result) -> float:
    return float(result["figures"].get("us", math.inf))


def _figure(result: Result, name: str, scale: float = 1.0) -> str:
    value = result["figures"].get(name)
    return "" if value is None else number(value * scale)


def _ratio(result: Result, best: float) -> str:
    found = _microseconds(result)
    return "" if math.isinf(found) else f"{found / best:.2f}"


def _off(result: Result) -> str:
    if result["off"] is None:
        return ""
    return f"{result['off']:.2%}{', DIFFERS' if result['differs'] else ''}"
