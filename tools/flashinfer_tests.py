"""FlashInfer's own tests of the functions that `compiled_llm_flashinfer` has.

    python tools/flashinfer_tests.py CHECKOUT
    python tools/flashinfer_tests.py CHECKOUT --device cuda:0 --most 1000
    python tools/flashinfer_tests.py CHECKOUT --only test_block_sparse

CHECKOUT is one of FlashInfer's repository. Of its tests the import and the device are changed, and nothing else:
`flashinfer` is our module; `"cuda:0"`, `"cuda"`, `0` and `.to(0)` are the device. What builds kernels beforehand is
empty, and what asks about GPUs and builds says no. Cases with more keys than `--numbers` are left out, and of the
others as many of each test are drawn as `--most` says. A case that calls what is not here counts as left out, by the
name of the argument. It ends with 1 if more than 10 % of the cases fail.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

TOOLS = Path(__file__).resolve().parent
OWN = (
    "test_alibi", "test_batch_decode_kernels", "test_batch_prefill_kernels", "test_block_sparse",
    "test_decode_prefill_lse", "test_deepseek_mla", "test_logits_cap", "test_mla_page", "test_non_contiguous_decode",
    "test_non_contiguous_prefill", "test_page", "test_shared_prefix_kernels", "test_single_prefill",
    "test_sliding_window", "test_tensor_cores_decode",
)  # fmt: skip
"""FlashInfer's files with tests of what there is. Those of blocks need scipy."""
MOST_FAILURES = 0.1
ALIAS = "import sys\n\nimport compiled_llm_flashinfer as own\n\nsys.modules[__name__] = own\n"
"""The module `flashinfer` of the processes that tests start."""


class Outcomes(NamedTuple):
    """Of the cases of one test."""

    passed: int  # how many
    failed: int  # how many
    skipped: int  # how many the test itself skips
    too_large: int  # how many have too many keys, or took too long
    not_drawn: int  # how many were not drawn
    left_out: Counter[str]  # how many, by the argument or the function that is not here
    said: Counter[str]  # how many failed, by what they said

    @property
    def cases(self) -> int:
        """All that there are."""
        return sum(self[:5]) + self.left_out.total()

    @property
    def share_left_out(self) -> float:
        """Of those that ran and were not skipped."""
        return self.left_out.total() / max(1, self.passed + self.failed + self.left_out.total())


def on_device(source: str, device: str) -> str:
    """Return a test's source for another device."""
    named = re.sub(r"""(["'])cuda(?::0)?\1""", f'"{device}"', source)
    named = re.sub(r"\bdevice=0\b", f'device="{device}"', named)
    named = re.sub(r"\.to\(0\)", f'.to("{device}")', named)
    if device != "cpu":
        return named
    # What frees a GPU's memory has nothing to do.
    return re.sub(r"(def clear_cuda_cache\(.*\n)", r"\1    return\n", named)


def copy_tests(checkout: Path, folder: Path, files: list[str], device: str) -> None:
    """Copy files of tests, and their helpers, for another device.

    Raises:
        typer.BadParameter: a file is not there.
    """
    helpers = folder / "tests" / "test_helpers"
    shutil.copytree(checkout / "tests" / "test_helpers", helpers)
    for part in (folder / "tests", folder / "tests" / "attention"):
        part.mkdir(exist_ok=True)
        (part / "__init__.py").touch()
    for name in files:
        source = checkout / "tests" / "attention" / f"{name}.py"
        if not source.is_file():
            raise typer.BadParameter(f"{source} is not there: give a checkout of FlashInfer 0.6.13's repository")
        (folder / "tests" / "attention" / source.name).write_text(on_device(source.read_text(), device))
    for helper in helpers.glob("*.py"):
        helper.write_text(on_device(helper.read_text(), device))
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "flashinfer.py").write_text(ALIAS)


