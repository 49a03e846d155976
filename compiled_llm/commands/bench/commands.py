"""``compiled-llm bench``: its commands. Torch and matplotlib are imported inside, so that --help is quick."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from compiled_llm.commands.choices import Device
from compiled_llm.commands.errors import readable_errors

if TYPE_CHECKING:
    from compiled_llm.commands.bench.contender import Contender, Setup
    from compiled_llm.commands.bench.report import Report
    from compiled_llm.commands.bench.workload import Workload

app = typer.Typer(
    no_args_is_help=True,
    help="Measure speed: contenders side by side on this machine, in one go.",
    epilog="Definitions: the time to first token runs from the call until every row's first token is on the host, "
    "warm; decode is the rate after that; end to end is the whole call. Figures are the best and the median of all "
    "runs. The ceiling is the decode rate that the read bandwidth allows, measured in the same run.",
)


class Decoding(str, Enum):
    """What `--decoding` takes."""

    greedy = "greedy"
    sampled = "sampled"
    both = "both"


ModelName = Annotated[
    str,
    typer.Option(
        "--model",
        help="`demo` (SmolLM2-135M), a folder, a GGUF file, a hub id, or random weights in the shape of `qwen3-0.6b`, "
        "`qwen3-8b` or `tiny`.",
    ),
]
ContenderNames = Annotated[
    str,
    typer.Option(
        "--contenders",
        help="Comma-separated: hf-eager, hf-static, compiled-llm:eager, compiled-llm:compile, "
        "compiled-llm:reduce-overhead, compiled-llm:cuda-graphs, vllm, sglang; `all`; or `default`: all on CUDA, "
        "HuggingFace and ours on a CPU.",
    ),
]
DeviceName = Annotated[Device, typer.Option("--device", help="auto: CUDA if there is a device.")]
Runs = Annotated[int, typer.Option("--runs", min=1, help="Timed runs of each workload, after warming up.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write all figures to this file, after each result.")]
Markdown = Annotated[Path | None, typer.Option("--markdown", help="Write the tables to this file.")]
Plot = Annotated[Path | None, typer.Option("--plot", help="Draw a PNG; needs matplotlib (the extra `bench`).")]
Commit = Annotated[str | None, typer.Option("--commit", help="The commit to record if this is no git checkout.")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Write a line to stderr for each step.")]
VLLM = Annotated[
    str | None,
    typer.Option("--vllm", envvar="COMPILED_LLM_VLLM", help="A Python that has vLLM: 'env PYTHONPATH=... python3'."),
]
SGLang = Annotated[str | None, typer.Option("--sglang", envvar="COMPILED_LLM_SGLANG", help="A Python that has SGLang.")]


@app.command()
def latency(
    model: ModelName = "demo",
    batches: Annotated[str, typer.Option(help="Batch sizes, comma-separated (1,8,32,64 on CUDA, 1,4 on a CPU).")] = "",
    prompts: Annotated[str, typer.Option(help="Prompt lengths, in tokens.")] = "128",
    contexts: Annotated[
        str, typer.Option(help="More prompt lengths, given as the tokens that a row has in the middle of decode.")
    ] = "",
    new: Annotated[str, typer.Option(help="Output lengths, in tokens (256 on CUDA, 64 on a CPU).")] = "",
    decoding: Annotated[Decoding, typer.Option(help="How tokens are chosen.")] = Decoding.greedy,
    contenders: ContenderNames = "default",
    runs: Runs = 5,
    device: DeviceName = Device.auto,
    vllm: VLLM = None,
    sglang: SGLang = None,
    json: Json = None,
    markdown: Markdown = None,
    plot: Plot = None,
    commit: Commit = None,
    verbose: Verbose = False,
) -> None:
    """Measure the time to first token, decode and end to end, over batch sizes, prompts, contexts and outputs."""
    with _run(json, markdown, plot, commit, verbose) as run:
        from compiled_llm.commands.bench import latency as experiment
        from compiled_llm.commands.bench.workload import workloads

        cuda = run.use(device) == "cuda"
        sampled = {"greedy": [False], "sampled": [True], "both": [False, True]}[decoding.value]
        asked = workloads(
            _numbers("--batches", batches or ("1,8,32,64" if cuda else "1,4")),
            _numbers("--prompts", prompts),
            _numbers("--contexts", contexts),
            _numbers("--new", new or ("256" if cuda else "64")),
            sampled,
        )
        run.prepare(model, contenders, asked, vllm, sglang)
        run.measure_bandwidth()
        experiment.measure(run.contenders, run.setup, runs, run.report, run.save)


@app.command()
def startup(
    model: ModelName = "demo",
    batch: Annotated[int, typer.Option(min=1, help="Rows.")] = 1,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens in each prompt.")] = 128,
    new: Annotated[int, typer.Option(min=2, help="New tokens; once they have come, everything is compiled.")] = 16,
    contenders: ContenderNames = "default",
    cold_runs: Annotated[int, typer.Option(min=1, help="Starts with empty caches.")] = 1,
    runs: Annotated[int, typer.Option(min=0, help="Starts with warm caches.")] = 5,
    device: DeviceName = Device.auto,
    vllm: VLLM = None,
    sglang: SGLang = None,
    json: Json = None,
    markdown: Markdown = None,
    plot: Plot = None,
    commit: Commit = None,
    verbose: Verbose = False,
) -> None:
    """Measure the time from the start of a process to its first token, with cold and with warm caches."""
    with _run(json, markdown, plot, commit, verbose) as run:
        from compiled_llm.commands.bench import startup as experiment
        from compiled_llm.commands.bench.workload import Workload

        run.use(device)
        run.prepare(model, contenders, [Workload(batch, prompt, new)], vllm, sglang)
        experiment.measure(run.contenders, run.setup, cold_runs, runs, run.report, run.save)


@app.command()
def roofline(
    model: ModelName = "demo",
    batches: Annotated[str, typer.Option(help="Batch sizes, comma-separated.")] = "1",
    prompts: Annotated[str, typer.Option(help="Prompt lengths, in tokens.")] = "128",
    new: Annotated[int, typer.Option(min=4, help="New tokens; those in the middle are profiled.")] = 64,
    decoding: Annotated[Decoding, typer.Option(help="How tokens are chosen.")] = Decoding.greedy,
    contenders: ContenderNames = "compiled-llm:cuda-graphs",
    runs: Runs = 5,
    device: DeviceName = Device.auto,
    json: Json = None,
    markdown: Markdown = None,
    plot: Plot = None,
    commit: Commit = None,
    verbose: Verbose = False,
) -> None:
    """Show where the time of a decode step goes, by kind of kernel, against the bytes that it has to read."""
    with _run(json, markdown, plot, commit, verbose) as run:
        from compiled_llm.commands.bench import roofline as experiment
        from compiled_llm.commands.bench.workload import workloads

        run.use(device)
        sampled = {"greedy": [False], "sampled": [True], "both": [False, True]}[decoding.value]
        asked = workloads(_numbers("--batches", batches), _numbers("--prompts", prompts), [], [new], sampled)
        run.prepare(model, contenders, asked, None, None)
        run.measure_bandwidth()
        experiment.measure(run.contenders, run.setup, runs, run.report, run.save)


@app.command()
def beams_and_drafts(
    model: ModelName = "demo",
    mode: Annotated[str, typer.Option(help="This package's mode: eager, compile, reduce-overhead or cuda-graphs.")] = (
        "cuda-graphs"
    ),
    prompt: Annotated[int, typer.Option(min=1, help="Tokens in each prompt.")] = 128,
    new: Annotated[int, typer.Option(min=2, help="New tokens of each row, in each turn of the chat.")] = 128,
    beams: Annotated[int, typer.Option(min=2, help="Beams of the beam search.")] = 4,
    drafted: Annotated[int, typer.Option(min=1, help="Tokens in each draft.")] = 5,
    turns: Annotated[int, typer.Option(min=1, help="Turns of the chat.")] = 10,
    rows: Annotated[int, typer.Option(min=1, help="Rows scored at once.")] = 8,
    runs: Runs = 3,
    device: DeviceName = Device.auto,
    json: Json = None,
    markdown: Markdown = None,
    commit: Commit = None,
    verbose: Verbose = False,
) -> None:
    """Measure beam search, drafts, prompt lookup, a chat and scoring, with HuggingFace and with this package."""
    with _run(json, markdown, None, commit, verbose) as run:
        from compiled_llm.commands.bench import beams_and_drafts as experiment

        run.use(device)
        sizes = experiment.Sizes(prompt, new, turns, beams, drafted, rows)
        run.prepare(model, f"hf-eager,compiled-llm:{mode}", [sizes.workload()], None, None)
        experiment.measure(run.contenders, run.setup, sizes, runs, run.report, run.save)


@app.command()
def show(
    results: Annotated[Path, typer.Argument(help="What --json wrote.", exists=True, dir_okay=False)],
    markdown: Markdown = None,
    plot: Plot = None,
) -> None:
    """Show results again, as tables or as a plot; they may come from another machine."""
    with readable_errors():
        if plot is not None:
            _check_matplotlib("--plot")
        from compiled_llm.commands.bench.report import Report

        report = Report.load(results)
        _write(report, markdown, plot)
        _print(report)


@app.command()
def chart(
    results: Annotated[
        Path, typer.Argument(help="What `latency --json` wrote, or a file of results/.", exists=True, dir_okay=False)
    ],
    picture: Annotated[Path, typer.Argument(help="Where to draw: a .svg, .png or .pdf.", dir_okay=False)],
) -> None:
    """Draw the README's chart: greedy tokens per second, end to end, as bars for each batch size."""
    with readable_errors():
        _check_matplotlib("bench chart")
        from compiled_llm.commands.bench import chart as pictured

        speeds = pictured.read(results)
        picture.parent.mkdir(parents=True, exist_ok=True)
        pictured.draw(speeds, picture)


