"""The commands of `compiled-llm`. What imports torch or transformers is imported inside, so that --help is quick."""

from __future__ import annotations

from typing import Annotated, Protocol

import typer

from compiled_llm import __version__
from compiled_llm.commands.bench.commands import app as bench
from compiled_llm.commands.chat.command import chat
from compiled_llm.commands.client import client
from compiled_llm.commands.compile import compile_ahead
from compiled_llm.commands.doctor.command import doctor
from compiled_llm.commands.explain import explain
from compiled_llm.commands.generate.command import generate
from compiled_llm.commands.known_commands import KnownCommands
from compiled_llm.commands.serve.api_server import api_server
from compiled_llm.commands.serve.command import serve
from compiled_llm.commands.serve.serve_command import ServeCommand
from compiled_llm.features import LATE_FEATURES, Seams, feature

app = typer.Typer(
    cls=KnownCommands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"compiled-llm {__version__}")
        raise typer.Exit


@app.callback()
def options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Generate text with HuggingFace's models as fast as the machine can, and chat with, serve and measure them."""


app.command(context_settings={"allow_extra_args": True})(generate)
app.command()(chat)
app.command(cls=ServeCommand)(serve)
app.command(hidden=True)(api_server)
app.command(name="compile")(compile_ahead)
app.command(context_settings={"allow_extra_args": True})(client)
app.command()(explain)
app.add_typer(bench, name="bench")
app.command()(doctor)


class CommandsPart(Protocol):
    """A part with commands."""

    def register(self, app: typer.Typer) -> None: ...


_COMMANDS = Seams[CommandsPart]("commands", "register")

for name in LATE_FEATURES:
    if (added := feature(_COMMANDS.named(name))) is not None:
        added.register(app)
