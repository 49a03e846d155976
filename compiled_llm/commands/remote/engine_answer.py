"""An answer of an engine, in this process or in another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from compiled_llm.commands.remote.answer import AnswerFigures

if TYPE_CHECKING:
    from compiled_llm.requests.handle import RequestHandle


class EngineAnswer:
    """The handle that ``submit`` of an engine or of a client returns, as an answer."""

    def __init__(self, handle: RequestHandle) -> None:
        self._handle = handle

    def text(self) -> Iterable[str]:
        return self._handle.text()

    def __iter__(self) -> Iterator[int]:
        return iter(self._handle)

    def cancel(self) -> None:
        self._handle.cancel()

    def figures(self) -> AnswerFigures:
        return AnswerFigures.from_output(self._handle.result())
