"""How errors and events stand in the OpenAPI document."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


class ErrorDescription(BaseModel):
    """The error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Sent in place of an answer."""

    error: ErrorDescription


_DESCRIPTIONS = {
    400: "The request is impossible.",
    401: "The API key is missing or wrong.",
    403: "The host or the origin is not served.",
    404: "There is no such model.",
    408: "The body has not come in time, or the answer was not read.",
    413: "The body is too long.",
    415: "The body is not application/json.",
    429: "Too many requests wait.",
    500: "An error of the server.",
    503: "The model is not ready.",
}

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": description} for status, description in _DESCRIPTIONS.items()
}

ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {}}, "description": "The answer, whole or as it comes."},
    **ERRORS,
}
"""Of endpoints that answer as a whole, or as events."""
