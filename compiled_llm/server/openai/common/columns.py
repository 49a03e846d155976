"""What features give answers besides tokens, as endpoints write it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from compiled_llm.features import modules_named
from compiled_llm.requests.handle import RequestHandle
from compiled_llm.server.openai.common.answers import AnswerDelta
from compiled_llm.server.openai.fields.sampling import SamplingFields
from compiled_llm.server.openai.tokenizer.token_bytes import TokenNames

Fields = dict[str, Any]  # of a choice or of a response, by name


class ColumnWriter(Protocol):
    """A writer of one answer's column, in the form of an endpoint."""

    has_prompt: bool = True  # whether all has come that says something of the prompt

    def of_tokens(self, delta: AnswerDelta) -> Fields:
        """Return what a choice says of its new tokens."""
        return {}

    def of_prompt(self) -> Fields:
        """Return what a whole response says of the prompt."""
        return {}

    def of_echo(self) -> Fields:
        """Return what a choice says of the prompt, if it begins with that as text."""
        return {}


class NewWriter(Protocol):
    """What makes a writer; None if the request does not ask for the column."""

    def __call__(self, body: Any, names: TokenNames, handle: RequestHandle) -> ColumnWriter | None: ...


class WriterModule(Protocol):
    """The module ``columns`` of a feature in this room: what makes writers, by the names of endpoints."""

    WRITERS: Mapping[str, NewWriter]


def column_writers(endpoint: str, body: SamplingFields, names: TokenNames, handle: RequestHandle) -> list[ColumnWriter]:
    """Return the writers of what a request asks for besides the tokens of an answer."""
    modules: list[WriterModule] = modules_named("server", "columns")
    found = (module.WRITERS[endpoint](body, names, handle) for module in modules if endpoint in module.WRITERS)
    return [writer for writer in found if writer is not None]


def fields_of_tokens(writers: list[ColumnWriter], delta: AnswerDelta) -> Fields:
    return {name: value for writer in writers for name, value in writer.of_tokens(delta).items()}


def fields_of_prompt(writers: list[ColumnWriter]) -> Fields:
    return {name: value for writer in writers for name, value in writer.of_prompt().items()}
