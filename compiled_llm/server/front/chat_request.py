"""The body of a request to ``/v1/chat/completions``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from compiled_llm.engine.params import SamplingParams
from compiled_llm.server.front.api_error import invalid
from compiled_llm.server.front.fields import Body, NoEffect, Refused
from compiled_llm.server.front.response_format import ResponseFormat, form_of
from compiled_llm.server.front.sampling_fields import SamplingFields

_TOOLS = "tools are not called"


class TextPart(Body):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class Message(Body):
    """A message of a chat; ``developer`` is what ``system`` was."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: Annotated[str | None, NoEffect("chat templates do not write names")] = None
    refusal: Annotated[None, Refused("an assistant's refusal is its content")] = None
    audio: Annotated[None, Refused("messages are text")] = None
    tool_calls: Annotated[Any, Refused(_TOOLS, ([],))] = None
    function_call: Annotated[Any, Refused(_TOOLS)] = None

    def plain(self) -> dict[str, str]:
        """Return it as chat templates read it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatRequest(SamplingFields):
    """A chat to continue: OpenAI's fields, then the sampling that vLLM has besides."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    response_format: ResponseFormat | None = None

    metadata: Annotated[dict[str, str] | None, NoEffect("nothing is stored")] = None
    safety_identifier: Annotated[str | None, NoEffect("nothing is kept of users")] = None
    prediction: Annotated[dict[str, Any] | None, NoEffect("it could only make an answer come sooner")] = None
    prompt_cache_key: Annotated[str | None, NoEffect("prompts are found by their tokens")] = None
    prompt_cache_options: Annotated[dict[str, Any] | None, NoEffect("prompts are kept while there is room")] = None
    prompt_cache_retention: Annotated[str | None, NoEffect("prompts are kept while there is room")] = None
    parallel_tool_calls: Annotated[bool | None, NoEffect(_TOOLS)] = None

    audio: Annotated[Any, Refused("answers are text")] = None
    modalities: Annotated[Any, Refused("answers are text", (["text"],))] = None
    moderation: Annotated[Any, Refused("nothing is moderated")] = None
    reasoning_effort: Annotated[Any, Refused("give chat_template_kwargs, which the model's template reads")] = None
    service_tier: Annotated[Any, Refused("there is one tier", ("auto", "default"))] = None
    store: Annotated[Any, Refused("nothing is stored", (False,))] = None
    verbosity: Annotated[Any, Refused("say it in a message", ("medium",))] = None
    web_search_options: Annotated[Any, Refused("nothing is searched")] = None
    tools: Annotated[Any, Refused(_TOOLS, ([],))] = None
    tool_choice: Annotated[Any, Refused(_TOOLS, ("none", "auto"))] = None
    functions: Annotated[Any, Refused(_TOOLS, ([],))] = None
    function_call: Annotated[Any, Refused(_TOOLS, ("none", "auto"))] = None

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def sampling(self) -> SamplingParams:
        """Return what the engine is asked for.

        Raises:
            ApiError: something contradicts itself.
            ValueError: as of ``SamplingParams``.
        """
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid("top_logprobs: only with logprobs=true", "top_logprobs")
        return self.params(
            max_tokens=self.max_completion_tokens or self.max_tokens,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            **form_of(self.response_format),
        )
