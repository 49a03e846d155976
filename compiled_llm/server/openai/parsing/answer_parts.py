"""The parts of an answer: reasoning, content, and calls of tools."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names that response templates have for the part in which a model thinks."""
CONTENT, CALLS = "content", "tool_calls"


class CallPiece(NamedTuple):
    """The new part of a call of a tool."""

    id: str  # of the call
    name: str | None  # of the function, if the call begins with this piece
    arguments: str  # that are new, as JSON
    finished: bool  # whether the model has finished the call; one that is cut never is


@dataclass
class Parts:
    """Parts of an answer, or the new ones of them."""

    reasoning: str = ""
    content: str = ""
    pieces: list[CallPiece] = field(default_factory=list)

    @property
    def is_content(self) -> bool:
        """Whether there is nothing but content, which may be empty."""
        return not (self.reasoning or self.pieces)

    @property
    def calls(self) -> list[CallPiece]:
        """Calls of a whole answer, each as one piece."""
        found: dict[str, CallPiece] = {}
        for piece in self.pieces:
            begun = found.get(piece.id, piece._replace(arguments=""))
            found[piece.id] = begun._replace(arguments=begun.arguments + piece.arguments)
        return list(found.values())

    def call(self, piece: CallPiece) -> None:
        """Add a piece of a call; two pieces of one call become one."""
        if self.pieces and (last := self.pieces[-1]).id == piece.id:
            self.pieces[-1] = CallPiece(last.id, last.name, last.arguments + piece.arguments, piece.finished)
        else:
            self.pieces.append(piece)
