"""``compiled-llm bench``: its commands. Torch and matplotlib are imported inside, so that --help is quick."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from compiled_llm.commands.bench.options import (
    VLLM,
    Commit,
    ContenderNames,
    Decoding,
    EngineNames,
    GraphNames,
    Json,
    Markdown,
    ModelName,
    Patience,
    Plot,
    Runs,
    ServerMode,
    ServerNames,
    SGLang,
    Verbose,
)
from compiled_llm.commands.bench.run import bench_run, check_matplotlib, show_report, write_report
from compiled_llm.commands.early_checks import check_server_packages
from compiled_llm.commands.errors import readable_errors
from compiled_llm.commands.known_commands import KnownCommands
from compiled_llm.commands.options.choices import Device, integers
from compiled_llm.commands.options.shared import DeviceName
from compiled_llm.config import LEAST_GRAPHS

app = typer.Typer(
    cls=KnownCommands,
    no_args_is_help=True,
    help="Measure speed: contenders side by side on this machine, in one go.",
    epilog="Definitions: the time to first token runs from the call until every row's first token is on the host, "
    "warm; decode is the rate after that; end to end is the whole call. Figures are the best and the median of all "
    "runs. The ceiling is the decode rate that the read bandwidth allows, measured in the same run.",
)


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
    with bench_run(json, markdown, plot, commit, verbose) as run:
        from compiled_llm.commands.bench import latency as experiment
        from compiled_llm.commands.bench.workload import workloads

        cuda = run.use(device) == "cuda"
        asked = workloads(
            integers("--batches", batches or ("1,8,32,64" if cuda else "1,4")),
            integers("--prompts", prompts),
            integers("--contexts", contexts),
            integers("--new", new or ("256" if cuda else "64")),
            decoding.ways,
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
    runs: Annotated[int, typer.Option(min=0, help="Starts with warm caches, and as many with artifacts.")] = 5,
    device: DeviceName = Device.auto,
    vllm: VLLM = None,
    sglang: SGLang = None,
    json: Json = None,
    markdown: Markdown = None,
    plot: Plot = None,
    commit: Commit = None,
    verbose: Verbose = False,
) -> None:
    """Measure the time from a process's start to its first token: with cold caches, warm ones, and artifacts."""
    with bench_run(json, markdown, plot, commit, verbose) as run:
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
    contenders: ContenderNames = "ours",
    runs: Runs = 5,
    device: DeviceName = Device.auto,
    json: Json = None,
    markdown: Markdown = None,
    plot: Plot = None,
    commit: Commit = None,
    verbose: Verbose = False,
) -> None:
    """Show where the time of a decode step goes, by kind of kernel, against the bytes that it has to read."""
    with bench_run(json, markdown, plot, commit, verbose) as run:
        from compiled_llm.commands.bench import roofline as experiment
        from compiled_llm.commands.bench.workload import workloads

        run.use(device)
        asked = workloads(integers("--batches", batches), integers("--prompts", prompts), [], [new], decoding.ways)
        run.prepare(model, contenders, asked, None, None)
        run.measure_bandwidth()
        experiment.measure(run.contenders, run.setup, runs, run.report, run.save)


