"""Parts of a message: texts and images; others are refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Tag, ValidationInfo
from pydantic_core import PydanticCustomError

from compiled_llm.server.openai.fields.fields import Body, NoEffect, RefusedField

_OTHERS = {
    "video_url": "videos are not read",
    "input_video": "videos are not read",
    "input_audio": "sound is not read",
    "audio_url": "sound is not read",
    "file": "files are not read; give their text",
    "input_file": "files are not read; give their text",
    "image_pil": "give image_url",
    "image_embeds": "give image_url",
    "image": "give image_url",
}
_OF_MODEL = NoEffect("the model's processor says in how many tokens an image is seen")


class TextPart(Body):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class ImageUrl(Body):
    """The place of an image: its data, or an address that the server may ask."""

    url: str
    detail: Annotated[str | None, _OF_MODEL] = None


class ImagePart(Body):
    """An image in a message."""

    type: Literal["image_url"]
    image_url: ImageUrl


def _refused(kind: str) -> str:
    why = _OTHERS.get(kind, "parts are texts and images")
    raise PydanticCustomError("value_error", "is not served: {why}", {"why": why, "code": "unsupported_value"})


class OtherPart(Body, extra="ignore"):
    """A part of another type."""

    type: Annotated[str, AfterValidator(_refused)]


def _kind_of(part: object) -> str:
    kind = part.get("type", "text") if isinstance(part, dict) else getattr(part, "type", "text")
    return {"text": "a text", "image_url": "an image"}.get(kind, "another") if isinstance(kind, str) else "a text"


Part = Annotated[
    Annotated[TextPart, Tag("a text")] | Annotated[ImagePart, Tag("an image")] | Annotated[OtherPart, Tag("another")],
    Discriminator(_kind_of),
]


class InputText(Body):
    """A piece of a message, a user's or an earlier answer's."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Annotated[list[Any] | None, NoEffect("the model sees the text")] = None
    logprobs: Annotated[list[Any] | None, NoEffect("the model sees the text")] = None


class InputImage(Body):
    """An image in a message of ``/v1/responses``."""

    type: Literal["input_image"]
    image_url: str
    detail: Annotated[str | None, _OF_MODEL] = None
    file_id: Annotated[Any, RefusedField("nothing is stored; give image_url")] = None


def _kind_of_input(part: object) -> str:
    kind = part.get("type", "text") if isinstance(part, dict) else getattr(part, "type", "text")
    if not isinstance(kind, str) or kind in ("input_text", "output_text", "text"):
        return "a text"
    return "an image" if kind == "input_image" else "another"


InputPart = Annotated[
    Annotated[InputText, Tag("a text")] | Annotated[InputImage, Tag("an image")] | Annotated[OtherPart, Tag("another")],
    Discriminator(_kind_of_input),
]


def check_seen(content: object, info: ValidationInfo, kind: type[Body]) -> None:
    """Raise an error of pydantic's if another message than the user's has an image, a part of that ``kind``."""
    parts = content if isinstance(content, list) else ()
    if info.data.get("role") != "user" and any(isinstance(part, kind) for part in parts):
        raise PydanticCustomError("value_error", "has an image, which only messages of the user can have")
