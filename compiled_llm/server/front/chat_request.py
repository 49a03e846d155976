"""The body of a request to ``/v1/chat/completions``."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from compiled_llm.engine.params import SamplingParams
from compiled_llm.server.front.api_error import invalid
from compiled_llm.server.front.chat_message import Message
from compiled_llm.server.front.fields import Entries, NoEffect, Refused
from compiled_llm.server.front.response_format import ResponseFormat
from compiled_llm.server.front.sampling_fields import SamplingFields
from compiled_llm.server.front.tool_fields import Offer, ToolChoice, Tools, choice_of


class ChatRequest(SamplingFields):
    """A chat to continue: OpenAI's fields, then the sampling that vLLM has besides."""

    messages: Annotated[Entries[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    response_format: ResponseFormat | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    metadata: Annotated[dict[str, str] | None, NoEffect("nothing is stored")] = None
    safety_identifier: Annotated[str | None, NoEffect("nothing is kept of users")] = None
    prediction: Annotated[dict[str, Any] | None, NoEffect("it could only make an answer come sooner")] = None
    prompt_cache_key: Annotated[str | None, NoEffect("prompts are found by their tokens")] = None
    prompt_cache_options: Annotated[dict[str, Any] | None, NoEffect("prompts are kept while there is room")] = None
    prompt_cache_retention: Annotated[str | None, NoEffect("prompts are kept while there is room")] = None

    audio: Annotated[Any, Refused("answers are text")] = None
    modalities: Annotated[Any, Refused("answers are text", (["text"],))] = None
    moderation: Annotated[Any, Refused("nothing is moderated")] = None
    reasoning_effort: Annotated[Any, Refused("give chat_template_kwargs, which the model's template reads")] = None
    service_tier: Annotated[Any, Refused("there is one tier", ("auto", "default"))] = None
    store: Annotated[Any, Refused("nothing is stored", (False,))] = None
    verbosity: Annotated[Any, Refused("say it in a message", ("medium",))] = None
    web_search_options: Annotated[Any, Refused("nothing is searched")] = None
    functions: Annotated[Any, Refused("give tools", ([],))] = None
    function_call: Annotated[Any, Refused("give tool_choice", ("none", "auto"))] = None

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def offer(self) -> Offer:
        """The tools that answers may call.

        Raises:
            ApiError: they are at odds.
        """
        return Offer(self.tools or (), choice_of(self.tool_choice), self.parallel_tool_calls is not False)

    def sampling(self) -> SamplingParams:
        """Return what the engine is asked for, but for the form.

        Raises:
            ApiError: something contradicts itself.
            ValueError: as of ``SamplingParams``.
        """
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid("top_logprobs: only with logprobs=true", "top_logprobs")
        return self.params(
            max_tokens=self.max_completion_tokens or self.max_tokens,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )
