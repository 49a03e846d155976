"""Log-probabilities of a prompt: how many a request may ask for, and their response, as vLLM writes it."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel

from compiled_llm.requests.sampling_params import SamplingParams
from compiled_llm.server.http.api_error import invalid

_MAX_ENTRIES = 2**18  # that a request can ask for; each takes hundreds of bytes


class PromptLogprob(BaseModel):
    """How likely a token was in one place of a prompt."""

    logprob: float
    rank: int
    decoded_token: str


PromptPlace = dict[str, PromptLogprob]  # the token that stands in one place, and the most likely ones, by their ids


def check_prompt_logprobs(prompts: Sequence[Sequence[int]], each: Sequence[SamplingParams]) -> None:
    """Check how many a request asks for; ApiError if too many."""
    scored = [(own.prompt_logprobs, prompt) for own, prompt in zip(each, prompts, strict=True)]
    entries = sum((1 + most) * len(prompt) for most, prompt in scored if most is not None)
    if entries > _MAX_ENTRIES:
        raise invalid(
            f"logprobs: {entries:,} of the tokens of prompts; there can be {_MAX_ENTRIES:,}: give fewer or shorter "
            "prompts, or smaller logprobs",
            "logprobs",
        )
