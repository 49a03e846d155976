"""Where questions come from and where answers go: a terminal, or a pipe."""

from __future__ import annotations

import io
import sys
from contextlib import suppress

import typer

from compiled_llm.commands.printable import printable

_PROMPT, _MORE = "> ", "  "
_FENCE = '"""'
"""Begins and ends a question of several lines."""


class Terminal:
    """Answers go to stdout, all else to stderr, so that a pipe gets answers alone.

    Attributes:
        interactive: whether somebody sits there.
        quiet: whether to say nothing but answers, errors and what was asked for.
    """

    def __init__(self, quiet: bool = False) -> None:
        """Begin to read.

        Args:
            quiet: as the attribute.

        Raises:
            ValueError: there is nothing to read from.
        """
        if sys.stdin is None:
            raise ValueError("chat: there is no stdin to read questions from")
        self.interactive = sys.stdin.isatty()
        self.quiet = quiet
        if self.interactive:
            with suppress(ImportError):  # Python may be built without it
                import readline  # noqa: F401  # input() edits lines and remembers them
        elif isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="replace")

    def question(self) -> str | None:
        """Return the next question; None once there are no more.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed.
        """
        try:
            text = self._line(_PROMPT)
            if text.lstrip().startswith(_FENCE):
                text = self._fenced(text.lstrip().removeprefix(_FENCE))
        except EOFError:
            if self.interactive:
                typer.echo(err=True)  # the prompt stands on this line
            return None
        return text.encode(errors="replace").decode().rstrip()

    def _fenced(self, text: str) -> str:
        while not text.rstrip().endswith(_FENCE):
            text += "\n" + self._line(_MORE)
        return text.rstrip().removesuffix(_FENCE)

    def _line(self, prompt: str) -> str:
        if not self.interactive or sys.stdout.isatty():
            return input(prompt if self.interactive else "")
        typer.echo(prompt, nl=False, err=True)
        return input()

    def write(self, piece: str) -> None:
        """Write a piece of an answer; a terminal shows control characters, and does not obey them."""
        sys.stdout.write(printable(piece) if sys.stdout.isatty() else piece)
        sys.stdout.flush()

    def say(self, text: str) -> None:
        """Say something of the chat, unless it is to be quiet."""
        if not self.quiet:
            self.tell(text)

    def tell(self, text: str) -> None:
        """Say what was asked for."""
        typer.secho(text, dim=True, err=True)

    def complain(self, text: str) -> None:
        """Say what went wrong."""
        typer.secho(f"error: {text}", fg="red", err=True)
