"""Answers a command that does not exist with those that do."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from typer.core import TyperGroup

_INSTEAD = {"run": "generate", "benchmark": "bench"}  # names that other programs give to our commands


class KnownCommands(TyperGroup):
    """A group of commands that answers an unknown one with those that may have been meant."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            ctx.fail(f"no command {args[0]!r}; {_advice(args[0], self._shown(ctx))}")
        return super().resolve_command(ctx, args)

    def _shown(self, ctx: Any) -> list[str]:
        return [name for name in self.list_commands(ctx) if not self.commands[name].hidden]


def _advice(name: str, known: Sequence[str]) -> str:
    meant = [command for command in known if command.startswith(name)] or get_close_matches(name, known)
    if not meant and _INSTEAD.get(name, "").split(" ")[0] in known:
        meant = [_INSTEAD[name]]
    return f"did you mean {' or '.join(meant)}?" if meant else f"there are {', '.join(known)}"
