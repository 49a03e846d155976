"""How options of `compiled-llm serve` are read: from the command line, the environment, and a file, in this order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from compiled_llm.commands.errors import readable_errors
from compiled_llm.commands.serve.given_options import from_environ, from_file
from compiled_llm.commands.serve.vllm_options import check_none_of_vllm

_OF_FILE = "compiled_llm.commands.serve.config"


class ServeCommand(TyperCommand):
    """Takes options of the environment, too, and answers those of `vllm serve` with ours."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:  # a shell asks how the line may go on
            return super().parse_args(ctx, args)
        with readable_errors():
            check_none_of_vllm(args)
            if "--leashed" not in args:  # an engine process has all that it needs from its API server
                ctx.default_map = from_environ(ctx)
        rest = super().parse_args(ctx, list(args))
        _tell_of_overridden(ctx)
        return rest


def read_config(context: typer.Context, file: Path | None) -> Path | None:
    """Have a file's options be what holds unless the command line or the environment says otherwise."""
    if file is not None and not context.resilient_parsing:
        with readable_errors():
            context.meta[_OF_FILE] = options = from_file(context, file)
            context.default_map = {**options, **(context.default_map or {})}
    return file


def _tell_of_overridden(context: typer.Context) -> None:
    typed = {name for name in context.meta.get(_OF_FILE, ()) if _was_typed(context, name)}
    if typed and not context.params["quiet"]:
        names = ", ".join(sorted(name.replace("_", "-") for name in typed))
        typer.echo(f"compiled_llm: the command line goes before {context.params['config']}: {names}", err=True)


def _was_typed(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