@app.command()
def beams_and_drafts(
    model: ModelName = "demo",
    mode: Annotated[
        str | None,
        typer.Option(
            help="This package's mode: eager, compile, reduce-overhead, cuda-graphs or pieces; wrap's own if none."
        ),
    ] = None,
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
    with bench_run(json, markdown, None, commit, verbose) as run:
        from compiled_llm.commands.bench import beams_and_drafts as experiment

        run.use(device)
        sizes = experiment.Sizes(prompt, new, turns, beams, drafted, rows)
        run.prepare(
            model, "hf-eager," + ("ours" if mode is None else f"compiled-llm:{mode}"), [sizes.workload()], None, None
        )
        experiment.measure(run.contenders, run.setup, sizes, runs, run.report, run.save)


@app.command()
def offline(
    model: ModelName = "demo",
    requests: Annotated[int, typer.Option(min=1, help="How many, all at once.")] = 256,
    prompts: Annotated[str, typer.Option(help="Lengths of prompts, drawn uniformly, in tokens.")] = "100-1024",
    answers: Annotated[str, typer.Option(help="Lengths of answers, likewise.")] = "100-1024",
    seed: Annotated[int, typer.Option(min=0, help="Decides lengths and tokens.")] = 0,
    decoding: Annotated[Decoding, typer.Option(help="How tokens are chosen; sampled: temperature 0.6.")] = (
        Decoding.both
    ),
    hf_share: Annotated[
        float, typer.Option(min=0.001, max=1.0, help="The share of the requests that HuggingFace gets.")
    ] = 0.1,
    contenders: EngineNames = "default",
    runs: Runs = 3,
    device: DeviceName = Device.auto,
    vllm: VLLM = None,
    json: Json = None,
    markdown: Markdown = None,
    plot: Plot = None,
    commit: Commit = None,
    verbose: Verbose = False,
) -> None:
    """Measure how fast engines answer many requests that come at once; by default those of nano-vllm's benchmark."""
    with bench_run(json, markdown, plot, commit, verbose) as run:
        from compiled_llm.commands.bench.serving import contenders as known
        from compiled_llm.commands.bench.serving import offline as experiment
        from compiled_llm.commands.bench.serving.workloads import TEMPERATURE, Lengths, OfflineWorkload

        device_type = run.use(device)
        lengths = Lengths.parse("--prompts", prompts), Lengths.parse("--answers", answers)
        temperatures = [TEMPERATURE if sampled else 0.0 for sampled in decoding.ways]
        asked = [OfflineWorkload(requests, *lengths, seed, temperature) for temperature in temperatures]
        chosen = known.choose(known.offline(), contenders, device_type)
        run.begin(model, [asked[0].bounds], vllm)
        experiment.measure(chosen, run.setup, asked, {"hf-batch": hf_share}, runs, run.report, run.save)


@app.command()
def online(
    model: ModelName = "demo",
    rates: Annotated[str, typer.Option(help="Requests that arrive in a second, on average, comma-separated.")] = (
        "4,16,64"
    ),
    seconds: Annotated[float, typer.Option(min=0.1, help="How long they arrive, at each rate.")] = 30.0,
    prompts: Annotated[str, typer.Option(help="Lengths of prompts, drawn uniformly, in tokens.")] = "64-512",
    answers: Annotated[str, typer.Option(help="Lengths of answers, likewise.")] = "32-256",
    system_prompt: Annotated[int, typer.Option(min=0, help="Tokens that all prompts begin with, before these.")] = 0,
    max_step_ms: Annotated[float | None, typer.Option(help="Of this package's engine: how long a step may take.")] = (
        None
    ),
    seed: Annotated[int, typer.Option(min=0, help="Decides arrivals, lengths and tokens.")] = 0,
    decoding: Annotated[Decoding, typer.Option(help="How tokens are chosen; sampled: temperature 0.6.")] = (
        Decoding.greedy
    ),
    contenders: EngineNames = "default",
    runs: Runs = 1,
    patience: Patience = 60.0,
    device: DeviceName = Device.auto,
    vllm: VLLM = None,
    json: Json = None,
    markdown: Markdown = None,
    plot: Plot = None,
    commit: Commit = None,
    verbose: Verbose = False,
) -> None:
    """Measure how long requests that arrive at random wait for their tokens, at several rates."""
    with bench_run(json, markdown, plot, commit, verbose) as run:
        from compiled_llm.commands.bench.serving import contenders as known
        from compiled_llm.commands.bench.serving import online as experiment
        from compiled_llm.commands.bench.serving.workloads import TEMPERATURE, Lengths, OnlineWorkload

        device_type = run.use(device)
        lengths = Lengths.parse("--prompts", prompts), Lengths.parse("--answers", answers)
        asked = [
            OnlineWorkload(rate, seconds, *lengths, system_prompt, seed, TEMPERATURE if sampled else 0.0)
            for sampled in decoding.ways
            for rate in integers("--rates", rates)
        ]
        chosen = known.choose(known.online(max_step_ms), contenders, device_type)
        run.begin(model, [workload.bounds for workload in asked], vllm)
        run.setup.patience = patience
        experiment.measure(chosen, run.setup, asked, runs, run.report, run.save)


@app.command()
def serve(
    model: ModelName = "demo",
    prompts: Annotated[
        str | None,
        typer.Option(help="One stream: lengths of prompts, comma-separated (10,50,100,150 ... 400; 10,100 on a CPU)."),
    ] = None,
    new: Annotated[int | None, typer.Option(min=2, help="One stream: tokens of each answer (64; 16 on a CPU).")] = None,
    requests: Annotated[
        int | None, typer.Option(min=1, help="One stream: requests of each length (30; 5 on a CPU).")
    ] = None,
    streams: Annotated[str | None, typer.Option(help="How many at once, comma-separated (64,256; 8 on a CPU).")] = None,
    stream_tokens: Annotated[
        int | None, typer.Option(min=2, help="Streams at once: tokens of each answer (256; 32 on a CPU).")
    ] = None,
    rates: Annotated[
        str | None, typer.Option(help="Requests that arrive in a second, comma-separated (4,16,64; 2 on a CPU).")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long they arrive, at each rate.")] = 8.0,
    arriving_prompts: Annotated[
        str, typer.Option(help="Lengths of the prompts that arrive, drawn uniformly, in tokens.")
    ] = "64-512",
    arriving_answers: Annotated[str, typer.Option(help="Lengths of their answers, likewise.")] = "32-256",
    seed: Annotated[int, typer.Option(min=0, help="Decides arrivals, lengths and tokens.")] = 0,
    mode: Annotated[ServerMode, typer.Option(help="How this package runs the model.")] = ServerMode.cuda_graphs,
    contenders: ServerNames = "default",
    peer_url: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=URL",
            help="A server of OpenAI's API, up to and with /v1, which is asked as ours is. Several times for several.",
        ),
    ] = None,
    runs: Runs = 3,
    patience: Patience = 60.0,
    device: DeviceName = Device.auto,
    vllm: VLLM = None,
    json: Json = None,
    markdown: Markdown = None,
    plot: Plot = None,
    commit: Commit = None,
    verbose: Verbose = False,
) -> None:
    """Measure what the server's socket and HTTP cost, and how long requests wait that arrive at random.

    The same requests go to the engine in process, to `compiled-llm serve` over
    its socket and over HTTP, each from a client in a process of its own, and over
    HTTP to other servers. '' leaves a part out: --rates ''.
    """
    with bench_run(json, markdown, plot, commit, verbose) as run:
        check_server_packages(http=True)
        from compiled_llm.commands.bench.serving import serve as experiment
        from compiled_llm.commands.bench.serving.load import LoadOptions
        from compiled_llm.commands.bench.serving.servers import choose

        device_type = run.use(device)
        asked = LoadOptions(
            *(prompts, new, requests, streams, stream_tokens, rates),
            *(seconds, arriving_prompts, arriving_answers, seed, runs),
        )
        load = asked.load(cuda=device_type == "cuda")
        chosen = choose(contenders, peer_url or [], mode.value, device_type)
        run.begin(model, load.bounds, vllm)
        run.setup.patience = patience
        experiment.measure(chosen, run.setup, load, run.report, run.save)


