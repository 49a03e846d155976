"""How options of `compiled-llm serve` are read: from the command line, the environment, and a file, in this order."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from compiled_llm.commands.errors import as_typed, readable_errors
from compiled_llm.commands.printable import printable
from compiled_llm.commands.serve.given_options import GivenOption, from_environ, from_file, of_kubernetes
from compiled_llm.commands.serve.log import LogFormat, write_json_lines
from compiled_llm.commands.serve.vllm_line import VllmLine, read_line

_OF_FILE = "compiled_llm.commands.serve.config"
_PLACES = "compiled_llm.commands.serve.places"
_ALSO = {"model": ("same_model",)}


class ServeCommand(TyperCommand):
    """The command with options of the environment, too; options of `vllm serve` are answered with ours."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:  # a shell asks how the line may go on
            return super().parse_args(ctx, args)
        line = read_line(args)
        _refuse(line)
        with readable_errors():
            args = [_dashed(argument) for argument in line.ours]
            if "--leashed" not in args:  # an engine process has all that it needs from its API server
                _take(ctx, from_environ(ctx))
        rest = super().parse_args(ctx, list(args))
        if ctx.params["same_model"] is not None and not _was_typed(ctx, "model"):
            ctx.params["model"] = None  # that of a file or of the environment, which the command line goes before
        if ctx.params["log_format"] == LogFormat.json:
            write_json_lines()
        if not ctx.params["quiet"]:
            _tell_of_vllm(line)
            _tell_of_overridden(ctx)
            _tell_of_kubernetes(ctx)
        return rest


def read_config(context: typer.Context, file: Path | None) -> Path | None:
    """Have a file's options be what holds unless the command line or the environment says otherwise."""
    if file is not None and not context.resilient_parsing:
        with readable_errors():
            options = from_file(context, file)
            context.meta[_OF_FILE] = list(options)
            _take(context, options)
    return file


@contextmanager
def with_places(context: typer.Context) -> Iterator[None]:
    """Have errors about an option that is not of the command line begin with the place that it was given at."""
    try:
        yield
    except ValueError as error:
        said = as_typed(str(error))
        named = re.match(r"(?:--)?([a-z][a-z-]*)", said)
        if named is None:
            raise
        name = named[1].replace("-", "_")
        place = context.meta.get(_PLACES, {}).get(name)
        if place is None or _was_typed(context, *_ALSO.get(name, ()), name):
            raise
        raise ValueError(f"{place}{said[len(named[0]) :]}") from error


def _take(context: typer.Context, options: Mapping[str, GivenOption]) -> None:
    """Have options be what holds unless the command line, or what was taken before, says otherwise."""
    values = {name: option.value for name, option in options.items()}
    places = {name: option.place for name, option in options.items()}
    context.default_map = {**values, **(context.default_map or {})}
    context.meta[_PLACES] = {**places, **context.meta.get(_PLACES, {})}


def _dashed(argument: str) -> str:
    """Return ``--max-model-len=8`` for ``--max_model_len=8``, as vLLM takes it."""
    name, equals, value = argument.partition("=")
    return f"{name.replace('_', '-')}{equals}{value}" if argument.startswith("--") else argument


def _refuse(line: VllmLine) -> None:
    """Refuse all options of vLLM at once, with the line that a user may want."""
    if not line.refused:
        return
    for sentence in line.refused:
        typer.secho(f"error: {printable(sentence)}", fg="red", err=True)
    typer.echo(f"here the line is: compiled-llm serve {printable(shlex.join(line.ours))}".rstrip(), err=True)
    raise typer.Exit(2)


def _tell_of_vllm(line: VllmLine) -> None:
    if line.always:
        typer.echo(f"compiled_llm: options of vLLM that say what always holds: {', '.join(line.always)}", err=True)


def _tell_of_overridden(context: typer.Context) -> None:
    typed = {name for name in context.meta.get(_OF_FILE, ()) if _was_typed(context, *_ALSO.get(name, ()), name)}
    if typed:
        names = ", ".join(sorted(name.replace("_", "-") for name in typed))
        typer.echo(f"compiled_llm: the command line goes before {context.params['config']}: {names}", err=True)


def _tell_of_kubernetes(context: typer.Context) -> None:
    found = [] if context.params["leashed"] else of_kubernetes()
    if found:
        names = found[0] if len(found) == 1 else f"{found[0]} and {len(found) - 1} more"
        typer.echo(f"compiled_llm: not read as options, since Kubernetes gives them of a service: {names}", err=True)


def _was_typed(context: typer.Context, *names: str) -> bool:
    sources = [context.get_parameter_source(name) for name in names]
    return any(source is not None and source.name == "COMMANDLINE" for source in sources)
