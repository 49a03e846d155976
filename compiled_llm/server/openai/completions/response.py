"""Responses of ``/v1/completions``, whole or as they come."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel
from typing_extensions import Self

from compiled_llm.server.openai.common.prompt_logprobs import PromptPlace
from compiled_llm.server.openai.common.usage import FinishReason, Usage


class CompletionLogprobs(BaseModel):
    """Those of the tokens; places in the text are counted in characters."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(BaseModel):
    """One of the answers: ``n`` for each prompt, in their order."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[PromptPlace | None] | None = None

    @classmethod
    def of(cls, index: int, text: str, **others: Any) -> Self:
        """Return one with the fields that a client looks for in each, and ``others``."""
        return cls(**{"index": index, "text": text, "logprobs": None, "finish_reason": None, **others})


class TextCompletion(BaseModel):
    """All answers, or the new parts of them in a chunk of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