@app.command()
def graphs(
    model: ModelName = "demo",
    prompts: Annotated[
        str, typer.Option(help="Prompt lengths, in tokens (10,50,100,150 ... 400; 10,100 on a CPU).")
    ] = "",
    new: Annotated[int | None, typer.Option(min=8, help="Tokens of each answer (64; 16 on a CPU).")] = None,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Requests of each length, at most (20; 3 on a CPU).")
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0.0, help="After so many, no more rounds over all lengths are begun.")
    ] = 10.0,
    few: Annotated[
        int, typer.Option(min=LEAST_GRAPHS, help="How many graphs there may be where others take their place.")
    ] = 4,
    contenders: GraphNames = "default",
    patience: Patience = 60.0,
    device: DeviceName = Device.auto,
    vllm: VLLM = None,
    json: Json = None,
    markdown: Markdown = None,
    plot: Plot = None,
    commit: Commit = None,
    verbose: Verbose = False,
) -> None:
    """Measure how long requests wait whose CUDA graphs are recorded, are missing, or had to make room for others."""
    with bench_run(json, markdown, plot, commit, verbose) as run:
        from compiled_llm.commands.bench.serving import graphs as experiment

        cuda = run.use(device) == "cuda"
        lengths = integers("--prompts", prompts or ("10,50,100,150,200,250,300,350,400" if cuda else "10,100"))
        sizes = (new or (64 if cuda else 16), requests or (20 if cuda else 3))
        load = experiment.GraphLoad(lengths, *sizes, seconds, few)
        chosen = experiment.choose(contenders)
        run.begin(model, load.bounds, vllm)
        run.setup.patience = patience
        experiment.measure(chosen, run.setup, load, run.report, run.save)


@app.command()
def show(
    results: Annotated[Path, typer.Argument(help="What --json wrote.", exists=True, dir_okay=False)],
    markdown: Markdown = None,
    plot: Plot = None,
) -> None:
    """Show results again, as tables or as a plot; they may come from another machine."""
    with readable_errors():
        if plot is not None:
            check_matplotlib("--plot")
        from compiled_llm.commands.bench.report import Report

        report = Report.load(results)
        write_report(report, markdown, plot)
        show_report(report)


@app.command()
def chart(
    results: Annotated[
        Path, typer.Argument(help="What `latency --json` wrote, or a file of results/.", exists=True, dir_okay=False)
    ],
    picture: Annotated[Path, typer.Argument(help="Where to draw: a .svg, .png or .pdf.", dir_okay=False)],
) -> None:
    """Draw the README's chart: greedy tokens per second, end to end, as bars for each batch size."""
    with readable_errors():
        check_matplotlib("bench chart")
        from compiled_llm.commands.bench import chart as pictured

        speeds = pictured.read(results)
        picture.parent.mkdir(parents=True, exist_ok=True)
        pictured.draw(speeds, picture)
