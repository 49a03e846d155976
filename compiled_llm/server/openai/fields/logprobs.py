"""Fields of chats and completions that ask for log-probabilities, besides OpenAI's own: vLLM's."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from compiled_llm.requests.sampling_params import MAX_LOGPROB_TOKEN_IDS
from compiled_llm.server.http.api_error import invalid
from compiled_llm.server.openai.fields.fields import Body, Entries


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
