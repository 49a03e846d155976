"""Variants alone: ops that attend by a function of Python, beside the arguments that they have for the same.

python tools/bench/variants.py --json variants.json
python tools/bench/variants.py --size 8B --only decode
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, NamedTuple

import torch
import typer
from attention import SIZES, heads_of
from attention_ops.cases import Case, Heads, Row
from attention_ops.inputs import PAGE_SIZE, Inputs, Launch
from attention_ops.measuring import LostDeviceError, check_device, reason, timed_launches
from common import Bench, Commit, DeviceName, Json, bench
from torch import Tensor

from compiled_llm.commands.bench.report import Result
from compiled_llm.commands.bench.tables import TABLES, Columns, Table, groups, number
from compiled_llm_ops import (
    Geometry,
    decode_attention,
    decode_attention_variant,
    paged_attention,
    paged_attention_variant,
    plan_paged_attention,
    register_variant,
)
from compiled_llm_ops.backends import backend_named

KINDS = ("decode", "prefill")
CAP, WINDOW = 30.0, 1023


def capped(logit: Any, row: Any, head: Any, query_position: Any, key_position: Any) -> Any:
    return CAP * torch.tanh(logit / CAP)


def near(row: Any, head: Any, query_position: Any, key_position: Any) -> Any:
    return query_position - key_position <= WINDOW


class Way(NamedTuple):
    """The variant's functions, and the arguments that mean the same; ``window_left`` is given to both."""

    functions: dict[str, Any]
    window_left: int = -1
    soft_cap: float = 0.0


WAYS = {
    "soft cap": Way({"logits": capped}, soft_cap=CAP),
    "window": Way({"visible": near}, window_left=WINDOW),
    "neither": Way({}),
}


def cases_of(kinds: Sequence[str], tiny: bool) -> list[Case]:
    """Rows of one new token with equally many keys, and prompts."""
    many = (1, 607), (8, 607), (64, 607), (256, 607), (1, 8192), (64, 8192)
    batches = ((1, 20), (3, 40)) if tiny else many
    decode = [Case("decode", f"B={rows}, {keys} keys", (Row(1, keys),) * rows) for rows, keys in batches]
    prompts = ((20,), (5, 33)) if tiny else ((512,), (4096,), (16, 100, 300, 500, 700, 900, 1000, 1024))
    prefill = [
        Case("prefill", f"B={len(news)}, {min(news)} to {max(news)} new", tuple(Row(new, new) for new in news))
        for news in prompts
    ]
    return [case for case in (*decode, *prefill) if case.kind in kinds]


def main(
    size: Annotated[str, typer.Option(help=f"Whose heads: {', '.join(SIZES)}.")] = "0.6B",
    only: Annotated[str, typer.Option(help=f"Kinds of cases: {', '.join(KINDS)}.")] = ",".join(KINDS),
    device: DeviceName = "auto",
    json: Json = None,
    commit: Commit = None,
) -> None:
    """Measure variants on pages of 16 tokens; what cannot run is a row that says why."""
    kinds = [kind.strip() for kind in only.split(",") if kind.strip()]
    if size not in SIZES or not kinds or {*kinds} - {*KINDS}:
        raise SystemExit(f"--size {size}, --only {only}: there are {', '.join(SIZES)}, and {', '.join(KINDS)}")
    with bench(SIZES[size], device, [], json, commit) as run, torch.inference_mode():
        try:
            for case in cases_of(kinds, tiny=size == "tiny"):
                measure_all(run, heads_of(SIZES[size]), case)
        except LostDeviceError as error:
            run.report.failures.append(f"{error}; the device is unusable, so what would come after it is missing")


def measure_all(run: Bench, heads: Heads, case: Case) -> None:
    setup = run.setup
    setup.log(f"{case.kind}, {case.name}: filling pages")
    setup.free_memory()  # of the last case
    inputs = Inputs(case, heads, setup.device, setup.dtype)
    for name, way in WAYS.items():
        setup.log(f"{case.kind}, {case.name}: {name}")
        run.add("variants", result_of(inputs, name, way))


