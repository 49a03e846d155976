"""Log-probabilities of an engine process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Raw
from msgspec.msgpack import Decoder

from compiled_llm.requests.columns import ReadAnswer, ReceivedColumn
from compiled_llm.requests.outputs import Logprob

if TYPE_CHECKING:
    from compiled_llm.client import logprobs as this
    from compiled_llm.client.columns import ColumnModule

    checked: ColumnModule = this


Entries = dict[int, Logprob]
"""By token id: the token that stands there first."""

_OF_ENTRY = 40  # characters of text that take as long as one log-probability

_rows = Decoder(list[Entries])
_prompt_rows = Decoder(tuple[int, list[Entries]])


class LogprobsColumn(ReceivedColumn):
    """Those of an answer's tokens, and those of its prompt's, the first of which have None; None if not asked for."""

    def __init__(self) -> None:
        self.of_answer: list[Entries] | None = None
        self.of_prompt: list[Entries | None] | None = None

    @property
    def characters(self) -> int:
        return _OF_ENTRY * sum(_entries(places) for places in (self.of_answer, self.of_prompt) if places)

    def take(self, data: Raw) -> None:
        self.of_answer = self.of_answer or []
        self.of_answer += _rows.decode(data)  # in place: an answer may have many tokens

    def take_piece(self, data: Raw) -> None:
        without, entries = _prompt_rows.decode(data)
        if self.of_prompt is None:
            self.of_prompt = [None for _ in range(without)]
        self.of_prompt.extend(entries)

    def rows(self, start: int, tokens: Sequence[int]) -> list[Entries] | None:
        return None if self.of_answer is None else self.of_answer[start : start + len(tokens)]

    def completion(self, answer: ReadAnswer) -> Mapping[str, Any]:
        return {"logprobs": self.of_answer}

    def output(self) -> Mapping[str, Any]:
        return {"prompt_logprobs": self.of_prompt}


COLUMN: type[ReceivedColumn] = LogprobsColumn


def _entries(places: Sequence[Entries | None]) -> int:
    """Return how many there are, if all tokens have as many as the last."""
    return len(places) * len(places[-1] or ())
