"""Sweep on this machine what the rules of kernels were fitted to, and see how well each rule chooses.

    python tools/fit_tilings.py                                    # all rules
    python tools/fit_tilings.py --only linear,attention --quick    # fewer shapes and fewer candidates
    python tools/fit_tilings.py --only attention --cases "B=(32|64), .*fp8"    # whose names match
    python tools/fit_tilings.py --json fit.json

For each case it times every candidate and prints the best, the one that the rule chooses, and how much slower it is.
To fit a rule to another GPU: run this, change the rule's constants (they say what they stand for), run it again. All
but `cpu-linear` need a GPU, and `splitting` and `latent-backend` need FlashInfer. The rules of latents in one go:

    python tools/fit_tilings.py --quick --only latent-decode,latent-prefill,latent-ragged,latent-backend

That of packed queries in 16 bits, in about four minutes; `--cases "D=128, bf"` has one size of heads, in one:

    python tools/fit_tilings.py --quick --only packed-attention --cases bfloat16

What steps that draft cost, for which models are compiled; it prints the constants of the rule besides:

    python tools/fit_tilings.py --quick --only drafts
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from fitting.attention import attention_cases
from fitting.cascade import cascade_cases, cascade_rule_cases
from fitting.cases import Case, Fit, Machine, measure
from fitting.cpu_linear import cpu_linear_cases
from fitting.drafts import constants_of, draft_cases
from fitting.invariant import invariant_attention_cases, invariant_linear_cases
from fitting.latents import latent_backend_cases, latent_decode_cases, latent_prefill_cases, ragged_cases
from fitting.linear import chained_cases, linear_cases, normed_cases
from fitting.packed import packed_cases
from fitting.packed_weights import packed_weight_cases
from fitting.prefill import captured_cases, splitting_cases
from fitting.sparse import block_sparse_cases
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from compiled_llm_ops.kernels.pdl import is_hopper

CLOSE = 0.03
"""How much slower than the best a choice may be to count as right."""

SWEEPS: dict[str, Callable[[Machine, bool], Iterator[Case]]] = {
    "linear": linear_cases,
    "normed": normed_cases,
    "chained": chained_cases,
    "attention": attention_cases,
    "cascade": cascade_cases,
    "cascade-rule": cascade_rule_cases,
    "splitting": splitting_cases,
    "captured": captured_cases,
    "invariant-linear": invariant_linear_cases,
    "invariant-attention": invariant_attention_cases,
    "packed-attention": packed_cases,
    "packed": packed_weight_cases,
    "drafts": draft_cases,
    "latent-decode": latent_decode_cases,
    "latent-prefill": latent_prefill_cases,
    "latent-ragged": ragged_cases,
    "latent-backend": latent_backend_cases,
    "block-sparse": block_sparse_cases,
    "cpu-linear": cpu_linear_cases,
}


# ---- what is printed


def table_of(rule: str, fits: Sequence[Fit]) -> Table:
    """Cases, the worst choice first."""
    right = sum(fit.slower <= CLOSE for fit in fits)
    table = Table(title=f"{rule}: {right} of {len(fits)} choices within {CLOSE:.0%} of the best", title_justify="left")
    for column in ("case", "best", "µs", "chosen", "µs", "slower"):
        table.add_column(column, justify="right" if column in ("µs", "slower") else "left")
    for fit in sorted(fits, key=lambda fit: -fit.slower):
        best, chosen = (f"{fit.times[name]:.1f}" for name in (fit.best, fit.chosen))
        table.add_row(fit.case, fit.best, best, fit.chosen, chosen, f"{fit.slower:.1%}")
    return table


def machine_of_this_gpu() -> Machine:
    properties = torch.cuda.get_device_properties(0)
    hopper = is_hopper(torch.device("cuda"))
    return Machine(properties.multi_processor_count, properties.shared_memory_per_multiprocessor, hopper)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--only", default=",".join(SWEEPS), help=f"some of {','.join(SWEEPS)}")
    parser.add_argument("--quick", action="store_true", help="fewer shapes, fewer candidates")
    parser.add_argument("--cases", default="", metavar="REGEX", help="only cases whose names contain a match of it")
    parser.add_argument("--json", type=Path, help="write all times here")
    given = parser.parse_args(arguments)
    rules = given.only.split(",")
    if unknown := set(rules) - SWEEPS.keys():
        parser.error(f"{', '.join(sorted(unknown))}: not among {', '.join(SWEEPS)}")
    if not torch.cuda.is_available() and rules != ["cpu-linear"]:
        parser.error("torch sees no CUDA device; without one there is --only cpu-linear")
    machine = machine_of_this_gpu() if torch.cuda.is_available() else Machine()
    cases = [case for rule in rules for case in SWEEPS[rule](machine, given.quick) if re.search(given.cases, case.name)]
    fits = fits_of(cases)
    console = Console()
    for rule in rules:
        console.print(table_of(rule, [fit for fit in fits if fit.rule == rule]))
    if "drafts" in rules:
        print(constants_of([fit for fit in fits if fit.rule == "drafts"]))
    if given.json is not None:
        content = {"machine": name_of(machine), "fits": [fit._asdict() for fit in fits]}
        given.json.write_text(json.dumps(content, indent=1))


def fits_of(cases: Sequence[Case]) -> list[Fit]:
    """Measure cases; Ctrl-C keeps those that have been measured."""
    fits = []
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress, torch.inference_mode():
        task = progress.add_task("measuring", total=len(cases))
        try:
            for case in cases:
                progress.update(task, description=f"{case.rule}: {case.name}")
                fits.append(measure(case))
                progress.advance(task)
        except KeyboardInterrupt:
            print(f"stopped after {len(fits)} of {len(cases)} cases", file=sys.stderr)
    return fits


def name_of(machine: Machine) -> dict[str, Any]:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"gpu": gpu, "torch": torch.__version__, **machine._asdict()}


if __name__ == "__main__":
    main()
