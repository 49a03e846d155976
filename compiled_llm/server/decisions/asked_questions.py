"""The questions of a request: what they are about, and how a client names what is wrong with them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

from compiled_llm.server.http.api_error import invalid
from compiled_llm.server.openai.tokenizer.vocabulary import check_texts

_MAX_CHARACTERS = 2**24  # of the state, times the questions: each has it in a prompt that is made tokens


class AskedQuestions:
    """Questions about a state, by the client's own fields."""

    def __init__(
        self,
        state: Any,
        questions: dict[str, Any],
        param: str,
        path: Callable[[str], str],
        criteria: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Take what is asked.

        Args:
            state: what the questions are about: text, or JSON.
            questions: by their names.
            param: the field of the state.
            path: returns that of a question, by its name.
            criteria: a question's field for its criteria, by its type, if it is not ``"criteria"``.
        """
        self.state, self.questions = state, questions
        self._param, self.path, self._criteria = param, path, criteria

    def check(self) -> None:
        """Raise ApiError for texts that cannot be encoded, or a state that is too long for so many questions."""
        check_texts(self.state, self._param)
        check_texts(self.questions, "questions")
        if (characters := len(self._state) * len(self.questions)) > _MAX_CHARACTERS:
            raise invalid(
                f"{self._param}: its length times the questions is {characters:,} characters, and it can be "
                f"{_MAX_CHARACTERS:,}; shorten it, or ask fewer at once",
                self._param,
                "context_length_exceeded",
            )

    def texts(self, group: Sequence[Any]) -> dict[str, str]:
        """Return the texts of the prompt that asks some of transformers' questions, by their fields."""
        found = {self._param: self._state}
        for question in group:
            path, criteria = self.path(question.name), self._criteria.get(question.type, "criteria")
            found[f"{path}.instructions"] = _text(question.instructions)
            found[f"{path}.{criteria}"] = _text([question.options, question.descriptions])
        return found

    def longest(self, group: Sequence[Any]) -> str:
        """Return the field with the longest of these texts."""
        texts = self.texts(group)
        return max(texts, key=lambda path: len(texts[path]))

    @cached_property
    def _state(self) -> str:
        return _text(self.state)


def _text(value: object) -> str:
    """Return a value as templates write it."""
    return value if isinstance(value, str) else "" if value is None else json.dumps(value, ensure_ascii=False)
