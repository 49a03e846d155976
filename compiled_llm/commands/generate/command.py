"""`compiled-llm generate`, as it stands on the command line."""

from __future__ import annotations

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
    request: GenerateRequest,
    numbers: SamplingOptions,
    options: AllRunningOptions,
) -> None:
    """Continue a text or answer a message, and write it to stdout as it is generated, then figures to stderr."""
    with readable_errors():
        check_quoted(prompt, context.args)
        request.run(read_prompt(prompt, file), SamplingFlags(request.sample, numbers), options)
