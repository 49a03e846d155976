"""Fields of chats and completions that ask for log-probabilities, besides OpenAI's own: vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from compiled_llm.requests.sampling_params import MAX_LOGPROB_TOKEN_IDS, SamplingParams
from compiled_llm.server.http.api_error import invalid
from compiled_llm.server.openai.fields.fields import Body, Entries

_MAX_ENTRIES = 2**18  # of prompts, that a request can ask for; each takes hundreds of bytes


class LogprobFields(Body):
    """Whose log-probabilities are wanted: those of named tokens, and those of the prompt."""

    logprob_token_ids: Annotated[Entries[int] | None, Field(max_length=MAX_LOGPROB_TOKEN_IDS)] = None
    prompt_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    prompt_logprobs_start: Annotated[int, Field(ge=0)] = 0

    def scores(self, most: int | None, stream: bool) -> dict[str, Any]:
        """Return the settings of log-probabilities by their names; ApiError if fields contradict each other.

        Args:
            most: how many of the most likely tokens have theirs beside each token of the answer; None for none at all.
            stream: whether the answer is sent as it comes.
        """
        if self.logprob_token_ids and most is None:
            raise invalid("logprob_token_ids: only with logprobs", "logprob_token_ids")
        if self.prompt_logprobs is not None and stream:
            raise invalid("prompt_logprobs: only without stream; echo with logprobs streams them", "prompt_logprobs")
        if self.prompt_logprobs_start and self.prompt_logprobs is None:
            raise invalid("prompt_logprobs_start: only with prompt_logprobs", "prompt_logprobs_start")
        return {
            "logprobs": None if self.logprob_token_ids else most,
            "logprob_token_ids": self.logprob_token_ids or None,
            "prompt_logprobs": self.prompt_logprobs,
            "prompt_logprobs_start": self.prompt_logprobs_start,
        }


def check_prompt_logprobs(prompts: Sequence[Sequence[int]], each: Sequence[SamplingParams]) -> None:
    """Check how many log-probabilities of prompts a request asks for; ApiError if too many."""
    scored = [(own.prompt_logprobs, prompt) for own, prompt in zip(each, prompts, strict=True)]
    entries = sum((1 + most) * len(prompt) for most, prompt in scored if most is not None)
    if entries > _MAX_ENTRIES:
        raise invalid(
            f"logprobs: {entries:,} of the tokens of prompts; there can be {_MAX_ENTRIES:,}: give fewer or shorter "
            "prompts, or smaller logprobs",
            "logprobs",
        )
