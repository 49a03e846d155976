"""Attention ops alone: ours, FlashInfer's, flash-attn's and torch's on the same keys and values, cold as in a model.

python tools/bench/attention.py --check --json attention.json
python tools/bench/attention.py --quick --only decode,mixed --size 8B --contenders decode_attention,flashinfer:decode
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Annotated

import torch
import typer
from attention_ops.building import build
from attention_ops.cases import KINDS, Case, Heads, cases_of
from attention_ops.checking import dense
from attention_ops.contenders import CONTENDERS, OpContender, named
from attention_ops.inputs import Inputs
from attention_ops.measuring import (
    LostDeviceError,
    Measured,
    check_device,
    measure,
    measure_peaks,
    reason,
    result_of,
)
from common import Bench, Commit, DeviceName, Json, bench
from shapes import SHAPES
from torch import Tensor

SIZES = {"0.6B": "qwen3-0.6b", "8B": "qwen3-8b", "tiny": "tiny"}
ALL_KINDS = ",".join(KINDS)
Only = Annotated[str, typer.Option(help=f"Kinds of cases, comma-separated: {', '.join(KINDS)}.")]
Names = Annotated[str, typer.Option(help=f"All, or some of {', '.join(one.name for one in CONTENDERS)}.")]


def main(
    size: Annotated[str, typer.Option(help=f"Whose heads: {', '.join(SIZES)}.")] = "0.6B",
    only: Only = ALL_KINDS,
    contenders: Names = "",
    quick: Annotated[bool, typer.Option("--quick", help="A few cases of each kind.")] = False,
    check: Annotated[bool, typer.Option("--check", help="First compare each result with dense attention.")] = False,
    device: DeviceName = "auto",
    json: Json = None,
    commit: Commit = None,
) -> None:
    """Measure attention ops alone on pages of 16 tokens; what cannot run is a row that says why."""
    if size not in SIZES:
        raise SystemExit(f"--size {size}: there are {', '.join(SIZES)}")
    kinds = [kind.strip() for kind in only.split(",") if kind.strip()]
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown or not kinds:
        raise SystemExit(f"--only: no {', '.join(unknown) or 'kind is named'}; there are {', '.join(KINDS)}")
    chosen, cases = [one for one in named(contenders) if {*one.kinds} & {*kinds}], cases_of(kinds, quick)
    if not chosen:
        raise SystemExit(f"--contenders: none of {contenders} computes cases of {only}")
    with bench(SIZES[size], device, [], json, commit, bandwidth=True) as run, torch.inference_mode():
        with suppress(importlib.metadata.PackageNotFoundError):
            run.report.machine["versions"]["flash-attn"] = importlib.metadata.version("flash-attn")
        try:
            measure_all(run, heads_of(SIZES[size]), chosen, cases, check)
        except LostDeviceError as error:
            run.report.failures.append(f"{error}; the device is unusable, so what would come after it is missing")


def heads_of(model: str) -> Heads:
    config = SHAPES[model].config()
    return Heads(config.num_attention_heads, config.num_key_value_heads, config.head_dim)


def measure_all(
    run: Bench, heads: Heads, contenders: Sequence[OpContender], cases: Sequence[Case], check: bool
) -> None:
    device, dtype = run.setup.device, run.setup.dtype
    assert run.report.read_bandwidth is not None
    run.setup.log("measuring a matrix product")
    peaks = measure_peaks(run.report.read_bandwidth, device, dtype)
    build(contenders, heads, device, dtype, run.setup.log)
    for number, case in enumerate(cases, 1):
        for contender, found in results_of(run, f"{number} of {len(cases)}, ", heads, contenders, case, check):
            run.add("attention", result_of(contender, case, heads, dtype.itemsize, found, peaks))
            if found.differs:
                run.report.failures.append(f"{case.name}: {contender.name} differs from dense attention")


def results_of(
    run: Bench, number: str, heads: Heads, contenders: Sequence[OpContender], case: Case, check: bool
) -> Iterator[tuple[OpContender, Measured]]:
    """Yield what came of each contender that computes cases of this kind."""
    taking_part = [one for one in contenders if case.kind in one.kinds]
    run.setup.log(f"{number}{case.kind}, {case.name}: filling pages")
    run.setup.free_memory()  # of the last case
    try:
        inputs = Inputs(case, heads, run.setup.device, run.setup.dtype)
    except Exception as error:
        check_device(run.setup.device)
        yield from ((one, Measured(remark=reason(error))) for one in taking_part)
        return
    expected = expected_of(run, inputs) if check else None
    for contender in taking_part:
        run.setup.log(f"{number}{case.kind}, {case.name}: {contender.name}")
        yield contender, measure(contender, inputs, expected)


def expected_of(run: Bench, inputs: Inputs) -> Tensor | None:
    """Return what dense attention gives; if that fails, the case is measured unchecked."""
    try:
        return dense(inputs)
    except Exception as error:
        check_device(inputs.device)
        run.report.failures.append(f"{inputs.case.name} is not checked: {reason(error)}")
        return None


if __name__ == "__main__":
    typer.run(main)
