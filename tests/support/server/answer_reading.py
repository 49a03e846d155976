"""What a reader tells of an answer that comes in pieces."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from compiled_llm.server.openai.parsing.answer_parts import Parts
from compiled_llm.server.openai.parsing.parsed_reader import ParsedReader


class Told(NamedTuple):
    """What was told, taken together; calls are names and arguments, and whether they have ended."""

    reasoning: str
    content: str
    calls: list[tuple[str, str, bool]]


def read_in_pieces(reader: ParsedReader, pieces: Iterable[str], cut: bool = False) -> Told:
    whole = Parts()
    for parts in [*(reader.read(piece, finished=False) for piece in pieces), reader.read("", finished=True, cut=cut)]:
        whole.reasoning, whole.content = whole.reasoning + parts.reasoning, whole.content + parts.content
        for piece in parts.pieces:
            assert (piece.name is None) == any(piece.id == earlier.id for earlier in whole.pieces)
            whole.call(piece)
    assert len({piece.id for piece in whole.pieces}) == len(whole.pieces), "pieces of a call come one after another"
    return Told(
        whole.reasoning, whole.content, [(piece.name or "", piece.arguments, piece.finished) for piece in whole.pieces]
    )
