"""`compiled-llm generate`, as it stands on the command line."""

from __future__ import annotations

from typing import Annotated

import typer

from compiled_llm.commands.errors import readable_errors
from compiled_llm.commands.generate.run import GenerateRequest
from compiled_llm.commands.options import shared
from compiled_llm.commands.options.groups import with_groups
from compiled_llm.commands.options.prompt import check_quoted, read_prompt
from compiled_llm.commands.options.running import AllRunningOptions
from compiled_llm.commands.options.sampling import SamplingFlags, SamplingOptions


@with_groups
def generate(
    *,
    context: typer.Context,
    prompt: shared.Prompt = None,
    file: shared.PromptFile = None,
    chat: shared.ChatTemplate = False,
    system: shared.System = None,
    image: shared.Images = None,
    sample: shared.Sample = None,
    numbers: SamplingOptions,
    model: Annotated[
        str,
        typer.Option(
            help="The model: a folder, a GGUF file, a hub id, or `demo` (SmolLM2-135M, downloaded once, 93 MB).",
            rich_help_panel=shared.MODEL,
        ),
    ] = "demo",
    tokenizer: shared.Tokenizer = None,
    chat_template: shared.TemplateFile = None,
    options: AllRunningOptions,
    max_new_tokens: shared.MaxNewTokens = 64,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="Stop once the answer contains TEXT, which is shown, too. Can be given several times.",
            rich_help_panel=shared.OUTPUT,
        ),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Write one JSON object at the end instead of the text.", rich_help_panel=shared.OUTPUT
        ),
    ] = False,
    quiet: shared.Quiet = False,
) -> None:
    """Continue a text or answer a message, and write it to stdout as it is generated, then figures to stderr."""
    with readable_errors():
        check_quoted(prompt, context.args)
        GenerateRequest(
            prompt=read_prompt(prompt, file),
            chat=chat or bool(image),  # images stand in messages
            system=system,
            images=image or [],
            sampling=SamplingFlags(sample, numbers),
            max_new_tokens=max_new_tokens,
            stop=stop or [],
            model=model,
            tokenizer=tokenizer,
            chat_template=chat_template,
            options=options,
            as_json=as_json,
            quiet=quiet,
        ).run()
