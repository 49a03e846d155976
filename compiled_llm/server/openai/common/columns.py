"""What features give answers besides tokens, as endpoints write it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from compiled_llm.features import Seams, features
from compiled_llm.requests.handle import RequestHandle
from compiled_llm.server.openai.common.answers import AnswerDelta
from compiled_llm.server.openai.fields.sampling import SamplingFields
from compiled_llm.server.openai.tokenizer.token_bytes import TokenNames

Fields = dict[str, Any]  # of a choice or of a response, by name


class ColumnWriter(Protocol):
    """A writer of one answer's column, in the form of an endpoint."""

    is_wanted: bool = True  # whether the request asks for the column
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


class WriterModule(Protocol):
    """The module ``columns`` of a feature in this room: its writers by the names of endpoints."""

    WRITERS: Mapping[str, Callable[[Any, TokenNames, RequestHandle], ColumnWriter]]


WRITERS = Seams[WriterModule]("server", "WRITERS", file="columns")


def column_writers(endpoint: str, body: SamplingFields, names: TokenNames, handle: RequestHandle) -> list[ColumnWriter]:
    """Return the writers of what a request asks for besides the tokens of an answer."""
    found = (part.WRITERS[endpoint](body, names, handle) for part in features(WRITERS) if endpoint in part.WRITERS)
    return [writer for writer in found if writer.is_wanted]


def merged(found: Iterable[Fields]) -> Fields:
    """Return the fields of several writers."""
    return {name: value for fields in found for name, value in fields.items()}