def outcomes_of(report: Path) -> dict[str, Outcomes]:
    """Return what was written by the plugin, by test."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    left_out: dict[str, Counter[str]] = defaultdict(Counter)
    said: dict[str, Counter[str]] = defaultdict(Counter)
    for line in report.read_text().splitlines():
        case = json.loads(line)
        name, kind = case["test"], case["kind"]
        counts[name][kind] += case.get("count", 1)
        if kind in ("left out", "failed"):
            (left_out if kind == "left out" else said)[name][case["said"]] += 1
    kinds = ("passed", "failed", "skipped", "too large", "not drawn")
    return {name: Outcomes(*(own[kind] for kind in kinds), left_out[name], said[name]) for name, own in counts.items()}


def show(outcomes: dict[str, Outcomes], console: Console) -> None:
    """Print a table of tests, and what failures said."""
    table = Table("test", "cases", "passed", "failed", "left out", "skipped", "too large", "not drawn")
    files = sorted({name.split("::")[0] for name in outcomes})
    for file in files:
        table.add_row(file, style="bold")
        for name, own in sorted(outcomes.items()):
            if name.startswith(f"{file}::"):
                left_out = ", ".join(f"{count} by {argument}" for argument, count in own.left_out.most_common())
                shown = map(str, (own.cases, own.passed, own.failed))
                table.add_row(name.split("::")[1], *shown, left_out, *map(str, own[2:5]))
    console.print(table)
    for name, own in sorted(outcomes.items()):
        for said, count in own.said.most_common(3):
            console.print(f"{name}: {count} failed with {said}", markup=False)


def summary(outcomes: dict[str, Outcomes], seed: int) -> str:
    """Say how many cases passed, and which share of all is left out, from those that ran."""
    passed, failed, cases = (
        sum(getattr(own, kind) for own in outcomes.values()) for kind in ("passed", "failed", "cases")
    )
    by_name: Counter[str] = Counter()
    for own in outcomes.values():
        for argument, count in own.left_out.items():
            by_name[argument] += round(own.cases * own.share_left_out * count / own.left_out.total())
    shares = ", ".join(f"{count} ({count / cases:.1%}) by {argument}" for argument, count in by_name.most_common())
    return f"seed {seed}: {passed} of {passed + failed} cases passed; of all {cases}, left out are {shares or 'none'}"


def main(
    checkout: Annotated[Path, typer.Argument(help="a checkout of FlashInfer's repository")],
    only: Annotated[list[str] | None, typer.Option(help="files, without .py; may be repeated")] = None,
    device: Annotated[str, typer.Option(help="where tensors are")] = "cpu",
    most: Annotated[int, typer.Option(help="cases of each test, at most")] = 40,
    numbers: Annotated[int, typer.Option(help="numbers of keys that a case may have")] = 2**24,
    seconds: Annotated[int, typer.Option(help="that a case may take")] = 60,
    seed: Annotated[int, typer.Option(help="of the cases that are drawn, and of their tensors")] = 0,
    report: Annotated[Path | None, typer.Option(help="where each case's outcome is written, as a line of JSON")] = None,
) -> None:
    """Run FlashInfer's own tests over our ops."""
    files = only or list(OWN)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        written = (folder / "report.jsonl") if report is None else report.resolve()
        written.unlink(missing_ok=True)
        copy_tests(checkout, folder, files, device)
        limits = {"most": most, "numbers": numbers, "seconds": seconds, "seed": seed, "report": str(written)}
        paths = [str(TOOLS), str(TOOLS.parent), str(TOOLS.parent / "ops"), str(folder)]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "FLASHINFER_TESTS": json.dumps({**limits, "device": device}),
        }
        command = [sys.executable, "-m", "pytest", "-q", "-p", "flashinfer_tests_plugin", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*command, "--no-header", "--tb=line", "-W", "ignore", "--continue-on-collection-errors", "tests"],
            cwd=folder, env=environment, capture_output=True, text=True,
        )  # fmt: skip
        if not written.is_file():
            raise typer.BadParameter(f"pytest ran nothing:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        if "ERROR collecting" in done.stdout or done.returncode > 1:
            print(done.stdout[-2000:], done.stderr[-2000:], sep="\n")
        outcomes = outcomes_of(written)
    show(outcomes, Console(width=170))
    print(summary(outcomes, seed))
    passed, failed = (sum(getattr(own, kind) for own in outcomes.values()) for kind in ("passed", "failed"))
    if failed > MOST_FAILURES * (passed + failed):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
