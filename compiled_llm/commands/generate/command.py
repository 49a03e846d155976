"""`compiled-llm generate`, as it stands on the command line."""

from __future__ import annotations

from typing import Annotated

import typer

from compiled_llm.commands.errors import readable_errors
from compiled_llm.commands.generate.run import GenerateRequest
from compiled_llm.commands.options.choices import Device, Dtype
from compiled_llm.commands.options.prompt import check_quoted, read_prompt
from compiled_llm.commands.options.sampling import SamplingFlags
from compiled_llm.commands.options.shared import (
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
        GenerateRequest(
            prompt=read_prompt(prompt, file),
            chat=chat,
            system=system,
            sampling=SamplingFlags(sample, temperature, top_k, top_p, min_p, repetition_penalty, seed),
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
        ).run()
