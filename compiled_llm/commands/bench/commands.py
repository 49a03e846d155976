"""``compiled-llm bench``: its commands. Torch and matplotlib are imported inside, so that --help is quick."""

from __future__ import annotations

import importlib.util
import itertools
import shlex
import sys
from contextlib import AbstractContextManager
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from compiled_llm.commands.early_checks import check_driver, check_package
from compiled_llm.commands.errors import readable_errors
from compiled_llm.commands.known_commands import KnownCommands
from compiled_llm.commands.options.choices import Device, integers
from compiled_llm.commands.options.shared import DeviceName

if TYPE_CHECKING:
    from collections.abc import Callable

    from compiled_llm.commands.bench.report import BenchReport

app = typer.Typer(
    cls=KnownCommands,
    no_args_is_help=True,
    help="Measure speed: of a model on this machine, compared with HuggingFace, or of a server under load.",
    epilog="Definitions: the time to first token runs from the call until every row's first token is on the host, "
    "warm; decode is the rate after that; end to end is the whole call. Figures are the best and the median of all "
    "runs.",
)


class DecodingOption(str, Enum):
    """Values of `--decoding`."""

    greedy = "greedy"
    sampled = "sampled"
    both = "both"

    @property
    def ways(self) -> list[bool]:
        return [False, True] if self is DecodingOption.both else [self is DecodingOption.sampled]


Json = Annotated[Path | None, typer.Option("--json", help="Write all figures to this JSON file, after each result.")]
Plot = Annotated[
    Path | None,
    typer.Option(
        "--plot", help="Draw a bar chart of tokens per second, as .svg, .png or .pdf; needs the extra `bench`."
    ),
]
Runs = Annotated[
    int, typer.Option("--runs", min=1, help="How often each workload is timed, after it has been run to warm up.")
]


