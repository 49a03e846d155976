"""The body of a request to ``/v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from compiled_llm.requests.sampling_params import SamplingParams
from compiled_llm.server.http.api_error import invalid
from compiled_llm.server.openai.chat.message import ChatEnd, Message
from compiled_llm.server.openai.fields.fields import Body, Entries, NoEffect, RefusedField
from compiled_llm.server.openai.fields.sampling import ChoiceFields
from compiled_llm.server.openai.fields.tools import Offer, ToolChoice, Tools, choice_of

Effort = Annotated[str, Field(max_length=32)]  # how much a model is to think; which words there are, its template says


def effort_kwargs(effort: str | None) -> dict[str, Any]:
    """Return it as chat templates read it; some read ``enable_thinking`` alone."""
    if effort is None:
        return {}
    return {"reasoning_effort": effort} | ({"enable_thinking": False} if effort == "none" else {})


class StoredFields(Body):
    """OpenAI's fields of chats and of responses for what it keeps of them."""

    prompt_cache_key: Annotated[str | None, NoEffect("prompts are found by their tokens")] = None
    prompt_cache_options: Annotated[dict[str, Any] | None, NoEffect("prompts are kept while there is room")] = None
    prompt_cache_retention: Annotated[str | None, NoEffect("prompts are kept while there is room")] = None
    safety_identifier: Annotated[str | None, NoEffect("nothing is kept of users")] = None
    store: Annotated[bool | None, NoEffect("nothing is stored")] = None
    moderation: Annotated[Any, RefusedField("nothing is moderated")] = None
    service_tier: Annotated[Any, RefusedField("there is one tier", ("auto", "default"))] = None
    parallel_tool_calls: bool | None = None


class ChatRequest(ChoiceFields, ChatEnd, StoredFields):
    """A chat to continue: OpenAI's fields, then the sampling that vLLM has besides."""

    messages: Annotated[Entries[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    reasoning_effort: Effort | None = None

    metadata: Annotated[dict[str, str] | None, NoEffect("nothing is stored")] = None
    prediction: Annotated[dict[str, Any] | None, NoEffect("it could only make an answer come sooner")] = None
    verbosity: Annotated[str | None, NoEffect("the model does not see it; say it in a message")] = None

    audio: Annotated[Any, RefusedField("answers are text")] = None
    modalities: Annotated[Any, RefusedField("answers are text", (["text"],))] = None
    web_search_options: Annotated[Any, RefusedField("nothing is searched")] = None
    functions: Annotated[Any, RefusedField("give tools", ([],))] = None
    function_call: Annotated[Any, RefusedField("give tool_choice", ("none", "auto"))] = None
    chat_template: Annotated[Any, RefusedField("the model's own is used; another one could run for ever")] = None
    documents: Annotated[Any, RefusedField("give chat_template_kwargs, if the model's template reads them")] = None

    echo: bool | None = None
    include_reasoning: bool | None = None

    @property
    def offer(self) -> Offer:
        """The tools that answers may call; ApiError if they contradict each other."""
        return Offer(self.tools or (), choice_of(self.tool_choice), self.parallel_tool_calls is not False)

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """Variables of the template besides messages and tools."""
        return effort_kwargs(self.reasoning_effort) | (self.chat_template_kwargs or {})

    @property
    def echoed(self) -> str:
        """The text before each answer: the assistant's own last message, if that is asked for."""
        last = self.messages[-1]
        return last.text if self.echo and last.role == "assistant" else ""

    def sampling(self, defaults: Mapping[str, int | float]) -> SamplingParams:
        """Return the sampling parameters without the form; ApiError or ValueError if fields contradict each other."""
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid("top_logprobs: only with logprobs=true", "top_logprobs")
        scores = self.scores((self.top_logprobs or 0) if self.logprobs else None, bool(self.stream))
        self.check_stream()
        return self.params(
            defaults,
            max_tokens=self.max_completion_tokens or self.max_tokens,
            **scores,
        )
