"""What an answer has besides its tokens: a column for each feature that gives something."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from compiled_llm.requests.outputs import FinishReason

if TYPE_CHECKING:
    import msgspec


class ReadAnswer(Protocol):
    """An answer as a column sees it: what a user reads of it."""

    @property
    def done(self) -> bool: ...

    @property
    def finish_reason(self) -> FinishReason | None: ...

    def tokens_after(self, count: int) -> list[int]: ...


class AnswerColumn(Protocol):
    """What one answer has of one feature, in the process of its engine or in that of a client."""

    @property
    def characters(self) -> int:
        """About how many characters of text take as long to write as it does."""
        return 0

    def rows(self, start: int, tokens: Sequence[int]) -> Sequence[Any] | None:
        """Return what each of these tokens has, the first of which is number ``start``; None if not each has some."""
        return None

    def completion(self, answer: ReadAnswer) -> Mapping[str, Any]:
        """Return the fields of ``Completion`` that it fills, once the answer is ``done``."""
        return {}

    def output(self) -> Mapping[str, Any]:
        """Return the fields of ``RequestOutput`` that it fills, if the answer is its prompt's first."""
        return {}


class SentColumn(AnswerColumn, Protocol):
    """A column that the engine fills, as it is sent to a client."""

    takes_long: bool = False  # whether others would wait while it is written

    def encoded_rows(self, start: int, tokens: Sequence[int]) -> msgspec.Raw | None:
        """Return what is sent with these tokens, the first of which is number ``start``; None for nothing."""
        return None

    def pieces(self, answer: ReadAnswer) -> Iterator[msgspec.Raw | None]:
        """Yield what is sent by itself, piece by piece; None while the next one is not there."""
        yield from ()


class ReceivedColumn(AnswerColumn, Protocol):
    """A column that is filled by what comes from an engine process; the reader of the connection alone does that."""

    def take(self, data: msgspec.Raw) -> None:
        """Take what has come with tokens; they count afterwards."""
        del data  # a column without any takes none

    def take_piece(self, data: msgspec.Raw) -> None:
        """Take a piece that has come by itself."""
        del data


def encoded(data: object) -> msgspec.Raw:
    """Return plain data as a column sends it."""
    from msgspec import Raw, msgpack  # an engine that nobody asks over a socket needs it not

    return Raw(msgpack.encode(data))
