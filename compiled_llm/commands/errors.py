"""How the command line reports what went wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from compiled_llm.commands.printable import printable


@contextmanager
def readable_errors() -> Iterator[None]:
    """Turn errors that this package raised into one line: exit code 2 for a bad request, 1 for a failure.

    Any other error is a bug, and keeps its traceback.
    """
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(err=True)
        raise typer.Exit(130) from None
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        if not _raised_here(error):
            raise
        typer.secho(f"error: {printable(' '.join(str(error).split()))}", fg="red", err=True)
        raise typer.Exit(2 if isinstance(error, (FileNotFoundError, ValueError)) else 1) from None


def _raised_here(error: BaseException) -> bool:
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    module = "" if traceback is None else traceback.tb_frame.f_globals.get("__name__", "")
    return module.partition(".")[0] in ("compiled_llm", "compiled_llm_ops")
