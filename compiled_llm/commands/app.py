"""The commands of `compiled-llm`. What imports torch or transformers is imported inside, so that --help is quick."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from compiled_llm.commands.bench.commands import app as bench
from compiled_llm.commands.chat.command import chat
from compiled_llm.commands.choices import Device, Dtype
from compiled_llm.commands.client import client
from compiled_llm.commands.compile import compile_ahead
from compiled_llm.commands.errors import readable_errors
from compiled_llm.commands.explain import explain
from compiled_llm.commands.front import front
from compiled_llm.commands.generate import run
from compiled_llm.commands.known_commands import KnownCommands
from compiled_llm.commands.options import (
    MODEL,
    OUTPUT,
    Artifacts,
    Backend,
    ChatTemplate,
    MaxNewTokens,
    MinP,
    OnDevice,
    Prompt,
    PromptFile,
    Quiet,
    RepetitionPenalty,
    RunningMode,
    Sample,
    Seed,
    System,
    Temperature,
    TopK,
    TopP,
    WeightsDtype,
)
from compiled_llm.commands.prompt import check_quoted, read_prompt
from compiled_llm.commands.request import Request, SamplingFlags
from compiled_llm.commands.serve import serve

app = typer.Typer(
    cls=KnownCommands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"compiled-llm {version('compiled-llm')}")
        raise typer.Exit


@app.callback()
def options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """HuggingFace causal LMs as one compiled graph over FlashInfer's paged attention."""


@app.command(context_settings={"allow_extra_args": True})
def generate(
    context: typer.Context,
    prompt: Prompt = None,
    file: PromptFile = None,
    chat: ChatTemplate = False,
    system: System = None,
    sample: Sample = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    seed: Seed = None,
    model: Annotated[
        str,
        typer.Option(
            help="A folder, a GGUF file, a hub id, or `demo`: SmolLM2-135M, downloaded once (93 MB).",
            rich_help_panel=MODEL,
        ),
    ] = "demo",
    mode: RunningMode = "cuda-graphs",
    backend: Backend = "auto",
    dtype: WeightsDtype = Dtype.auto,
    device: OnDevice = Device.auto,
    artifacts: Artifacts = None,
    max_new_tokens: MaxNewTokens = 64,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="Stop once the new text contains TEXT, which is kept. Can be given several times.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Write one JSON object at the end, not the text.", rich_help_panel=OUTPUT),
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Write the model's text to stdout as it is generated, then figures to stderr."""
    with readable_errors():
        check_quoted(prompt, context.args)
        sampling = SamplingFlags(sample, temperature, top_k, top_p, min_p, repetition_penalty, seed)
        request = Request(
            prompt=read_prompt(prompt, file),
            chat=chat,
            system=system,
            sampling=sampling,
            max_new_tokens=max_new_tokens,
            stop=stop or [],
            model=model,
            mode=mode,
            backend=backend,
            dtype=dtype.value,
            device=device.value,
            artifacts=artifacts,
            as_json=as_json,
            quiet=quiet,
        )
        run(request)


app.command()(chat)
app.command()(serve)
app.command(hidden=True)(front)
app.command(name="compile")(compile_ahead)
app.command(context_settings={"allow_extra_args": True})(client)
app.command()(explain)
app.add_typer(bench, name="bench")


@app.command()
def doctor(
    quick: Annotated[bool, typer.Option("--quick", help="Skip building kernels and running a model.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON object.")] = False,
) -> None:
    """Show what this machine has and what is missing, and try whether kernels build and a model runs.

    Exit code 0 if compiled_llm can run here, on CUDA if there is a device, else on the CPU; 1 if not.
    """
    with readable_errors():
        from compiled_llm.commands.doctor.report import report

        can_run = report(quick=quick, as_json=as_json)
    raise typer.Exit(0 if can_run else 1)
