"""Log-probabilities of a prompt in its response, as vLLM writes them."""

from __future__ import annotations

from pydantic import BaseModel


class PromptLogprob(BaseModel):
    """How likely a token was in one place of a prompt."""

    logprob: float
    rank: int
    decoded_token: str


PromptPlace = dict[str, PromptLogprob]  # the token that stands in one place, and the most likely ones, by their ids
