"""The body of a request to ``/v1/responses``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from compiled_llm.requests.sampling_params import SamplingParams
from compiled_llm.server.http.api_error import invalid
from compiled_llm.server.openai.chat.message import Message, plain_messages
from compiled_llm.server.openai.chat.request import Effort, StoredFields, effort_kwargs
from compiled_llm.server.openai.fields.fields import Body, Entries, NoEffect, RefusedField
from compiled_llm.server.openai.fields.response_format import (
    AnyFormat,
    Form,
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedSchema,
    PlainTextFormat,
)
from compiled_llm.server.openai.fields.sampling import SamplingFields, StreamOptions
from compiled_llm.server.openai.fields.tools import MAX_TOOLS, Function, NamedFunction, Offer, Tool
from compiled_llm.server.openai.responses.input import InputItem, messages_of

_LOGPROBS = "message.output_text.logprobs"


class SchemaFormat(NamedSchema):
    """JSON that follows a schema."""

    type: Literal["json_schema"]


class TextOptions(Body):
    """The form of the answer."""

    format: Annotated[PlainTextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Annotated[str | None, NoEffect("the model does not see it; say it in a message")] = None

    @property
    def form(self) -> AnyFormat | None:
        """As chats have it."""
        wanted = self.format
        if not isinstance(wanted, SchemaFormat):
            return wanted
        return JsonSchemaFormat(type="json_schema", json_schema=NamedSchema(schema=wanted.schema_))


class ReasoningOptions(Body):
    """How the model is to think."""

    effort: Effort | None = None
    summary: Annotated[str | None, NoEffect("the model's thinking comes as it is")] = None
    generate_summary: Annotated[str | None, NoEffect("the model's thinking comes as it is")] = None


class FlatTool(Function):
    """A function that the client runs."""

    type: Literal["function"]

    @property
    def tool(self) -> Tool:
        """As chats have it."""
        return Tool(type="function", function=Function(**self.model_dump(exclude={"type"})))


class FlatNamedTool(NamedFunction):
    """The tool that an answer has to call."""

    type: Literal["function"]


class ResponsesRequest(SamplingFields, StoredFields):
    """Text, or a chat, to answer."""

    input: str | Annotated[Entries[InputItem], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int | None, Field(ge=1)] = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    include: Entries[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    text: TextOptions | None = None
    tools: Annotated[Entries[FlatTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatNamedTool | None = None
    reasoning: ReasoningOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None

    stream_options: Annotated[StreamOptions | None, NoEffect("chunks are never padded")] = None
    access_programs: Annotated[Any, NoEffect("there are none")] = None
    max_tool_calls: Annotated[int | None, NoEffect("it is for tools that OpenAI runs")] = None

    background: Annotated[Any, RefusedField("the answer comes with the response", (False,))] = None
    background_options: Annotated[Any, RefusedField("the answer comes with the response")] = None
    context_management: Annotated[Any, RefusedField("nothing is left out of a chat")] = None
    conversation: Annotated[Any, RefusedField("nothing is stored")] = None
    image: Annotated[Any, RefusedField("answers are text")] = None
    previous_response_id: Annotated[Any, RefusedField("nothing is stored; send the whole chat as input")] = None
    prompt: Annotated[Any, RefusedField("there are no stored prompts; give input")] = None
    truncation: Annotated[Any, RefusedField("nothing is left out of a chat", ("disabled",))] = None

    @property
    def wants_logprobs(self) -> bool:
        return _LOGPROBS in (self.include or ()) or self.top_logprobs is not None

    @property
    def offer(self) -> Offer:
        """The tools that answers may call; ApiError if they contradict each other."""
        choice = self.tool_choice
        wanted = f"={choice.name}" if isinstance(choice, FlatNamedTool) else choice
        return Offer([tool.tool for tool in self.tools or ()], wanted, self.parallel_tool_calls is not False)

    @property
    def form(self) -> Form | None:
        """The form of the answer; ApiError or ValueError as of ``form_beside``."""
        return self.form_beside(None if self.text is None else self.text.form, "text.format")

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """Variables of the template besides messages and tools."""
        effort = None if self.reasoning is None else self.reasoning.effort
        return effort_kwargs(effort) | (self.chat_template_kwargs or {})

    def messages(self) -> list[dict[str, Any]]:
        """Return the chat as templates read it."""
        said = [Message(role="user", content=self.input)] if isinstance(self.input, str) else messages_of(self.input)
        first = [] if self.instructions is None else [Message(role="system", content=self.instructions)]
        return plain_messages([*first, *said])

    def sampling(self, defaults: Mapping[str, int | float]) -> SamplingParams:
        """Return the sampling parameters without the form; ApiError or ValueError if fields contradict each other."""
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options: only for stream=true", "stream_options")
        return self.params(
            defaults,
            max_tokens=self.max_output_tokens,
            logprobs=(self.top_logprobs or 0) if self.wants_logprobs else None,
        )
