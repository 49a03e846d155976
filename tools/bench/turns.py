"""Two checkouts on one machine in one go: both are loaded, and measure in turns, so that each meets the same moments.

Over HTTP, `compiled-llm serve` of each is measured (`turns_http.py`), and else the public API in a process of its own.

python tools/bench/turns.py --before ../before --size qwen3-0.6b --rounds 3 --json turns.json
"""

from __future__ import annotations

import itertools
import json as js
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer
from processes import Worker, started
from rich.console import Console
from rich.status import Status
from rich.table import Table
from shapes import SHAPES

HERE = Path(__file__).resolve().parent
ALL = ("first", "generate", "submit", "offline", "online", "http")
LABELS = ("before", "after")
Rounds = dict[str, dict[str, list[float]]]


class Measured(Protocol):
    """A checkout that can be measured."""

    label: str

    def measure(self, name: str, number: int) -> dict[str, float]: ...


def paths_of(root: Path) -> list[str]:
    return [str(root), str(root / "ops")]


def environment_of(root: Path) -> dict[str, str]:
    """Return the environment of a process that finds the `compiled_llm` of a checkout."""
    paths = [*paths_of(root), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


class Checkout:
    """The process of one checkout, which has loaded its model."""

    def __init__(self, label: str, worker: Worker) -> None:
        self.label, self.worker = label, worker

    def measure(self, name: str, number: int) -> dict[str, float]:
        """Return the figures of a round; each draws other tokens than the one before, whatever its ``number``."""
        self.worker.send({"measure": name})
        return self.worker.receive()


@contextmanager
def workers(roots: Sequence[Path], job: dict[str, Any], logs: Path) -> Iterator[list[Checkout]]:
    """Both checkouts, warm: they get warm at the same time, since nothing is measured yet."""
    command = [sys.executable, str(HERE / "turns_worker.py"), js.dumps(job)]
    with ExitStack() as stack:
        both = []
        for label, root in zip(LABELS, roots, strict=True):
            log = logs / f"turns-{label}.log"
            worker = stack.enter_context(started(command, environ=environment_of(root), log_file=log, name=label))
            both.append(Checkout(label, worker))
        for one in both:
            one.worker.send({"measure": "warm"})
        for one in both:
            one.worker.receive()
        yield both


@contextmanager
def servers(
    roots: Sequence[Path], size: str, job: dict[str, Any], logs: Path, status: Status
) -> Iterator[Sequence[Measured]]:
    """Both checkouts' servers, warm, to be asked by this checkout's client, which nothing else here needs."""
    sys.path[1:1] = paths_of(HERE.parents[1])
    from turns_http import turns_servers

    environments = {label: environment_of(root) for label, root in zip(LABELS, roots, strict=True)}
    with turns_servers(environments, environment_of(HERE.parents[1]), size, job, logs, status) as both:
        yield both


def check_place(label: str, root: Path) -> None:
    """Raise SystemExit if a process of a checkout finds `compiled_llm` elsewhere; the folder it runs in has none."""
    find = "import importlib.util as found; print(found.find_spec('compiled_llm').origin)"
    command, environment = [sys.executable, "-c", find], environment_of(root)
    file = subprocess.run(command, env=environment, cwd=HERE, check=True, stdout=subprocess.PIPE, text=True).stdout
    if (found := Path(file).resolve().parents[1]) != root:
        raise SystemExit(f"--{label}: compiled_llm came from {found}, and not from {root}")


def table_of(figures: dict[str, Rounds]) -> Table:
    table = Table("what", *LABELS, "after / before", "rounds, before", "rounds, after", title="medians of all rounds")
    for name in figures[LABELS[0]]:
        of = {label: figures[label][name]["rounds"] for label in LABELS}
        median = {label: statistics.median(values) for label, values in of.items()}
        spread = [", ".join(f"{value:.4g}" for value in of[label]) for label in LABELS]
        ratio = median[LABELS[1]] / median[LABELS[0]]
        table.add_row(name, *(f"{median[label]:.4g}" for label in LABELS), f"{ratio:.3f}", *spread)
    return table


def main(
    before: Annotated[Path, typer.Option(exists=True, file_okay=False, help="The checkout of the older commit.")],
    after: Annotated[Path, typer.Option(exists=True, file_okay=False, help="The other one.")] = HERE.parents[1],
    size: Annotated[str, typer.Option(help=f"Random weights in the shape of {', '.join(SHAPES)}.")] = "qwen3-0.6b",
    what: Annotated[str, typer.Option(help="What is measured, comma-separated.")] = ",".join(ALL),
    rounds: Annotated[int, typer.Option(min=1, help="How often each checkout measures each.")] = 3,
    new: Annotated[int, typer.Option(min=4, help="Most new tokens of a row.")] = 128,
    requests: Annotated[int, typer.Option(min=1, help="How many come at once, offline and over HTTP.")] = 64,
    rate: Annotated[float, typer.Option(help="Requests that arrive in a second, online and over HTTP.")] = 16.0,
    seconds: Annotated[float, typer.Option(help="How long they arrive.")] = 5.0,
    kv_memory: Annotated[str, typer.Option(help="What the pages of each checkout may take.")] = "6GiB",
    mode: Annotated[str, typer.Option(help="As `wrap` takes it.")] = "cuda-graphs",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    json: Annotated[Path | None, typer.Option(help="Write the figures of all rounds to this file.")] = None,
    logs: Annotated[Path, typer.Option(help="A folder for what the two processes say.")] = Path("build"),
) -> None:
    """Measure two checkouts in turns: one round of the older, one of the newer, then the newer first."""
    if size not in SHAPES:
        raise SystemExit(f"--size {size}: there are {', '.join(SHAPES)}")
    names = [name.strip() for name in what.split(",") if name.strip()]
    if unknown := set(names) - {*ALL}:
        raise SystemExit(f"--what: no {', '.join(sorted(unknown))}; there are {', '.join(ALL)}")
    limits = {"kv_memory": kv_memory, "mode": mode, "dtype": dtype}
    job = {"size": size, **limits, "new": new, "requests": requests, "rate": rate, "seconds": seconds}
    logs.mkdir(parents=True, exist_ok=True)
    console = Console(stderr=True)
    figures: dict[str, Rounds] = {label: defaultdict(lambda: {"rounds": []}) for label in LABELS}
    roots = [before.resolve(), after.resolve()]
    for label, root in zip(LABELS, roots, strict=True):
        check_place(label, root)

    def measure(both: Sequence[Measured], names: Sequence[str], status: Status) -> None:
        for name, number in itertools.product(names, range(rounds)):
            for one in both if number % 2 == 0 else both[::-1]:
                status.update(f"{name}, round {number + 1} of {rounds}, {one.label}")
                for figure, value in one.measure(name, number + 1).items():
                    figures[one.label][f"{name}: {figure}"]["rounds"].append(value)
            if json is not None:
                json.write_text(js.dumps({"command": sys.argv, "job": job, "figures": figures}, indent=1))

    try:
        with console.status("both checkouts compile and get warm") as status:
            if within := [name for name in names if name != "http"]:
                with workers(roots, job, logs) as both:
                    measure(both, within, status)
            if "http" in names:  # once the workers have ended: two more models may not fit
                with servers(roots, size, job, logs, status) as both_servers:
                    measure(both_servers, ["http"], status)
    except RuntimeError as error:
        raise SystemExit(str(error)) from error
    Console().print(table_of(figures))


if __name__ == "__main__":
    typer.run(main)
