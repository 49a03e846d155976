"""An answer on its way from a server, however it is asked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol

from compiled_llm.commands.figures import answer_figures

if TYPE_CHECKING:
    from compiled_llm.requests.outputs import RequestOutput


class AnswerFigures(NamedTuple):
    """The figures of one answer; those of its prompt are None if the server does not send them."""

    tokens: int
    seconds: float
    first_token_seconds: float | None
    finish_reason: str
    prompt_tokens: int | None = None
    cached_tokens: int | None = None

    @classmethod
    def from_output(cls, output: RequestOutput) -> AnswerFigures:
        return cls(
            len(output.token_ids),
            output.seconds,
            output.first_token_seconds,
            output.finish_reason,
            len(output.prompt_token_ids),
            output.cached_tokens,
        )

    def line(self) -> str:
        said = answer_figures(self.tokens, self.seconds, self.first_token_seconds)
        return f"{said}, {self.finish_reason}"


class Answering(Protocol):
    """An answer that comes, as text, piece by piece, or as its tokens."""

    def text(self) -> Iterable[str]: ...

    def __iter__(self) -> Iterator[int]: ...

    def cancel(self) -> None: ...

    def figures(self) -> AnswerFigures:
        """Return its figures, once it has ended or was cancelled."""
        ...
