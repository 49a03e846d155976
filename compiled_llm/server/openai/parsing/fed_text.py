"""The text that an answer's parser has seen, and that has become no part yet."""

from __future__ import annotations


class FedText:
    """Begins with the prompt's ``text``, which is nothing to tell of, then has the answer's."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._of_prompt = len(text)

    def add(self, text: str) -> None:
        self.text += text

    def take(self, end: int | None = None) -> str:
        """Remove all of it, or so many characters, and return those of them that are the answer's."""
        end = len(self.text) if end is None else end
        taken, self.text = self.text[self._of_prompt : end], self.text[end:]
        self._of_prompt = max(self._of_prompt - end, 0)
        return taken
