"""OpenAI's questions and answers, in the form of transformers' and back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from compiled_llm.server.decisions.request import (
    AnyQuestion,
    ChoiceOption,
    ChoiceQuestion,
    PredicateQuestion,
    ScoreQuestion,
)
from compiled_llm.server.http.api_error import invalid

CRITERIA = {"choice": "choices", "score": "levels"}
"""OpenAI's fields of a question's criteria, by its type."""


def asked(questions: Sequence[AnyQuestion]) -> dict[str, dict[str, Any]]:
    """Return questions by their places; ApiError if a choice has a value twice."""
    return {str(place): _asked(question, place) for place, question in enumerate(questions)}


def _asked(question: AnyQuestion, place: int) -> dict[str, Any]:
    match question:
        case PredicateQuestion():
            return {"type": "noul", "instructions": question.instructions}
        case ChoiceQuestion():
            names = _names(question.choices, f"questions[{place}].choices")
            descriptions = [choice.description or None for choice in question.choices]
            criteria: object = dict(zip(names, descriptions, strict=True))
            return {"type": "choice", "instructions": question.instructions, "criteria": criteria}
        case ScoreQuestion():
            levels = [": ".join(filter(None, (level.label, level.description))) for level in question.levels]
            return {"type": "score", "instructions": question.instructions, "criteria": levels}


def _names(choices: Sequence[ChoiceOption], path: str) -> list[str]:
    """Return the values as texts, in quotes if ``"true"`` would be as ``true`` otherwise."""
    values = [(type(choice.value), choice.value) for choice in choices]
    if twice := next((place for place, value in enumerate(values) if value in values[:place]), None):
        field = f"{path}[{twice}].value"
        raise invalid(f"{field}: stands there twice; values have to be distinct", field)
    names = [choice.value if isinstance(choice.value, str) else json.dumps(choice.value) for choice in choices]
    return names if len(set(names)) == len(names) else [json.dumps(choice.value) for choice in choices]


def answered(question: AnyQuestion, answer: Mapping[str, Any], label_mass: float) -> dict[str, Any]:
    """Return OpenAI's answer; its confidence is that of vLLM, the best label's share of the whole vocabulary."""
    named = {"type": question.type, "name": question.name}
    if isinstance(question, PredicateQuestion):
        return {**named, "probability": answer["noul"]}
    probabilities = list(answer["probabilities"].values())
    best = max(range(len(probabilities)), key=probabilities.__getitem__)
    confidence = probabilities[best] * label_mass
    if isinstance(question, ChoiceQuestion):
        values = [choice.value for choice in question.choices]
        each = [{"value": value, "probability": own} for value, own in zip(values, probabilities, strict=True)]
        return {**named, "choice": values[best], "probabilities": each, "confidence": confidence}
    each = [
        {"value": value, "label": level.label, "probability": own}
        for value, (level, own) in enumerate(zip(question.levels, probabilities, strict=True))
    ]
    return {**named, "score": answer["score"], "probabilities": each, "confidence": confidence}