def result_of(inputs: Inputs, name: str, way: Way) -> dict[str, Any]:
    """Return what a report keeps of one way, a dict that goes into JSON."""
    case, figures, remark = inputs.case, dict[str, float](), ""
    try:
        both = (decode_launches if case.kind == "decode" else packed_launches)(inputs, name, way)
        own, expected = (launch(0)[0].float() for launch in both)
        figures["off"] = float((own - expected).norm() / expected.norm())
        of_variant, of_argument = (timed_launches(launch, inputs.device, len(inputs.pages))[0] for launch in both)
        figures |= {"us": of_variant, "us_argument": of_argument, "ratio": of_variant / of_argument}
    except Exception as error:
        check_device(inputs.device)
        remark = reason(error)
    heads = inputs.heads._asdict()
    return {"kind": case.kind, "case": case.name, "way": name, "heads": heads, "figures": figures, "remark": remark}


def _variant(name: str, way: Way) -> str:
    return register_variant(f"bench_{name.replace(' ', '_')}", **way.functions).name


def decode_launches(inputs: Inputs, name: str, way: Way) -> tuple[Launch, Launch]:
    """Return a step of decode with the variant, and one with the argument."""
    part, pages, variant = inputs.whole, inputs.pages, _variant(name, way)
    (key, value), indices = inputs.newest(part), inputs.with_room(part)
    rest = part.device.indptr[:-1], part.lengths, indices

    def by_variant(number: int) -> Sequence[Tensor]:
        table = (pages[number % len(pages)], *rest)
        how = (variant, [], inputs.scale, way.window_left)
        return (decode_attention_variant(part.query, key, value, *table, *how, overlap=True),)

    def by_argument(number: int) -> Sequence[Tensor]:
        table = (pages[number % len(pages)], *rest)
        how = (inputs.scale, way.window_left, way.soft_cap)
        return (decode_attention(part.query, key, value, *table, *how, overlap=True),)

    return by_variant, by_argument


def packed_launches(inputs: Inputs, name: str, way: Way) -> tuple[Launch, Launch]:
    """Return prompts with the variant, and with the argument by the same kernel, that of the backend ``triton``."""
    part, pages, variant, device = inputs.whole, inputs.pages, _variant(name, way), inputs.device
    backend = backend_named("triton" if device.type == "cuda" else "reference")
    geometry = Geometry(*inputs.heads, PAGE_SIZE, way.window_left, way.soft_cap, inputs.dtype, inputs.dtype)
    workspace = backend.workspace(device, backend.workspace_bytes([geometry], device, None))
    plan = backend.new_plan(workspace, backend.plan_bytes([geometry], device, len(part.query), len(part.rows)))
    host = part.host.qo_indptr, part.host.indptr, part.host.last_page_len
    plan_paged_attention(plan.tensor, plan.numbers, *host, workspace.buffer, *geometry)

    def by_variant(number: int) -> Sequence[Tensor]:
        how = (variant, [], inputs.scale, way.window_left)
        return (paged_attention_variant(part.query, pages[number % len(pages)], *part.device, *how),)

    def by_argument(number: int) -> Sequence[Tensor]:
        how = (plan.tensor, workspace.buffer, inputs.scale, way.window_left, way.soft_cap)
        return (paged_attention(part.query, pages[number % len(pages)], *part.device, *how),)

    return by_variant, by_argument


def variants_tables(results: Sequence[Result]) -> Iterator[Table]:
    columns: Columns = {
        "case": lambda result: result["case"],
        "way": lambda result: result["way"],
        "us of the variant": lambda result: _figure(result, "us"),
        "us of the argument": lambda result: _figure(result, "us_argument"),
        "ratio": lambda result: _figure(result, "ratio"),
        "remark": lambda result: result["remark"],
    }
    for of_kind in groups(results, "kind"):
        heads = of_kind[0]["heads"]
        title = (
            f"{of_kind[0]['kind'].capitalize()}: {heads['query']} query heads, {heads['kv']} kv heads of {heads['dim']}"
        )
        yield Table(title, of_kind, columns, leading=2)


def _figure(result: Result, name: str) -> str:
    return number(result["figures"][name]) if name in result["figures"] else ""


TABLES["variants"] = variants_tables

if __name__ == "__main__":
    typer.run(main)
