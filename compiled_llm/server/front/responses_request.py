"""The body of a request to ``/v1/responses``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from compiled_llm.engine.params import SamplingParams
from compiled_llm.server.front.api_error import invalid
from compiled_llm.server.front.fields import Body, NoEffect, Refused
from compiled_llm.server.front.response_format import (
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedSchema,
    TextFormat,
    form_of,
)
from compiled_llm.server.front.sampling_fields import StreamOptions

_TOOLS = "tools are not called"
_NOT_STORED = "nothing is stored"
_LOGPROBS = "message.output_text.logprobs"


class InputText(Body):
    """A piece of a message, a user's or what was answered before."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Annotated[list[Any] | None, NoEffect("the model sees the text")] = None
    logprobs: Annotated[list[Any] | None, NoEffect("the model sees the text")] = None


class InputMessage(Body):
    """A message of a chat."""

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[InputText]
    id: Annotated[str | None, NoEffect("nothing is stored")] = None
    status: Annotated[str | None, NoEffect("nothing is stored")] = None
    phase: Annotated[str | None, NoEffect("chat templates do not write it")] = None

    def plain(self) -> dict[str, str]:
        """Return it as chat templates read it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class SchemaFormat(NamedSchema):
    """What a JSON schema describes."""

    type: Literal["json_schema"]


class TextOptions(Body):
    """The form of the answer."""

    format: Annotated[TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Annotated[Any, Refused("say it in a message", ("medium",))] = None

    def form(self) -> dict[str, Any]:
        """Return the settings of ``SamplingParams`` for it."""
        wanted = self.format
        if not isinstance(wanted, SchemaFormat):
            return form_of(wanted)
        return form_of(JsonSchemaFormat(type="json_schema", json_schema=NamedSchema(schema=wanted.schema_)))


class ResponsesRequest(Body):
    """Text, or a chat, to answer."""

    model: str | None = None
    input: str | Annotated[list[InputMessage], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int | None, Field(ge=1)] = None
    temperature: Annotated[float | None, Field(ge=0)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    text: TextOptions | None = None
    stream: bool | None = None
    metadata: dict[str, str] | None = None

    stream_options: Annotated[StreamOptions | None, NoEffect("chunks are never padded")] = None
    user: Annotated[str | None, NoEffect("nothing is kept of users; with --salt-caches, it is a salt")] = None
    safety_identifier: Annotated[str | None, NoEffect("nothing is kept of users")] = None
    access_programs: Annotated[Any, NoEffect("there are none")] = None
    prompt_cache_key: Annotated[str | None, NoEffect("prompts are found by their tokens")] = None
    prompt_cache_options: Annotated[dict[str, Any] | None, NoEffect("prompts are kept while there is room")] = None
    prompt_cache_retention: Annotated[str | None, NoEffect("prompts are kept while there is room")] = None
    parallel_tool_calls: Annotated[bool | None, NoEffect(_TOOLS)] = None
    max_tool_calls: Annotated[int | None, NoEffect(_TOOLS)] = None

    background: Annotated[Any, Refused("the answer comes with the response", (False,))] = None
    background_options: Annotated[Any, Refused("the answer comes with the response")] = None
    context_management: Annotated[Any, Refused("nothing is left out of a chat")] = None
    conversation: Annotated[Any, Refused(_NOT_STORED)] = None
    image: Annotated[Any, Refused("answers are text")] = None
    moderation: Annotated[Any, Refused("nothing is moderated")] = None
    previous_response_id: Annotated[Any, Refused("nothing is stored; send the whole chat as input")] = None
    prompt: Annotated[Any, Refused("there are no stored prompts; give input")] = None
    reasoning: Annotated[Any, Refused("the model's template decides it", ({},))] = None
    service_tier: Annotated[Any, Refused("there is one tier", ("auto", "default"))] = None
    store: Annotated[Any, Refused(_NOT_STORED, (False,))] = None
    tools: Annotated[Any, Refused(_TOOLS, ([],))] = None
    tool_choice: Annotated[Any, Refused(_TOOLS, ("none", "auto"))] = None
    truncation: Annotated[Any, Refused("nothing is left out of a chat", ("disabled",))] = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities are to be in the answer."""
        return bool(self.include) or self.top_logprobs is not None

    def messages(self) -> list[dict[str, str]]:
        """Return the chat as templates read it."""
        said = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self._plain(self.input)
        return said if self.instructions is None else [{"role": "system", "content": self.instructions}, *said]

    @staticmethod
    def _plain(messages: list[InputMessage]) -> list[dict[str, str]]:
        return [message.plain() for message in messages]

    def sampling(self) -> SamplingParams:
        """Return what the engine is asked for.

        Raises:
            ApiError: something contradicts itself.
            ValueError: as of ``SamplingParams``.
        """
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options: only for stream=true", "stream_options")
        given: dict[str, Any] = {"temperature": self.temperature, "top_p": self.top_p}
        return SamplingParams(
            max_tokens=self.max_output_tokens,
            logprobs=(self.top_logprobs or 0) if self.wants_logprobs else None,
            **{name: value for name, value in given.items() if value is not None},
            **({} if self.text is None else self.text.form()),
        )
