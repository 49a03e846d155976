"""Responses of ``/v1/systemone`` and ``/v1/decisions``."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel


class InputTokensDetails(BaseModel):
    """Tokens of the prompts that the prefix cache had, or another question of the request."""

    cached_tokens: int
    cache_write_tokens: int = 0


class WrittenTokensDetails(BaseModel):
    """Nothing is written."""

    reasoning_tokens: int = 0


class DecisionUsage(BaseModel):
    """Tokens of all prompts together; no text is written."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int = 0
    output_tokens_details: WrittenTokensDetails = WrittenTokensDetails()
    total_tokens: int


class QuestionDiagnostics(BaseModel):
    """How far the model has answered a question with a label at all."""

    label_mass: float
    argmax_is_label: bool


class SystemOneResponse(BaseModel):
    """The answers by the names of the questions."""

    id: str
    object: Literal["structured_decision"] = "structured_decision"
    created: int
    model: str
    answers: dict[str, dict[str, Any]]
    usage: DecisionUsage
    diagnostics: dict[str, QuestionDiagnostics]


class DecisionsResponse(BaseModel):
    """The answers in the order of the questions."""

    model: str
    answers: list[dict[str, Any]]
    usage: DecisionUsage
