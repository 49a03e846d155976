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
from rich.console import Console
from rich.status import Status
from rich.table import Table

HERE = Path(__file__).resolve().parent
ALL = ("first", "generate", "submit", "offline", "online", "http")
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16, "vocab_size": 512},
    "qwen3-0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "head_dim": 128},
    "qwen3-8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "head_dim": 128},
}
HEADS = {"tiny": (4, 2), "qwen3-0.6b": (16, 8), "qwen3-8b": (32, 8)}
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


class Worker:
    """The process of one checkout."""

    def __init__(self, label: str, root: Path, job: dict[str, Any], log: Path) -> None:
        self.label, self.log = label, log
        command = [sys.executable, str(HERE / "turns_worker.py"), js.dumps(job)]
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment_of(root),
            )

    def ask(self, what: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(
                f"{self.label}: the process has ended; {self.log} says why:\n{self.log.read_text()[-2000:]}"
            )
        return dict(js.loads(line))

    def measure(self, name: str, number: int) -> dict[str, float]:
        """Return the figures of a round; each draws other tokens than the one before, whatever its ``number``."""
        self.ask(name)
        return self.answer()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextmanager
def workers(roots: Sequence[Path], job: dict[str, Any], logs: Path) -> Iterator[list[Worker]]:
    """Both checkouts, warm: they get warm at the same time, since nothing is measured yet."""
    with ExitStack() as stack:
        both = []
        for label, root in zip(LABELS, roots, strict=True):
            both.append(Worker(label, root, job, logs / f"turns-{label}.log"))
            stack.callback(both[-1].close)
        for worker, root in zip(both, roots, strict=True):
            check_place(worker.label, Path(worker.answer()["from"]), root)
            worker.ask("warm")
        for worker in both:
            worker.answer()
        yield both


@contextmanager
def servers(
    roots: Sequence[Path], size: str, job: dict[str, Any], logs: Path, status: Status
) -> Iterator[Sequence[Measured]]:
    """Both checkouts' servers, warm, to be asked by this checkout's client, which nothing else here needs."""
    sys.path[1:1] = paths_of(HERE.parents[1])
    from turns_http import turns_servers

    environments = {label: environment_of(root) for label, root in zip(LABELS, roots, strict=True)}
    for label, root in zip(LABELS, roots, strict=True):
        check_place(label, Path(place_in(environments[label])), root)
    with turns_servers(environments, environment_of(HERE.parents[1]), size, job, logs, status) as both:
        yield both


def place_in(environment: dict[str, str]) -> str:
    """Return where a process of the environment finds `compiled_llm`, if the folder it runs in has none."""
    find = "import importlib.util as found; print(found.find_spec('compiled_llm').origin)"
    command = [sys.executable, "-c", find]
    return subprocess.run(command, env=environment, cwd=HERE, check=True, stdout=subprocess.PIPE, text=True).stdout


def check_place(label: str, file: Path, root: Path) -> None:
    """Raise SystemExit if `compiled_llm` came from elsewhere than a checkout."""
    if (found := file.resolve().parents[1]) != root:
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
    size: Annotated[str, typer.Option(help=f"Random weights in the shape of {', '.join(SIZES)}.")] = "qwen3-0.6b",
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
    if size not in SIZES:
        raise SystemExit(f"--size {size}: there are {', '.join(SIZES)}")
    names = [name.strip() for name in what.split(",") if name.strip()]
    if unknown := set(names) - {*ALL}:
        raise SystemExit(f"--what: no {', '.join(sorted(unknown))}; there are {', '.join(ALL)}")
    heads, kv_heads = HEADS[size]
    shape = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": 151936} | SIZES[size]
    shape |= {"max_position_embeddings": 40960, "tie_word_embeddings": size != "qwen3-8b"}
    limits = {"kv_memory": kv_memory, "mode": mode, "dtype": dtype}
    job = {"shape": shape, **limits, "new": new, "requests": requests, "rate": rate, "seconds": seconds}
    logs.mkdir(parents=True, exist_ok=True)
    console = Console(stderr=True)
    figures: dict[str, Rounds] = {label: defaultdict(lambda: {"rounds": []}) for label in LABELS}
    roots = [before.resolve(), after.resolve()]

    def measure(both: Sequence[Measured], names: Sequence[str], status: Status) -> None:
        for name, number in itertools.product(names, range(rounds)):
            for one in both if number % 2 == 0 else both[::-1]:
                status.update(f"{name}, round {number + 1} of {rounds}, {one.label}")
                for figure, value in one.measure(name, number + 1).items():
                    figures[one.label][f"{name}: {figure}"]["rounds"].append(value)
            if json is not None:
                json.write_text(js.dumps({"command": sys.argv, "job": job, "figures": figures}, indent=1))

    with console.status("both checkouts compile and get warm") as status:
        if within := [name for name in names if name != "http"]:
            with workers(roots, job, logs) as both:
                measure(both, within, status)
        if "http" in names:  # once the workers have ended: two more models may not fit
            with servers(roots, size, job, logs, status) as both_servers:
                measure(both_servers, ["http"], status)
    Console().print(table_of(figures))


if __name__ == "__main__":
    typer.run(main)
