"""The columns of answers, as they arrive from an engine process: what features give besides tokens."""

from __future__ import annotations

from typing import Protocol

from compiled_llm.client.errors import EngineProcessError
from compiled_llm.features import FEATURES, Seams, feature
from compiled_llm.requests.answer import AnswerRecord
from compiled_llm.requests.columns import ReceivedColumn


class ColumnModule(Protocol):
    """The module of a feature in this room."""

    COLUMN: type[ReceivedColumn]


COLUMNS = Seams[ColumnModule]("client", "COLUMN")


def column_of(record: AnswerRecord[ReceivedColumn], name: str) -> ReceivedColumn:
    """Return an answer's column of a feature, which begins with what comes first of it."""
    if (column := record.parts.get(name)) is None:
        module = feature(COLUMNS.named(name)) if name in FEATURES else None
        if module is None:
            raise EngineProcessError(f"the engine process has sent {name!r}, which no feature here reads")
        column = record.parts[name] = module.COLUMN()
    return column
