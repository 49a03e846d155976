"""One answer of a chat as it is told: its parts as they come, and what they come to."""

from __future__ import annotations

from compiled_llm.server.openai.chat.response import Delta, NewCall
from compiled_llm.server.openai.common.usage import FinishReason
from compiled_llm.server.openai.parsing.answer_parts import Parts, PartsReader
from compiled_llm.server.openai.tokenizer.vocabulary import Vocabulary


class Reading:
    """Reads an answer, and keeps what its end depends on."""

    def __init__(self, reader: PartsReader) -> None:
        """Begin before the first token.

        Args:
            reader: of the answer.
        """
        self._reader = reader
        self._thoughts: list[str] = []
        self._numbers: dict[str, int] = {}  # of calls, by their ids

    def read(self, text: str, reason: FinishReason | None) -> Parts:
        """Return what is new, by the next piece of text; nothing comes after one with a ``reason`` why it has ended."""
        parts = self._reader.read(text, finished=reason is not None, cut=reason == "length")
        if parts.reasoning:
            self._thoughts.append(parts.reasoning)
        for piece in parts.pieces:
            self._numbers.setdefault(piece.id, len(self._numbers))
        return parts

    def deltas(self, parts: Parts, finished: bool) -> list[Delta]:
        """Return what was read last; one at least of what is over."""
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
        """Return how many tokens its thinking has, as it would be tokenized."""
        text = "".join(self._thoughts)
        return len(vocabulary.of_text(text, add_special_tokens=False)) if text else 0