@app.command()
def latency(
    model: Annotated[str, typer.Option(help="A folder, a GGUF file, a hub id, or `demo` (SmolLM2-135M).")] = "demo",
    batches: Annotated[
        str, typer.Option(help="Batch sizes, separated by commas. The default is 1,8,32,64 on CUDA and 1,4 on a CPU.")
    ] = "",
    prompts: Annotated[str, typer.Option(help="Prompt lengths in tokens, separated by commas.")] = "128",
    new: Annotated[
        str,
        typer.Option(help="Output lengths in tokens, separated by commas. The default is 256 on CUDA and 64 on a CPU."),
    ] = "",
    decoding: Annotated[
        DecodingOption, typer.Option(help="Take the most likely tokens, sample them, or measure both.")
    ] = DecodingOption.greedy,
    contenders: Annotated[
        str,
        typer.Option(
            help="What to compare, separated by commas: hf-eager is HuggingFace, `ours` is compiled_llm in its default "
            "mode, compiled-llm:MODE and compiled-llm:MODE:BACKEND are other ones, as in compiled-llm:eager; or `all`."
        ),
    ] = "hf-eager,ours",
    runs: Runs = 5,
    device: DeviceName = Device.auto,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Measure a model on this machine and compare with HuggingFace: time to first token, decode, end to end."""
    with readable_errors():
        check_driver(device.value)
        check_plot(plot)
        with progress() as log:
            from compiled_llm.commands.bench.contenders import ALL, Setup, choose
            from compiled_llm.commands.bench.latency import measure
            from compiled_llm.commands.bench.timing import Workload
            from compiled_llm.commands.loading.load import device_of, dtype_of

            where = device_of(device.value)
            cuda = where.type == "cuda"
            rows = integers("--batches", batches or ("1,8,32,64" if cuda else "1,4"))
            lengths = integers("--prompts", prompts), integers("--new", new or ("256" if cuda else "64"))
            asked = [Workload(*work) for work in itertools.product(rows, *lengths, decoding.ways)]
            taking_part = choose(contenders, where.type, ALL)
            setup = Setup(model, where, dtype_of("auto", where), asked, log)
            report = new_report({"name": model, "weights": "its own", "dtype": str(setup.dtype).removeprefix("torch.")})
            setup.model()  # it refuses what is too long for it before anything is measured
            measure(taking_part, setup, runs, report, lambda: report.save(json))
        finish(report, json, plot)


@app.command()
def serve(
    url: Annotated[str, typer.Option(help="The URL of the server's API, with /v1.")] = "http://127.0.0.1:8000/v1",
    model: Annotated[
        str | None, typer.Option(help="The server's name for the model. The default is the first that it lists.")
    ] = None,
    name: Annotated[str, typer.Option(help="The server's name in tables.")] = "server",
    prompts: Annotated[
        str,
        typer.Option(help="Prompt lengths in tokens, such as 10,100, or a range to draw them from, such as 64-512."),
    ] = ("100"),
    answers: Annotated[str, typer.Option(help="The length of answers in tokens, or a range to draw it from.")] = "64",
    concurrency: Annotated[
        str, typer.Option(help="How many requests run at once, separated by commas; 1 sends one after the other.")
    ] = ("1,8,32"),
    requests: Annotated[int, typer.Option(min=1, help="How many requests are sent for each concurrency.")] = 30,
    rates: Annotated[
        str,
        typer.Option(help="Also send requests at random times: this many a second on average, separated by commas."),
    ] = "",
    seconds: Annotated[float, typer.Option(min=0.1, help="How many seconds requests are sent at each rate.")] = 8.0,
    runs: Runs = 1,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Give up on an answer after this many seconds without anything new.")
    ] = 60.0,
    vocabulary: Annotated[
        int, typer.Option(min=1, help="Make prompts of random token ids below this number.")
    ] = 10_000,
    json: Json = None,
) -> None:
    """Measure a server of OpenAI's API under load: first token, time between tokens, tokens per second.

    The server must accept token ids as a prompt, as `compiled-llm serve`, vLLM and
    SGLang do. One client sends all requests; the tables say if it was too busy.
    """
    with readable_errors():
        check_package("httpx", "bench")
        from compiled_llm.commands.bench.http_client import HttpClient
        from compiled_llm.commands.bench.load import Lengths, Load, measure_all

        lengths = [Lengths.parse("--prompts", part) for part in prompts.split(",")]
        load = Load(lengths[0], Lengths.parse("--answers", answers), requests, seconds=seconds, vocabulary=vocabulary)
        loads = [replace(load, concurrency=count) for count in integers("--concurrency", concurrency)]
        loads += [replace(load, rate=rate) for rate in integers("--rates", rates)]
        loads = [replace(one, prompts=prompt) for one in loads for prompt in lengths]
        with progress() as log:
            client = HttpClient(url, model, timeout)
            report = new_report({"name": client.model, "url": url})
            measure_all({name: client.run}, loads, runs, report, lambda: report.save(json), log)
            report.machine["client_busy"] = round(client.busy, 2)
        finish(report, json)


def new_report(model: dict[str, str]) -> BenchReport:
    from compiled_llm.commands.bench.report import BenchReport, describe_machine

    return BenchReport(shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]), describe_machine(), model)


def progress() -> AbstractContextManager[Callable[[str], object]]:
    """Give a block a function that shows what is being done, on stderr; in pipes only what takes long is shown."""
    from compiled_llm.execution.reporting.progress import ProgressDisplay

    return ProgressDisplay(enabled=True, brief=True).task("beginning")


def check_plot(plot: Path | None) -> None:
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install '.[bench]' in the checkout")


def finish(report: BenchReport, json: Path | None, plot: Path | None = None) -> None:
    """Write and print what was found; exit code 1 if anything failed or nothing ran."""
    from compiled_llm.commands.bench.tables import show

    report.save(json)
    show(report)
    if plot is not None and report.results:
        from compiled_llm.commands.bench.chart import draw, speeds_of

        draw(speeds_of(report), plot)
    if report.failures or not report.results:
        raise SystemExit(1)
