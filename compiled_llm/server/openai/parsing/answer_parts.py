"""What an answer consists of: reasoning, content, and calls of tools."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names that response templates have for the part in which a model thinks."""
CONTENT, CALLS = "content", "tool_calls"


class ToolCallPart(NamedTuple):
    """A call of a tool: the function, and its arguments as JSON."""

    id: str
    name: str
    arguments: str


class CallPiece(NamedTuple):
    """What is new of a call of a tool.

    Attributes:
        id: of the call.
        name: of the function, if the call begins with this piece.
        arguments: what is new of them.
        finished: whether the model has finished it; a call that is cut never is.
    """

    id: str
    name: str | None
    arguments: str
    finished: bool


@dataclass
class Parts:
    """Parts of an answer, or what is new of them."""

    reasoning: str = ""
    content: str = ""
    pieces: list[CallPiece] = field(default_factory=list)

    @property
    def is_content(self) -> bool:
        """Whether there is nothing but content, which may be none."""
        return not (self.reasoning or self.pieces)

    @property
    def calls(self) -> list[ToolCallPart]:
        """Calls of an answer that is whole."""
        found = {
            piece.id: ToolCallPart(piece.id, piece.name or "", "") for piece in self.pieces if piece.name is not None
        }
        for piece in self.pieces:
            call = found[piece.id]
            found[piece.id] = call._replace(arguments=call.arguments + piece.arguments)
        return list(found.values())

    def call(self, piece: CallPiece) -> None:
        """Add what is new of a call; two pieces of one call become one."""
        if self.pieces and (last := self.pieces[-1]).id == piece.id:
            self.pieces[-1] = CallPiece(last.id, last.name, last.arguments + piece.arguments, piece.finished)
        else:
            self.pieces.append(piece)


class PartsReader(Protocol):
    """Reads one answer as it comes."""

    def read(self, text: str, finished: bool, cut: bool = False) -> Parts:
        """Return what is new, by the next piece of text.

        Args:
            text: the next piece.
            over: nothing comes after it.
            cut: if it is over, there was no room for more: a call that has not ended is no content.
        """
        ...


class PlainReader:
    """Reads an answer that is all content."""

    def read(self, text: str, finished: bool, cut: bool = False) -> Parts:
        """Return the text."""
        return Parts(content=text)
