"""The source of questions and the place of answers: a terminal, or a pipe."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Mapping
from typing import Any

import typer

from compiled_llm.commands.printable import printable

_FENCE = '"""'


class Terminal:
    """Answers go to stdout, all else to stderr, so that a pipe gets answers alone; ``interactive`` tells of stdin."""

    def __init__(self, quiet: bool = False, commands: Mapping[str, str] | None = None) -> None:
        """Begin to read, or ValueError without stdin. ``quiet`` writes only answers, errors and what is asked for."""
        if sys.stdin is None:
            raise ValueError("chat: there is no stdin to read questions from")
        self.interactive = sys.stdin.isatty()
        self.quiet = quiet
        if self.interactive:
            self._read = _prompting(commands or {})
        else:
            self._read = _fenced_lines
            if isinstance(sys.stdin, io.TextIOWrapper):
                sys.stdin.reconfigure(errors="replace")

    def question(self) -> str | None:
        """Return the next question; None once there are no more."""
        try:
            text = self._read()
        except EOFError:
            return None
        if text.lstrip().startswith(_FENCE):
            text = text.strip().removeprefix(_FENCE).removesuffix(_FENCE)
        return text.encode(errors="replace").decode().rstrip()

    def write(self, piece: str) -> None:
        """Write a piece of an answer; a terminal shows control characters, and does not obey them."""
        sys.stdout.write(printable(piece) if sys.stdout.isatty() else piece)
        sys.stdout.flush()

    def say(self, text: str) -> None:
        if not self.quiet:
            self.tell(text)

    def tell(self, text: str) -> None:
        typer.secho(text, dim=True, err=True)

    def complain(self, text: str) -> None:
        typer.secho(f"error: {text}", fg="red", err=True)


def _prompting(commands: Mapping[str, str]) -> Callable[[], str]:
    """Return what reads a question from the terminal, with history and completion."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.application import get_app
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.filters import Condition
    from prompt_toolkit.history import InMemoryHistory
    from prompt_toolkit.output import create_output
    from prompt_toolkit.utils import is_dumb_terminal

    def typed() -> str:
        return get_app().current_buffer.text

    described = {usage.partition(" ")[0]: what for usage, what in commands.items()}
    options: dict[str, Any] = {
        "completer": WordCompleter(list(described), meta_dict=described, sentence=True),
        "complete_while_typing": Condition(lambda: typed().startswith("/")),  # the menu takes room only then
        "reserve_space_for_menu": len(described),
        "history": InMemoryHistory(),
        "multiline": Condition(lambda: _is_open(typed())),
        "prompt_continuation": "  ",
        "enable_suspend": True,
        "output": None if is_dumb_terminal() else create_output(always_prefer_tty=True),  # stdout may be a file
    }
    # A session each: after Ctrl-C, a dumb terminal would show twice what is typed.
    return lambda: PromptSession[str]("> ", **options).prompt()


def _fenced_lines() -> str:
    text = input()
    while _is_open(text):
        text += "\n" + input()
    return text


def _is_open(text: str) -> bool:
    text = text.strip()
    return text.startswith(_FENCE) and not text.removeprefix(_FENCE).endswith(_FENCE)
