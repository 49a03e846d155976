"""Options that come together: a command has one parameter for all of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from compiled_llm.commands.errors import readable_errors


class OptionGroup:
    """The base of groups: each option is a parameter of its class, whose annotation says what it is to Typer."""


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command for Typer, with the options of each group in place of the parameter that takes it."""
    groups: dict[str, type[OptionGroup]] = {}
    options: dict[str, inspect.Parameter] = {}
    for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
        own = parameter.annotation
        if isinstance(own, type) and issubclass(own, OptionGroup):
            groups[name] = own
            options |= inspect.signature(own, eval_str=True).parameters
        else:
            options[name] = parameter

    def call(**given: object) -> None:
        with readable_errors():
            made = {
                name: group(**{option: given.pop(option) for option in inspect.signature(group).parameters})
                for name, group in groups.items()
            }
        command(**given, **made)

    call.__name__ = command.__name__
    call.__doc__ = command.__doc__
    keywords = [option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in options.values()]
    call.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
    call.__annotations__ = {}
    return call
