"""How the command line reports what went wrong."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from compiled_llm.commands.printable import printable


@contextmanager
def readable_errors() -> Iterator[None]:
    """Turn our errors into one line: exit code 2 for a bad request, 1 for a failure; any other keeps its traceback."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(err=True)
        raise typer.Exit(130) from None
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        typer.secho(f"error: {complaint(error)}", fg="red", err=True)
        raise typer.Exit(2 if isinstance(error, (FileNotFoundError, ValueError)) else 1) from None


def complaint(error: Exception) -> str:
    """Return what a user is told of an error; one that this package has not raised is a bug, and is raised again."""
    if isinstance(error, BrokenPipeError) or not _raised_here(error):  # our reader has gone: click ends quietly
        raise error
    return printable(as_typed(" ".join(str(error).split())))


_ARGUMENT = re.compile(
    r"""\b(mode|backend|max_new_tokens|(?:kv_)?dtype|device|kv_memory|batch_invariant|max_model_len|profile|(?:operations_)?uds)=('[^']*'|"[^"]*"|[^\s,;:)]+)"""
)


def as_typed(message: str) -> str:
    """Return an error's message with options as one types them: ``--mode eager`` for ``mode='eager'``."""
    typed = _ARGUMENT.sub(lambda found: f"--{found[1].replace('_', '-')} {_word(found[2])}".rstrip(), message)
    return typed.removeprefix("wrap: ").replace("wrap with --", "use --")


def _word(value: str) -> str:
    if value == "True":
        return ""  # a flag
    return shlex.quote(value[1:-1]) if value[0] in "\"'" else value.removeprefix("torch.")


def _raised_here(error: BaseException) -> bool:
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    module = "" if traceback is None else traceback.tb_frame.f_globals.get("__name__", "")
    return module.partition(".")[0] in ("compiled_llm", "compiled_llm_ops")
