"""Ops of recurrent layers alone: ours in chunks and by tokens, flash-linear-attention's, FlashInfer's, HuggingFace's.

python tools/bench/recurrent.py --check --json recurrent.json
python tools/bench/recurrent.py --quick --layers qwen3.5 --fit
"""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, Any

import torch
import typer
from attention_ops.measuring import LostDeviceError, Measured, check_device, measured, reason
from common import Bench, Commit, DeviceName, Json, bench
from recurrent_ops.cases import KINDS, LAYERS, Case, Inputs, Layer, cases_of, layers_of
from recurrent_ops.contenders import CONTENDERS, Contender, named, ours
from torch import Tensor

TOLERANCE = 0.03
"""How far the result of a token's heads may be off, as a share of the largest norm of a head of that token."""


def main(
    size: Annotated[str, typer.Option(help="full, or tiny for a test.")] = "full",
    layers: Annotated[str, typer.Option(help=f"All, or some of {', '.join(LAYERS)}.")] = "",
    only: Annotated[str, typer.Option(help=f"Kinds of cases: {', '.join(KINDS)}.")] = ",".join(KINDS),
    contenders: Annotated[str, typer.Option(help=f"All, or some of {', '.join(c.name for c in CONTENDERS)}.")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="A few cases.")] = False,
    fit: Annotated[bool, typer.Option("--fit", help="Also our kernel for chunks in other tilings.")] = False,
    check: Annotated[bool, typer.Option("--check", help="First compare each result with the op on the CPU.")] = False,
    device: DeviceName = "auto",
    json: Json = None,
    commit: Commit = None,
) -> None:
    """Measure ops of recurrent layers alone; what cannot run is a row that says why."""
    wanted, kinds = _some(layers, LAYERS, "--layers"), _some(only, KINDS, "--only")
    if size not in ("full", "tiny"):
        raise SystemExit(f"--size {size}: there are full, tiny")
    chosen, cases = named(contenders, fit), cases_of(kinds, size, quick)
    name = f"recurrent layers, {size}"
    with (
        bench(name, device, [], json, commit, bandwidth=True) as run,
        torch.inference_mode(),
        suppress(LostDeviceError),
    ):
        for layer in layers_of(wanted, size):
            for case in cases:
                measure_case(run, layer, case, [one for one in chosen if layer.op in one.ops], check)


def _some(names: str, known: Any, option: str) -> list[str]:
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if unknown := [name for name in wanted if name not in known]:
        raise SystemExit(f"{option}: no {', '.join(unknown)}; there are {', '.join(known)}")
    return wanted or list(known)


def measure_case(run: Bench, layer: Layer, case: Case, contenders: list[Contender], check: bool) -> None:
    """Measure all contenders on one case; ``LostDeviceError`` if the device is unusable afterwards."""
    run.setup.log(f"{layer.model}, {case.kind} {case.name}")
    run.setup.free_memory()  # of the last case
    try:
        inputs = Inputs(layer, case, run.setup.device, run.setup.dtype)
        expected = expected_of(inputs) if check else None
    except Exception as error:
        check_device(run.setup.device)
        run.report.failures.append(f"{layer.model}, {case.name}: {reason(error)}")
        return
    for contender in contenders:
        run.setup.log(f"{layer.model}, {case.kind} {case.name}: {contender.name}")
        try:
            found = measure(contender, inputs, expected)
        except LostDeviceError as error:
            run.report.failures.append(f"{layer.model}, {case.name}, {contender.name}: {error}; the device is lost")
            raise
        differs = found.off is not None and not found.off <= TOLERANCE
        if differs:
            run.report.failures.append(f"{layer.model}, {case.name}: {contender.name} differs from the op on the CPU")
        run.add("recurrent", result_of(run, contender, inputs, found, differs))


def measure(contender: Contender, inputs: Inputs, expected: Tensor | None) -> Measured:
    """Measure a contender; with ``expected`` compare its first result. Raises as ``measured``."""
    off = None if expected is None else lambda result: deviation(result, expected)
    return measured(lambda: contender.prepare(inputs), inputs.device, len(inputs.args), off)


def expected_of(inputs: Inputs) -> Tensor:
    """Return what the op computes on the CPU, in float32 of the same inputs."""
    args = inputs.args[0]
    there = type(args)(*(each.cpu() if isinstance(each, Tensor) else each for each in args))
    found = ours(_OnCpu(inputs, there))  # type: ignore[arg-type]
    assert not isinstance(found, str)
    return found(0)


class _OnCpu:
    """Inputs on the CPU, of one launch."""

    def __init__(self, inputs: Inputs, args: Any) -> None:
        in_32 = {"query", "key", "value", "tokens", "b", "c", "beta"}
        self.layer, self.case = inputs.layer, inputs.case
        self.args = [args._replace(**{name: getattr(args, name).float() for name in args._fields if name in in_32})]


def deviation(found: Tensor, expected: Tensor) -> float:
    """Return how far the worst head of a token is off; NaN counts as inf."""
    if found.shape != expected.shape:
        raise ValueError(f"it returned {list(found.shape)} and not {list(expected.shape)}")
    off = (found.cpu().float() - expected.float()).norm(dim=-1)
    off = off / expected.float().norm(dim=-1).amax(dim=-1, keepdim=True)
    return float(off.nan_to_num(nan=torch.inf).max())


def result_of(run: Bench, contender: Contender, inputs: Inputs, found: Measured, differs: bool) -> dict[str, Any]:
    """Return what a report keeps of it."""
    nbytes, bandwidth = inputs.case.nbytes(inputs.layer, inputs.dtype.itemsize), run.report.read_bandwidth
    figures: dict[str, float] = {}
    if found.us is not None and bandwidth is not None:
        per_second = nbytes * 1e6 / found.us
        figures = {"us": found.us, "bytes_per_s": per_second, "of_bandwidth": per_second / bandwidth}
    return {
        "layer": inputs.layer.model,
        "op": inputs.layer.op,
        "sizes": inputs.layer._asdict(),
        "kind": inputs.case.kind,
        "case": inputs.case.name,
        "contender": contender.name,
        "rows": len(inputs.case.counts),
        "new_tokens": sum(inputs.case.counts),
        "nbytes": nbytes,
        "timed": found.timed,
        "off": found.off,
        "differs": differs,
        "remark": found.remark,
        "figures": figures,
    }


if __name__ == "__main__":
    typer.run(main)
