"""The bodies of requests to ``/v1/systemone`` and ``/v1/decisions``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from compiled_llm.server.http.api_error import invalid
from compiled_llm.server.openai.fields.fields import Body, Entries, NoEffect, RefusedField
from compiled_llm.server.openai.fields.sampling import WaitingFields

Text = Annotated[str, Field(max_length=2**20)]
_NO_IMAGES = "questions are about text alone"


class SystemOneRequest(WaitingFields):
    """Questions about a state, as transformers and vLLM take them."""

    state: str | dict[str, Any] | list[Any]
    questions: Annotated[dict[str, Any], Field(min_length=1)]  # checked as transformers checks them
    assets: Annotated[Any, RefusedField(_NO_IMAGES, ({},))] = None


class StateText(Body):
    """A part of a message."""

    type: Literal["input_text"]
    text: str


class StateImage(Body):
    """A part that is refused."""

    type: Literal["input_image"]
    image_url: Any = None
    detail: Any = None
    file_id: Any = None


class StateMessage(Body):
    """A message of the state."""

    role: Literal["user"]
    content: str | Entries[Annotated[StateText | StateImage, Field(discriminator="type")]]
    type: Literal["message"] = "message"

    def text(self, path: str) -> str:
        """Return its texts, one a line; ApiError if it has an image, and ``path`` is the message's."""
        if isinstance(self.content, str):
            return self.content
        texts = []
        for place, part in enumerate(self.content):
            if isinstance(part, StateImage):
                field = f"{path}.content[{place}]"
                raise invalid(f"{field}: is not served: {_NO_IMAGES}", field, "unsupported_value")
            texts.append(part.text)
        return "\n".join(texts)


class PredicateQuestion(Body):
    """A question that is true or false."""

    type: Literal["predicate"]
    instructions: Text
    name: Text | None = None


class ChoiceOption(Body):
    """One of the values to choose from."""

    value: str | bool
    description: Text = ""


class ChoiceQuestion(Body):
    """A question that one of several values answers."""

    type: Literal["choice"]
    instructions: Text
    choices: Annotated[Entries[ChoiceOption], Field(min_length=2, max_length=255)]
    name: Text | None = None


class ScoreLevel(Body):
    """A level of a scale, which counts from 0."""

    label: Text
    description: Text = ""


class ScoreQuestion(Body):
    """A question that a level of a scale answers."""

    type: Literal["score"]
    instructions: Text
    levels: Annotated[Entries[ScoreLevel], Field(min_length=2, max_length=10)]
    name: Text | None = None


AnyQuestion = PredicateQuestion | ChoiceQuestion | ScoreQuestion


class DecisionsRequest(WaitingFields):
    """Questions about an input, as OpenAI's Decisions API and vLLM take them."""

    input: str | Annotated[Entries[StateMessage], Field(min_length=1)]
    questions: Annotated[Entries[Annotated[AnyQuestion, Field(discriminator="type")]], Field(min_length=1)]
    safety_identifier: Annotated[str | None, NoEffect("nothing is kept of users")] = None

    def state(self) -> str:
        """Return the texts of the input, one after the other; ApiError if it has an image."""
        if isinstance(self.input, str):
            return self.input
        return "\n\n".join(message.text(f"input[{place}]") for place, message in enumerate(self.input))