# ---- one run


class _Run:
    """What the commands share: the report's header, and the file that it goes to."""

    def __init__(self, json: Path | None, commit: str | None, log: Callable[[str], object]) -> None:
        self._json = json
        self._commit = commit
        self._log = log
        self.report: Report
        self.setup: Setup
        self.contenders: list[Contender]

    def use(self, device: Device) -> str:
        """Choose the device; returns its type."""
        import torch

        name = device.value
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        elif name == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device cuda: torch sees no CUDA device here")
        self._device = torch.device(name)
        self._dtype = torch.bfloat16 if name == "cuda" else torch.float32
        return name

    def prepare(
        self, model: str, contenders: str, workloads: list[Workload], vllm: str | None, sglang: str | None
    ) -> None:
        """Find the contenders, and describe the machine."""
        from compiled_llm.commands.bench import contenders as known
        from compiled_llm.commands.bench import machine, models
        from compiled_llm.commands.bench.contender import Setup
        from compiled_llm.commands.bench.report import Report

        self.contenders = known.choose(contenders, self._device.type)
        commands = {name: command for name, command in (("vllm", vllm), ("sglang", sglang)) if command}
        self.setup = Setup(model, self._device, self._dtype, workloads, commands, self._log)
        described = {
            "name": model,
            "weights": "random" if models.is_random(model) else "its own",
            "dtype": str(self._dtype).removeprefix("torch."),
        }
        command = shlex.join(["compiled-llm", *sys.argv[1:]])
        self.report = Report(command, machine.describe(self._device, self._commit), described)

    def measure_bandwidth(self) -> None:
        """Measure what results are held against."""
        from compiled_llm.explaining.profile.bandwidth import read_bandwidth

        self._log("measuring the read bandwidth")
        self.report.read_bandwidth = read_bandwidth(self._device, self._dtype)
        self.setup.drop_model()

    def save(self) -> None:
        """Write what there is so far."""
        if self._json is not None:
            self.report.save(self._json)


