"""The text of an answer that is not told yet, and the end of the prompt before it."""

from __future__ import annotations

import sys


class UntoldText:
    """The end of the prompt, which is nothing to tell of, then the answer's text."""

    def __init__(self) -> None:
        self.text, self.num_fed = "", 0
        self.in_prompt = True
        self._of_prompt = sys.maxsize

    def end_prompt(self) -> None:
        self.in_prompt, self._of_prompt = False, len(self.text)

    def feed(self) -> str:
        """Return the text that the parser has not seen, which it sees next."""
        piece, self.num_fed = self.text[self.num_fed :], len(self.text)
        return piece

    def feed_as(self, piece: str) -> str:
        """Return a piece that the parser sees next, in the place of as much text."""
        end = self.num_fed + len(piece)
        self.text, self.num_fed = self.text[: self.num_fed] + piece + self.text[end:], end
        return piece

    def take_text(self, text: str) -> str:
        """Remove a text, and what is of no part before it, and return the answer's part of the text."""
        if text == self.text and not self._of_prompt:
            self.text, self.num_fed = "", 0
            return text
        self.take(max(self.text.find(text), 0))
        return self.take(len(text))

    def take(self, end: int | None = None) -> str:
        """Remove all of it, or so many characters, and return those of them that are the answer's."""
        end = len(self.text) if end is None else end
        taken, self.text = self.text[self._of_prompt : end], self.text[end:]
        self._of_prompt, self.num_fed = max(self._of_prompt - end, 0), max(self.num_fed - end, 0)
        return taken
