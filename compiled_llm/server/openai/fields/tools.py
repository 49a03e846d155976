"""Tools that a request offers to the model, and which of them an answer has to call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from compiled_llm.server.http.api_error import invalid
from compiled_llm.server.openai.fields.fields import Body, Entries

MAX_TOOLS = 128
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
_NO_PARAMETERS = {"type": "object", "properties": {}}


class Function(Body):
    """A function, and its parameters as a JSON schema."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        """Its parameters; none unless it says so."""
        return self.parameters or _NO_PARAMETERS


class Tool(Body):
    """A function that the client runs."""

    type: Literal["function"]
    function: Function

    def plain(self) -> dict[str, Any]:
        function = self.function
        described = {} if function.description is None else {"description": function.description}
        parameters = {"parameters": function.schema_of_arguments}
        return {"type": "function", "function": {"name": function.name, **described, **parameters}}


class NamedFunction(Body):
    """A function, by its name."""

    name: Name


class NamedTool(Body):
    """The tool that an answer has to call."""

    type: Literal["function"]
    function: NamedFunction


Tools = Annotated[Entries[Tool], Field(max_length=MAX_TOOLS)]
ToolChoice = Literal["none", "auto", "required"] | NamedTool


class Offer:
    """Tools as a request offers them; ApiError if two have one name, or the one that has to be called is missing."""

    def __init__(self, tools: Sequence[Tool], choice: str | None, several: bool = True) -> None:
        self.tools = [] if choice == "none" else list(tools)
        self.functions = [tool.function for tool in self.tools]  # that the model sees; none with ``tool_choice="none"``
        self.several = several and choice in (None, "none", "auto", "required")  # a named one is called once
        names = [tool.function.name for tool in tools]
        if twice := [name for name in names if names.count(name) > 1]:
            raise invalid(f"tools: two have the name {twice[0]!r}", "tools")
        self.called = self._called(choice)  # functions one of which an answer has to call; None if it need not

    def _called(self, choice: str | None) -> list[Function] | None:
        if choice in (None, "none", "auto"):
            return None
        if choice == "required":
            found = self.functions
        else:
            found = [function for function in self.functions if function.name == str(choice).removeprefix("=")]
        if not found:
            raise invalid("tool_choice: there is no such tool; give it in tools", "tool_choice")
        return found

    @property
    def strict(self) -> bool:
        """Whether arguments of some function have to follow its schema."""
        return any(function.strict for function in self.functions)

    def plain(self) -> list[dict[str, Any]] | None:
        """Return them as chat templates read them; None if there are none."""
        return [tool.plain() for tool in self.tools] or None


def choice_of(choice: str | NamedTool | None) -> str | None:
    return f"={choice.function.name}" if isinstance(choice, NamedTool) else choice