@contextmanager
def _run(
    json: Path | None, markdown: Path | None, plot: Path | None, commit: str | None, verbose: bool
) -> Iterator[_Run]:
    """Let the block measure, then write and print what it found; exit code 1 if anything failed or nothing ran."""
    with readable_errors():
        if plot is not None:
            _check_matplotlib("--plot")
        from compiled_llm.commands.bench.terminal import progress

        with progress(verbose) as log:
            run = _Run(json, commit, log)
            yield run
        run.save()
        _write(run.report, markdown, plot)
        _print(run.report)
    if run.report.failures or run.report.empty:
        raise typer.Exit(1)


def _check_matplotlib(what: str) -> None:
    """Fail before measuring rather than after."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"{what} needs matplotlib: pip install 'compiled-llm[bench]'")


def _write(report: Report, markdown: Path | None, plot: Path | None) -> None:
    if markdown is not None:
        from compiled_llm.commands.bench.markdown import render

        markdown.parent.mkdir(parents=True, exist_ok=True)
        markdown.write_text(render(report))
    if plot is not None and not report.empty:
        from compiled_llm.commands.bench.plot import draw

        plot.parent.mkdir(parents=True, exist_ok=True)
        draw(report, plot)


def _print(report: Report) -> None:
    from compiled_llm.commands.bench import terminal

    terminal.show(report)


def _numbers(option: str, text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ValueError(f"{option} {text!r}: give comma-separated integers") from None
    if any(number < 1 for number in numbers):
        raise ValueError(f"{option} {text!r}: each must be at least 1")
    return numbers
