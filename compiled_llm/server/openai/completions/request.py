"""The body of a request to ``/v1/completions``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from compiled_llm.requests.sampling_params import SamplingParams
from compiled_llm.server.http.api_error import invalid
from compiled_llm.server.openai.fields.fields import Entries, NoEffect, RefusedField
from compiled_llm.server.openai.fields.response_format import Form
from compiled_llm.server.openai.fields.sampling import ChoiceFields

_MAX_TOKENS = 16  # as OpenAI's, where a request does not say


class CompletionRequest(ChoiceFields):
    """Text, or several texts, to continue: OpenAI's fields, then the sampling that vLLM has besides."""

    prompt: str | Entries[str] | Entries[int] | Entries[Entries[int]]
    max_tokens: Annotated[int | None, Field(ge=0)] = None
    logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    best_of: Annotated[int | None, NoEffect("it has to be n: no answers are drawn and left out")] = None

    prompt_embeds: Annotated[Any, RefusedField("a prompt is text, or token ids")] = None
    suffix: Annotated[Any, RefusedField("text is continued, and not filled in", ("",))] = None

    def prompts(self) -> list[str] | list[list[int]]:
        """Return each prompt; ApiError if there is none."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise invalid("prompt: is empty", "prompt")
        given: Any = self.prompt
        several: list[str] | list[list[int]] = [given] if isinstance(given[0], int) else given
        return several

    def sampling(self, form: Form | None, defaults: Mapping[str, int | float]) -> SamplingParams:
        """Return the sampling parameters with a form; ApiError or ValueError if fields contradict each other."""
        if self.best_of not in (None, self.answers):
            raise invalid(f"best_of: has to be n={self.answers}; no answers are drawn and left out", "best_of")
        scores = self.scores(self.logprobs, bool(self.stream))
        self.check_stream()
        if self.prompt_logprobs_start and self.echo:
            raise invalid("prompt_logprobs_start: without echo, which has all of the prompt", "prompt_logprobs_start")
        if self.echo and self.logprobs is not None:
            scores["prompt_logprobs"] = max(self.logprobs, self.prompt_logprobs or 0)
        most = _MAX_TOKENS if self.max_tokens is None else self.max_tokens
        return self.params(
            defaults,
            form,
            max_tokens=most,
            **scores,
        )
