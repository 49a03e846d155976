"""One answer of a chat, parsed: its parts as they come, and the facts at its end."""

from __future__ import annotations

from dataclasses import replace

from compiled_llm.server.openai.chat.response import Delta, NewCall
from compiled_llm.server.openai.common.usage import FinishReason
from compiled_llm.server.openai.parsing.answer_parts import Parts
from compiled_llm.server.openai.parsing.parsed_reader import ParsedReader
from compiled_llm.server.openai.tokenizer.vocabulary import Vocabulary


class AnswerParser:
    """A parser of one answer, its thinking told or not, with the facts that its end depends on."""

    def __init__(self, reader: ParsedReader | None, tells_thoughts: bool = True) -> None:
        self.reader = reader  # None if all is content
        self._tells_thoughts = tells_thoughts
        self._thoughts: list[str] = []
        self._numbers: dict[str, int] = {}  # of calls, by their ids

    def read(self, text: str, reason: FinishReason | None) -> Parts:
        """Return the parts of the next piece of text; it is the last one if there is a ``reason`` for the end."""
        if self.reader is None:
            return Parts(content=text)
        parts = self.reader.read(text, finished=reason is not None, cut=reason == "length")
        if parts.reasoning:
            self._thoughts.append(parts.reasoning)
        for piece in parts.pieces:
            self._numbers.setdefault(piece.id, len(self._numbers))
        return parts if self._tells_thoughts else replace(parts, reasoning="")

    def deltas(self, parts: Parts, finished: bool) -> list[Delta]:
        deltas = [Delta(reasoning_content=parts.reasoning)] if parts.reasoning else []
        if parts.content:
            deltas.append(Delta(content=parts.content))
        for piece in parts.pieces:
            deltas += [Delta(tool_calls=[new]) for new in NewCall.of(piece, self._numbers[piece.id])]
        return deltas or ([Delta()] if finished else [])

    def reason(self, reason: FinishReason) -> FinishReason:
        """Return why the answer has ended, once it has been read."""
        return "tool_calls" if self._numbers and reason == "stop" else reason

    def reasoning_tokens(self, vocabulary: Vocabulary) -> int:
        """Return how many tokens its thinking has, by tokenizing it again."""
        text = "".join(self._thoughts)
        return len(vocabulary.of_text(text, add_special_tokens=False)) if text else 0
